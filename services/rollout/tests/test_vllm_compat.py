"""What we make of vLLM's own parts, without an engine."""

from __future__ import annotations

from types import SimpleNamespace

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
