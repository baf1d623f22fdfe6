"""What we make of vLLM's own parts, without an engine."""

from __future__ import annotations

import contextlib
import multiprocessing
from types import SimpleNamespace
from typing import Any

import pytest

from vime_rollout.engines.vllm_compat import detokenizer_after

from .conftest import make_tokenizer

pytestmark = pytest.mark.engine  # importing vLLM takes seconds


@pytest.mark.parametrize("cut", range(1, 12))
@pytest.mark.parametrize("fast", [True, False])
def test_stop_strings_are_looked_for_in_the_whole_response_and_not_in_its_prompt(
    cut: int, fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's own detokenizer wrote the prompt's text before the first character, where the prompt ends inside one."""
    from vllm import SamplingParams
    from vllm.v1.engine import detokenizer

    monkeypatch.setattr(detokenizer, "USE_FAST_DETOKENIZER", fast)
    tokenizer = make_tokenizer()
    response = tokenizer("😀b中文c!!")["input_ids"]
    prompt = tokenizer("c!! 文c!! ")["input_ids"]
    params = SamplingParams(stop=["文c!!", "c!! "], skip_special_tokens=False, detokenize=True)
    request = SimpleNamespace(request_id="r", prompt_token_ids=[*prompt, *response[:cut]], prompt_embeds=None)
    request.sampling_params = params
    made = detokenizer_after(tokenizer, request, cut)
    matched = [made.update([token], False) for token in response[cut:]]
    assert matched == [*[None] * (len(response) - cut - 1), "文c!!"]
    assert made.num_output_tokens() == len(response) - cut


@pytest.mark.parametrize("where", ["core", "worker"])
def test_the_first_exception_that_ends_vllms_processes_reaches_the_service(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a start that fails vLLM tells "Failed core proc(s): {}", of a worker's "see stack trace for root cause"."""
    from vllm.v1.engine.core import EngineCoreProc
    from vllm.v1.executor.multiproc_executor import WorkerProc

    from vime_rollout.engines import core_cause

    def worker() -> None:
        with contextlib.suppress(ValueError):  # vLLM writes it to stderr
            WorkerProc.__init__(SimpleNamespace())

    def init(self: Any) -> None:
        raise ValueError("the KV cache holds 32 tokens,\n64 are needed")

    def core() -> None:
        if where == "core":
            init(None)
        WorkerProc.worker_main()
        raise RuntimeError("see stack trace")

    for holder, name in ((EngineCoreProc, "run_engine_core"), (WorkerProc, "worker_main"), (WorkerProc, "__init__")):
        monkeypatch.setattr(holder, name, getattr(holder, name))  # put back in the end
    monkeypatch.setattr(EngineCoreProc, "_send_engine_dead", EngineCoreProc._send_engine_dead)
    for name, replacement in (("_CORE", core), ("_WORKER", worker), ("_INIT", init)):
        monkeypatch.setattr(core_cause, name, replacement)
    cause = core_cause.CoreCause()
    assert cause.heard() == ""
    process = multiprocessing.get_context("fork").Process(target=EngineCoreProc.run_engine_core)
    process.start()
    process.join(60)
    assert process.exitcode == 1
    assert cause.heard() == "ValueError: the KV cache holds 32 tokens, 64 are needed"
