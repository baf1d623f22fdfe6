"""Side by side with TRL: the same tensors through its trainers' own loss and advantage code and through ours.

Needs an environment of its own (`pip install trl==1.16.0 accelerate datasets` beside torch and transformers); skipped
where trl is not importable. docs/algorithms.md holds the table of what agrees and why the rest differs.
"""

from __future__ import annotations

import math
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("trl", reason="trl is not installed; see the docstring for the environment")

from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from vime_trainer.algorithms import (
    AdvantageConfig,
    AdvantageInputs,
    CorrectionConfig,
    PolicyBatch,
    PolicyLossConfig,
    batch_denominators,
    compute_advantages,
    icepop,
    index_of,
    policy_loss,
)

SAMPLES, TOKENS, LIMIT = 6, 9, 16


class Case:
    """Off-policy logprobs, uneven lengths with a tool gap, advantages of both signs; no empty sample."""

    def __init__(self, seed: int, spread: float = 0.3) -> None:
        g = torch.Generator().manual_seed(seed)

        def normal(scale: float) -> torch.Tensor:
            return scale * torch.randn(SAMPLES, TOKENS, generator=g, dtype=torch.float64)

        self.old = -1 - normal(1.0).abs()
        self.logprobs = self.old + normal(spread)
        self.ref, self.rollout = self.old + normal(0.4), self.old + normal(0.4)
        self.entropy = normal(1.0).abs()
        self.advantages = torch.randn(SAMPLES, generator=g, dtype=torch.float64)
        lengths = torch.randint(1, TOKENS + 1, (SAMPLES, 1), generator=g)
        self.mask = torch.arange(TOKENS)[None] < lengths
        self.mask[0] = torch.tensor([1, 1, 0, 0, 1, 1, 1, 0, 0]).bool()

    def ours(self, config: PolicyLossConfig) -> tuple[float, torch.Tensor]:
        logprobs, entropy = self.logprobs.clone().requires_grad_(), self.entropy
        batch = PolicyBatch(
            logprobs, self.advantages[:, None].expand_as(logprobs), self.mask, self.old, self.rollout, self.ref, entropy
        )
        loss = policy_loss(batch, config, batch_denominators(batch, config)).loss
        return loss.item(), torch.autograd.grad(loss, logprobs)[0]

    def trl(self, correction: torch.Tensor | None = None, **settings: object) -> tuple[float, torch.Tensor]:
        """`GRPOTrainer._compute_loss` on our tensors: only the model's forward is replaced."""
        logprobs = self.logprobs.clone().requires_grad_()
        args = SimpleNamespace(delta=settings.pop("delta", None), steps_per_generation=1,
                               use_bias_correction_kl=settings.pop("use_bias_correction_kl", False))  # fmt: skip
        trainer = SimpleNamespace(
            **trainer_stub(logprobs, self.entropy), args=args, max_completion_length=LIMIT,
            get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
            use_vllm=correction is not None, vllm_importance_sampling_correction=True,
        )  # fmt: skip
        defaults = {
            "loss_type": "grpo", "epsilon_low": 0.2, "epsilon_high": 0.2, "beta": 0.0, "importance_sampling_level":
            "token", "off_policy_mask_threshold": None, "top_entropy_quantile": 1.0, "entropy_coef": 0.0,
            "use_adaptive_entropy": False,
        }  # fmt: skip
        for name, value in (defaults | settings).items():
            setattr(trainer, name, value)
        trainer._entropy_bonus_enabled = trainer.entropy_coef != 0
        inputs = {
            **prompt_and_completion(self.mask), "advantages": self.advantages, "old_per_token_logps": self.old,
            "ref_per_token_logps": self.ref, "num_items_in_batch": self.mask.sum(),
        }  # fmt: skip
        if correction is not None:
            inputs["importance_sampling_ratio"] = correction
        loss = GRPOTrainer._compute_loss(trainer, None, inputs)
        return loss.item(), torch.autograd.grad(loss, logprobs)[0]


def trainer_stub(logprobs: torch.Tensor, entropy: torch.Tensor) -> dict[str, object]:
    """What both trainers' loss functions ask of `self` besides settings: a model's output and a one-process world."""
    accelerator = SimpleNamespace(
        num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x, gather_for_metrics=lambda x: x,
        sync_gradients=True,
    )  # fmt: skip
    return {
        "_get_per_token_logps_and_entropies": lambda *_, **__: (logprobs, entropy, None),
        "accelerator": accelerator, "model": SimpleNamespace(training=True), "aux_loss_enabled": False,
        "current_gradient_accumulation_steps": 1, "_metrics": {"train": defaultdict(list)},
    }  # fmt: skip


def prompt_and_completion(mask: torch.Tensor) -> dict[str, torch.Tensor]:
    ones = torch.ones(SAMPLES, 1, dtype=torch.long)
    return {"prompt_ids": ones, "prompt_mask": ones, "completion_ids": torch.ones_like(mask, dtype=torch.long),
            "completion_mask": mask.long()}  # fmt: skip


LOSSES = {
    "GRPO": ({}, PolicyLossConfig()),
    "GRPO, clip-higher, k3 KL": (
        {"epsilon_high": 0.28, "beta": 0.1},
        PolicyLossConfig(eps_clip_high=0.28, kl_loss_coef=0.1, kl_loss_type="k3"),
    ),
    "GRPO, unbiased k3 KL": (
        {"beta": 0.1, "use_bias_correction_kl": True},
        PolicyLossConfig(kl_loss_coef=0.1, kl_loss_type="k3", unbiased_kl=True),
    ),
    "two-sided clip (delta) = dual clip": ({"delta": 1.3}, PolicyLossConfig(eps_clip_c=1.3)),
    "DAPO": (
        {"loss_type": "dapo", "epsilon_high": 0.28},
        PolicyLossConfig(eps_clip_high=0.28, reducer="token_mean"),
    ),
    "Dr.GRPO": ({"loss_type": "dr_grpo"}, PolicyLossConfig(reducer="fixed_length", fixed_length=LIMIT)),
    "GSPO": (
        {"importance_sampling_level": "sequence", "epsilon_low": 3e-2, "epsilon_high": 4e-2},
        PolicyLossConfig(objective="gspo", eps_clip=3e-2, eps_clip_high=4e-2),
    ),
    # TRL's epsilon_high is the bound of the weight itself, ours its distance from 1; TRL has no lower bound
    "CISPO": (
        {"loss_type": "cispo", "epsilon_high": 1.2},
        PolicyLossConfig(objective="cispo", eps_clip=1.0, eps_clip_high=0.2, reducer="token_mean"),
    ),
    "OPSM": ({"off_policy_mask_threshold": 1e-2}, PolicyLossConfig(opsm_delta=1e-2)),
    "DAPO with entropy bonus": (
        {"loss_type": "dapo", "entropy_coef": 0.05},
        PolicyLossConfig(entropy_coef=0.05, reducer="token_mean"),
    ),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("seed", range(3))
def test_the_loss_and_its_gradient_equal_trls(name: str, seed: int) -> None:
    settings, config = LOSSES[name]
    case = Case(seed)
    (theirs, their_gradient), (ours, our_gradient) = case.trl(**settings), case.ours(config)
    assert ours == pytest.approx(theirs, rel=1e-9)
    torch.testing.assert_close(our_gradient, their_gradient, rtol=1e-9, atol=1e-12)
    assert our_gradient.abs().sum() > 0


TRL_MODES = {
    "token_truncate": (
        lambda r, m: r.clamp(min=0.0, max=1.5),
        CorrectionConfig(level="token", mode="clip", low=0.0, high=1.5),
    ),
    "token_mask": (lambda r, m: r.masked_fill((r < 0.7) | (r > 1.5), 0.0), icepop(0.7, 1.5)),
}


@pytest.mark.parametrize("mode", TRL_MODES)
def test_the_engine_mismatch_correction_equals_trls(mode: str) -> None:
    """TRL takes ready weights here; they are formed as its `_generate_and_score_completions` forms them."""
    weigh, correction = TRL_MODES[mode]
    case = Case(1)
    ratio = torch.exp((case.old - case.rollout) * case.mask)
    theirs, their_gradient = case.trl(correction=weigh(ratio, case.mask))
    ours, our_gradient = case.ours(PolicyLossConfig(correction=correction))
    assert ours == pytest.approx(theirs, rel=1e-9)
    torch.testing.assert_close(our_gradient, their_gradient, rtol=1e-9, atol=1e-12)


def test_on_policy_rloo_has_trls_gradient() -> None:
    """TRL's RLOO works on Σ_t log π of a sample: on policy its gradient is −A/B for every token, which is ours with
    the fixed_length reducer and length 1. Off policy they differ: TRL clips the product of the token ratios.
    """
    case = Case(2, spread=0.0)
    logprobs = case.logprobs.clone().requires_grad_()
    trainer = SimpleNamespace(**trainer_stub(logprobs, case.entropy), epsilon_low=0.2, epsilon_high=0.2)
    inputs = {**prompt_and_completion(case.mask), "advantages": case.advantages,
              "old_logps": (case.old * case.mask).sum(1)}  # fmt: skip
    loss = RLOOTrainer._compute_loss(trainer, None, inputs)
    theirs = torch.autograd.grad(loss, logprobs)[0]
    _, ours = case.ours(PolicyLossConfig(reducer="fixed_length", fixed_length=1))
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def test_an_empty_sample_counts_in_trls_mean_and_not_in_ours() -> None:
    case = Case(0)
    case.mask[3] = False
    for settings, config in (LOSSES["GRPO"], LOSSES["Dr.GRPO"]):
        theirs, ours = case.trl(**settings)[0], case.ours(config)[0]
        assert ours == pytest.approx(theirs * SAMPLES / (SAMPLES - 1), rel=1e-9)


# ---- advantages: whole trainers on a tiny random model, so that TRL's own code forms them


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", *"abcdefgh"]
    raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>")
    config = LlamaConfig(vocab_size=len(words), hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                         num_attention_heads=2, num_key_value_heads=2, pad_token_id=0, eos_token_id=1,
                         bos_token_id=1)  # fmt: skip
    return SimpleNamespace(
        tokenizer=tokenizer, model=lambda: LlamaForCausalLM(config), out=tmp_path_factory.mktemp("trl")
    )


def trl_advantages(tiny, trainer_class, config_class, rewards, **settings):
    """The advantages a TRL trainer forms for two prompts with four completions each and these rewards."""
    import pyarrow
    from datasets import Dataset, disable_caching
    from datasets.table import InMemoryTable

    disable_caching()
    # with a name of its own: the one that `from_dict` finds pickles the table, which not every pyarrow stands
    prompts = Dataset(InMemoryTable(pyarrow.table({"prompt": ["a b", "c d"]})), fingerprint="prompts")
    args = config_class(
        output_dir=str(tiny.out), per_device_train_batch_size=8, num_generations=4, max_completion_length=4,
        report_to="none", use_cpu=True, bf16=False, max_steps=1, save_strategy="no", disable_tqdm=True,
        logging_strategy="no", **settings,
    )  # fmt: skip
    trainer = trainer_class(
        model=tiny.model(), reward_funcs=lambda prompts, **_: list(rewards), args=args,
        train_dataset=prompts, processing_class=tiny.tokenizer,
    )  # fmt: skip
    trainer.train()
    return torch.tensor(list(trainer._logs["advantages"]), dtype=torch.float64)


def our_advantages(estimator, rewards):
    numbers = torch.tensor([math.nan if reward is None else reward for reward in rewards], dtype=torch.float64)
    inputs = AdvantageInputs(
        numbers, torch.ones(8, 1), index_of("aaaabbbb"), old_logprobs_BT=torch.zeros(8, 1).double()
    )
    return compute_advantages(inputs, AdvantageConfig(estimator)).advantages_BT[:, 0]


REWARDS = {
    "scored": [1.0, 0.0, 0.5, 0.0, 1.0, 1.0, 0.0, 0.25],
    "equal group": [0.5, 0.5, 0.5, 0.5, 1.0, 0.0, 0.0, 0.0],
    "unscored": [1.0, None, 0.5, 0.0, None, 1.0, 0.0, 0.25],
}


@pytest.mark.parametrize("name", REWARDS)
def test_dr_grpo_and_rloo_advantages_equal_trls(tiny, name: str) -> None:
    rewards = REWARDS[name]
    theirs = trl_advantages(tiny, GRPOTrainer, GRPOConfig, rewards, scale_rewards="none")
    torch.testing.assert_close(our_advantages("dr_grpo", rewards), theirs, rtol=1e-5, atol=1e-6)
    theirs = trl_advantages(tiny, RLOOTrainer, RLOOConfig, rewards, beta=0.0)
    torch.testing.assert_close(our_advantages("rloo", rewards), theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", REWARDS)
def test_grpo_advantages_equal_trls_up_to_its_larger_epsilon(tiny, name: str) -> None:
    """TRL divides by std + 1e-4, we by std + 1e-6."""
    rewards = REWARDS[name]
    theirs = trl_advantages(tiny, GRPOTrainer, GRPOConfig, rewards, scale_rewards="group")
    ours = our_advantages("grpo", rewards)
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-6)
    spread = torch.tensor([r for r in rewards[4:] if r is not None], dtype=torch.float64).std()
    torch.testing.assert_close(ours[4:] * (spread + 1e-6), theirs[4:] * (spread + 1e-4), rtol=1e-5, atol=1e-6)
