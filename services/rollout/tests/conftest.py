"""One vLLM engine for the whole session, tiny random models made on the fly, and a stack around any engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import pytest_asyncio
import torch

from vime_rollout.config import UpdateConfig, VllmConfig
from vime_rollout.engine import Engine, PauseMode, SamplingSettings
from vime_rollout.engines.fake import FakeEngine
from vime_rollout.generation import GeneratedSample, Generation
from vime_rollout.requests import GenerationRequest
from vime_rollout.tokenizing import TokenizerThread
from vime_rollout.traffic import Traffic
from vime_rollout.transfers import Rendezvous
from vime_rollout.updates import CanaryPrompt, CommittedUpdate, Updater
from vime_rollout.weights import ANY_WEIGHTS, Fence, WeightState
from vime_service.bulk import Deadline, Manifest, Transport, VersionKey, WeightSender
from vime_service.bulk.inline import InlineHub, InlineTransport
from vime_service.bulk.layout import BucketLayout

Weights = Mapping[str, torch.Tensor]


def version(step: int, incarnation: int = 1, run: str = "run") -> VersionKey:
    return VersionKey(run, incarnation, step)


def manifest_of(step: int, weights: Weights, incarnation: int = 1) -> Manifest:
    return Manifest.of(version(step, incarnation), weights.items(), BucketLayout(64 << 10))


@dataclass
class Stack:
    """An engine with everything the service builds around it, without gRPC."""

    engine: Engine
    config: UpdateConfig
    weights: WeightState = field(default_factory=WeightState)
    hub: InlineHub = field(default_factory=InlineHub)
    sends: int = 0

    def __post_init__(self) -> None:
        self.traffic = Traffic(self.weights)
        self.generation = Generation(self.engine, self.traffic, TokenizerThread())
        self.updater = Updater(self.engine, self.weights, self.traffic, self.generation, self.config, join=self._join)

    def _join(self, rendezvous: Rendezvous, deadline: Deadline) -> Transport:
        return InlineTransport(self.hub, str(rendezvous.rank))

    async def stage(self, manifest: Manifest, weights: Weights, timeout_s: float = 10) -> None:
        """Prepare, send and await; returns once staged."""
        self.sends += 1
        rendezvous = Rendezvous("inline", "", self.sends, 1, 2)
        prepared = await self.updater.prepare(manifest, rendezvous, timeout_s)
        if prepared.already_serving:
            return
        sender = InlineTransport(self.hub, "0")

        def send() -> None:
            sender.form(rendezvous.generation, rendezvous.members, Deadline.after(timeout_s))
            WeightSender(sender, manifest, weights).send(Deadline.after(timeout_s))

        await asyncio.gather(asyncio.to_thread(send), self.updater.await_staged(manifest.version, timeout_s))

    async def publish(
        self,
        step: int,
        weights: Weights,
        canary: Sequence[CanaryPrompt] = (),
        mode: PauseMode = PauseMode.KEEP,
        incarnation: int = 1,
    ) -> CommittedUpdate:
        """A whole update."""
        manifest = manifest_of(step, weights, incarnation)
        await self.stage(manifest, weights)
        return await self.updater.commit(manifest.version, canary, 1e-4, mode)

    async def generate(
        self,
        request_id: str,
        prompt: Sequence[int],
        seeds: Sequence[int] = (1,),
        fence: Fence = ANY_WEIGHTS,
        **options: Any,
    ) -> list[GeneratedSample]:
        """Generate with defaults for what a test does not care about."""
        return await self.generation.generate(request_of(request_id, prompt, seeds, fence, **options), 20)


def request_of(
    request_id: str, prompt: Sequence[int], seeds: Sequence[int] = (1,), fence: Fence = ANY_WEIGHTS, **options: Any
) -> GenerationRequest:
    own = {k: options.pop(k) for k in list(options) if k in GenerationRequest.__dataclass_fields__}
    sampling = own.pop("sampling", None) or SamplingSettings(**({"max_tokens": 8, "ignore_eos": True} | options))
    return GenerationRequest(request_id, list(prompt), sampling, list(seeds), fence, **own)


@pytest.fixture
def update_config(tmp_path: Path) -> UpdateConfig:
    (tmp_path / "payloads").mkdir()
    return UpdateConfig(staging_dir=tmp_path, payload_dir=tmp_path / "payloads", transfer_timeout_seconds=10)


@pytest_asyncio.fixture
async def fake_stack(update_config: UpdateConfig) -> AsyncIterator[Stack]:
    """The fake engine, empty, with its stack."""
    stack = Stack(FakeEngine(), update_config)
    yield stack
    await stack.updater.close()
    await stack.engine.stop()


# ---------------------------------------------------------------- real models

VOCAB = 320


def make_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {piece: index for index, piece in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for special in ("<|endoftext|>", "<|im_start|>", "<|im_end|>"):
        vocab[special] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
    )
    fast.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return fast


def make_model(path: Path, seed: int, tied: bool = False, head_dim: int = 32) -> Any:
    """A random Qwen3-MoE of 3 layers, the middle one dense, fp32, with its tokenizer, saved to `path`."""
    from transformers import GenerationConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[1],
        max_position_embeddings=1024,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=258,
        pad_token_id=256,
        tie_word_embeddings=tied,
    )
    model = Qwen3MoeForCausalLM(config).float().eval()
    model.generation_config = GenerationConfig(eos_token_id=[258, 256])
    model.save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return model


@dataclass
class TinyModel:
    """A saved model, its weights under their checkpoint names, and the HF module for reference."""

    path: Path
    weights: dict[str, torch.Tensor]
    reference: Any

    def logprobs(self, ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """Logprobs of ids 1 and later, by HF."""
        with torch.no_grad():
            rows = self.reference(torch.tensor([list(ids)])).logits[0, :-1].log_softmax(-1)
        picked: npt.NDArray[np.float32] = rows.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].numpy()
        return picked

    def routes(self, ids: Sequence[int]) -> npt.NDArray[np.uint8]:
        """Experts of all ids but the last, by HF, in order of their score: `[n - 1, moe_layers, top_k]`."""
        with torch.no_grad():
            logits = self.reference(torch.tensor([list(ids)]), output_router_logits=True).router_logits
        chosen = [layer.topk(2, dim=-1).indices for layer in logits if layer is not None and layer.shape[-1] == 8]
        stacked: npt.NDArray[np.uint8] = torch.stack(chosen, dim=1)[: len(ids) - 1].numpy().astype(np.uint8)
        return stacked


def tiny_model(path: Path, seed: int, tied: bool = False) -> TinyModel:
    from safetensors.torch import load_file

    reference = make_model(path, seed, tied)
    return TinyModel(path, load_file(path / "model.safetensors"), reference)


@pytest.fixture(scope="session")
def model_a(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """What the engine starts with."""
    return tiny_model(tmp_path_factory.mktemp("models") / "a", 0)


@pytest.fixture(scope="session")
def model_b(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """What it is updated to."""
    return tiny_model(tmp_path_factory.mktemp("models") / "b", 1)


@pytest.fixture(scope="session")
def vllm_config(model_a: TinyModel) -> VllmConfig:
    return VllmConfig(
        model=str(model_a.path),
        dtype="float32",
        max_model_len=512,
        max_num_seqs=16,
        max_num_batched_tokens=64,
        kv_cache_tokens=8192,
    )


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def vllm_engine(vllm_config: VllmConfig, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Any]:
    """One real engine for every test of the session."""
    from vime_rollout.engines.vllm import VllmEngine

    engine = VllmEngine(vllm_config)
    await engine.start()
    yield engine
    await engine.stop()


@pytest.fixture(scope="session")
def session_update_config(tmp_path_factory: pytest.TempPathFactory) -> UpdateConfig:
    return UpdateConfig(staging_dir=tmp_path_factory.mktemp("staging"))


torch.set_num_threads(1)
