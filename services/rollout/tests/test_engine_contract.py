"""What every engine must do. The fake and the real one pass the same tests."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from vime_rollout.engine import (
    Engine,
    EngineOutput,
    EngineRequest,
    FinishReason,
    PauseMode,
    RequestRefused,
    SamplingSettings,
    ScoreAborted,
)
from vime_rollout.engines.fake import FakeEngine

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.fixture(params=["fake", pytest.param("vllm", marks=pytest.mark.engine)])
def engine(request: pytest.FixtureRequest) -> Engine:
    if request.param == "fake":
        return FakeEngine(step_seconds=0.001)
    real: Engine = request.getfixturevalue("vllm_engine")
    return real


@pytest_asyncio.fixture(autouse=True, loop_scope="session")
async def _nothing_cached(engine: Engine) -> None:
    await engine.drop_prefix_cache()


def prompt_of(length: int, start: int = 7) -> list[int]:
    return [(start + 3 * i) % 250 for i in range(length)]


async def collect(engine: Engine, request_id: str, length: int = 40, **options: Any) -> list[EngineOutput]:
    call = {k: options.pop(k) for k in ("seed", "stream", "return_routes") if k in options}
    sampling = SamplingSettings(**({"max_tokens": 12, "ignore_eos": True} | options))
    request = EngineRequest(request_id, prompt_of(length), sampling, **({"seed": 1, "return_routes": True} | call))
    return [output async for output in engine.generate(request)]


async def last(engine: Engine, request_id: str, length: int = 40, **options: Any) -> EngineOutput:
    return (await collect(engine, request_id, length, **options))[-1]


async def test_the_same_seed_gives_the_same_tokens_alone_and_in_company(engine: Engine) -> None:
    alone = await last(engine, "a/0", seed=5)
    company = await asyncio.gather(last(engine, "b/0", seed=5), *(last(engine, f"b/{i}", seed=i) for i in range(6, 14)))
    assert list(company[0].token_ids) == list(alone.token_ids)
    assert company[0].logprobs == alone.logprobs
    assert any(list(other.token_ids) != list(alone.token_ids) for other in company[1:])


async def test_the_largest_seed_is_taken(engine: Engine) -> None:
    assert len((await last(engine, "a/0", seed=2**64 - 1)).token_ids) == 12


async def test_a_stream_ends_with_what_a_whole_answer_has(engine: Engine) -> None:
    whole = await last(engine, "a/0")
    outputs = await collect(engine, "b/0", stream=True)
    assert len(outputs) > 1
    assert list(outputs[-1].token_ids) == list(whole.token_ids)
    assert outputs[-1].logprobs == whole.logprobs
    assert outputs[-1].end is not None
    assert whole.end is not None
    assert np.array_equal(outputs[-1].end.routes, whole.end.routes)


@pytest.mark.parametrize("length", [1, 40, 150])
async def test_routes_have_a_row_for_every_token_the_model_consumed(engine: Engine, length: int) -> None:
    output = await last(engine, "a/0", length)
    description = engine.description
    assert output.end is not None
    routes = output.end.routes
    assert routes is not None
    assert routes.shape == (length + 12 - 1, len(description.moe_layer_ids), description.experts_per_token)
    assert routes.dtype == np.uint8
    assert routes.max() < description.num_experts
    assert len({tuple(row) for row in routes[:, 0]}) > 1
    pairs = routes.reshape(-1, description.experts_per_token)
    assert all(len(set(pair)) == description.experts_per_token for pair in pairs.tolist())


async def test_routes_are_left_out_when_not_asked_for(engine: Engine) -> None:
    end = (await last(engine, "a/0", return_routes=False)).end
    assert end is not None
    assert end.routes is None


async def test_k08_cached_prefixes_give_the_same_tokens_and_the_same_rows(engine: Engine) -> None:
    first = await last(engine, "a/0", 150)
    again = await last(engine, "b/0", 150)
    longer = await last(engine, "c/0", 166)
    assert first.end is not None
    assert again.end is not None
    assert longer.end is not None
    assert first.end.cached_tokens == 0
    assert again.end.cached_tokens >= 96
    assert longer.end.cached_tokens >= 96
    assert list(again.token_ids) == list(first.token_ids)
    assert again.logprobs == first.logprobs
    assert np.array_equal(again.end.routes, first.end.routes)
    assert longer.end.routes is not None
    assert first.end.routes is not None
    assert np.array_equal(longer.end.routes[:150], first.end.routes[:150])


async def test_scores_are_the_logprobs_and_routes_of_generation(engine: Engine) -> None:
    output = await last(engine, "a/0", 70)
    ids = prompt_of(70) + list(output.token_ids)
    score = await engine.score("s/0", ids, True)
    assert score.logprobs.shape == (len(ids) - 1,)
    assert np.abs(score.logprobs[69:] - np.asarray(output.logprobs)).max() < 1e-5
    assert output.end is not None
    assert np.array_equal(score.routes, output.end.routes)
    assert (await engine.score("s/1", ids, False)).routes is None


@pytest.mark.parametrize("temperature", [0.5, 0.7, 1.5])
async def test_k03_logprobs_are_those_of_the_distribution_that_was_sampled_from(
    engine: Engine, temperature: float
) -> None:
    """At one position, over many seeds: logprobs at T are those at 1 divided by T, normalised over the vocabulary."""
    ids = prompt_of(20)
    hot = [await last(engine, f"h{i}/0", 20, seed=i, max_tokens=1, temperature=temperature) for i in range(8)]
    plain: dict[int, float] = {}
    for i in range(8):
        token = int(hot[i].token_ids[0])
        plain[token] = float((await engine.score(f"s{i}/0", [*ids, token], False)).logprobs[-1])
    constants = {round(hot[i].logprobs[0] - plain[int(hot[i].token_ids[0])] / temperature, 3) for i in range(8)}
    assert len(constants) == 1, constants
    assert len(plain) > 1


async def test_greedy_takes_the_likeliest_token_whatever_the_seed(engine: Engine) -> None:
    answers = [list((await last(engine, f"g{i}/0", seed=i, temperature=0.0)).token_ids) for i in range(3)]
    assert answers[0] == answers[1] == answers[2]


async def test_k33_every_eos_id_ends_a_response_and_is_in_it(engine: Engine) -> None:
    ended: dict[int, EngineOutput] = {}
    eos = set(engine.description.eos_token_ids)
    assert len(eos) == 2
    for seed in range(400):
        if set(ended) == eos:
            break
        output = await last(engine, f"e{seed}/0", 20, seed=seed, max_tokens=200, ignore_eos=False, temperature=1.5)
        if output.end is not None and output.end.finish_reason is FinishReason.STOP:
            ended.setdefault(int(output.token_ids[-1]), output)
    assert set(ended) == eos
    for token, output in ended.items():
        assert list(output.token_ids).count(token) == 1
        assert len(output.logprobs) == len(output.token_ids)
        assert output.end is not None
        assert output.end.routes is not None
        assert len(output.end.routes) == 20 + len(output.token_ids) - 1


async def test_k33_a_stop_string_that_straddles_tokens_keeps_all_sampled_ids(engine: Engine) -> None:
    free = await last(engine, "a/0", seed=3, max_tokens=30)
    pairs = (engine.tokenizer.decode(list(free.token_ids[i : i + 2])) for i in range(2, 28))
    text = next(pair for pair in pairs if len(pair) == 2 and "\ufffd" not in pair)  # one character of each token
    output = await last(engine, "b/0", seed=3, max_tokens=30, stop=(text,))
    assert output.end is not None
    assert output.end.finish_reason is FinishReason.STOP
    assert output.end.matched_stop == text
    assert len(output.logprobs) == len(output.token_ids) <= 30
    assert list(output.token_ids) == list(free.token_ids[: len(output.token_ids)])


async def test_a_stop_string_that_begins_in_resumed_tokens_ends_the_response(engine: Engine) -> None:
    ascii_only: dict[str, Any] = {"temperature": 0.0, "max_tokens": 12, "return_routes": False, "extra": {}}
    if isinstance(engine, FakeEngine):
        for token, row in enumerate(engine.weights["table.weight"]):
            row[40 + (token * 7 + 1) % 20] = 100.0
    else:
        ascii_only["extra"] = {"allowed_token_ids": list(range(40, 60))}
    whole = await last(engine, "a/0", 40, **ascii_only)
    text = engine.tokenizer.decode(whole.token_ids)
    stop = text[3:8]
    count = text.index(stop) + 5
    stopped = await last(engine, "b/0", 40, stop=(stop,), **ascii_only)
    assert len(stopped.token_ids) == count
    for cut in range(1, count):
        sampling = SamplingSettings(12 - cut, 0.0, stop=(stop,), ignore_eos=True, extra=ascii_only["extra"])
        ids = [*prompt_of(40), *whole.token_ids[:cut]]
        request = EngineRequest(f"c{cut}/0", ids, sampling, seed=1, resumed=cut)
        rest = [output async for output in engine.generate(request)][-1]
        assert list(rest.token_ids) == list(whole.token_ids[cut:count])
        assert rest.end is not None
        assert rest.end.matched_stop == stop


async def test_the_budget_ends_a_response_with_length(engine: Engine) -> None:
    output = await last(engine, "a/0", max_tokens=5)
    assert output.end is not None
    assert output.end.finish_reason is FinishReason.LENGTH
    assert len(output.token_ids) == 5


async def until_progress(engine: Engine, request_id: str, tokens: int = 3) -> None:
    async with asyncio.timeout(20):
        while engine.progress().get(request_id, 0) < tokens:
            await asyncio.sleep(0.001)


async def test_an_aborted_request_ends_with_its_tokens_and_their_routes(engine: Engine) -> None:
    running = asyncio.create_task(last(engine, "a/0", max_tokens=400))
    await until_progress(engine, "a/0")
    await engine.abort(["a/0", "unknown/0"])
    output = await asyncio.wait_for(running, 5)
    assert output.end is not None
    assert output.end.finish_reason is FinishReason.ABORT
    assert 3 <= len(output.token_ids) < 400
    assert len(output.logprobs) == len(output.token_ids)
    assert output.end.routes is not None
    assert len(output.end.routes) == 40 + len(output.token_ids) - 1


async def test_a_closed_iterator_frees_the_request(engine: Engine) -> None:
    request = EngineRequest("a/0", prompt_of(10), SamplingSettings(400, ignore_eos=True), 1, stream=True)
    outputs = engine.generate(request)
    await anext(outputs)
    await outputs.aclose()
    assert "a/0" not in engine.progress()
    assert len((await last(engine, "a/0")).token_ids) == 12


async def test_a_pause_that_keeps_freezes_and_the_request_goes_on_as_if_nothing_had_been(engine: Engine) -> None:
    undisturbed = await last(engine, "a/0", seed=9, max_tokens=100)
    running = asyncio.create_task(last(engine, "b/0", seed=9, max_tokens=100))
    await until_progress(engine, "b/0")
    await engine.pause(PauseMode.KEEP)
    await engine.pause(PauseMode.KEEP)
    frozen = engine.progress()["b/0"]
    new = asyncio.create_task(last(engine, "c/0"))
    await asyncio.sleep(0.1)
    assert engine.progress()["b/0"] == frozen
    assert not running.done()
    assert not new.done()
    await engine.drop_prefix_cache()
    await engine.resume()
    await engine.resume()
    output = await asyncio.wait_for(running, 20)
    await asyncio.wait_for(new, 20)
    assert 0 < frozen < 100
    assert list(output.token_ids) == list(undisturbed.token_ids)
    assert np.abs(np.asarray(output.logprobs) - np.asarray(undisturbed.logprobs)).max() < 1e-4


async def test_k37_a_pause_that_aborts_answers_every_caller_with_its_tokens(engine: Engine) -> None:
    running = [asyncio.create_task(last(engine, f"a/{i}", max_tokens=400, seed=i)) for i in range(12)]
    await asyncio.gather(*(until_progress(engine, f"a/{i}", 1) for i in range(12)))
    await engine.pause(PauseMode.ABORT)
    outputs = await asyncio.wait_for(asyncio.gather(*running), 5)
    assert {output.end.finish_reason for output in outputs if output.end} == {FinishReason.ABORT}
    assert all(0 < len(output.token_ids) == len(output.logprobs) for output in outputs)
    await engine.resume()


async def test_a_pause_that_waits_lets_everything_end(engine: Engine) -> None:
    running = asyncio.create_task(last(engine, "a/0", max_tokens=40))
    await until_progress(engine, "a/0")
    await asyncio.wait_for(engine.pause(PauseMode.WAIT), 20)
    output = await asyncio.wait_for(running, 1)
    assert len(output.token_ids) == 40
    await engine.resume()


async def test_a_pause_while_idle_is_no_trouble(engine: Engine) -> None:
    for mode in PauseMode:
        await asyncio.wait_for(engine.pause(mode), 5)
        await engine.resume()
    assert len((await last(engine, "a/0")).token_ids) == 12


async def test_an_aborted_score_says_so(engine: Engine) -> None:
    await engine.pause(PauseMode.KEEP)
    scoring = asyncio.create_task(engine.score("s/0", prompt_of(40), False))
    await asyncio.sleep(0.1)
    await engine.abort(["s/0"])
    with pytest.raises(ScoreAborted):
        await asyncio.wait_for(scoring, 5)
    await engine.resume()
    assert len((await engine.score("s/0", prompt_of(40), False)).logprobs) == 39


async def test_a_request_that_ended_is_in_the_progress_until_its_end_was_read(engine: Engine) -> None:
    request = EngineRequest("a/0", prompt_of(10), SamplingSettings(60, ignore_eos=True), 1, stream=True)
    outputs = engine.generate(request)
    await anext(outputs)
    await until_progress(engine, "a/0", 60)
    await asyncio.wait_for(engine.pause(PauseMode.WAIT), 20)  # it has ended, whoever reads it
    assert engine.progress()["a/0"] == 60
    began = time.monotonic()
    await engine.abort(["a/0"])
    assert time.monotonic() - began < 0.5
    await engine.resume()
    rest = [output async for output in outputs]
    assert rest[-1].end is not None
    assert rest[-1].end.finish_reason is FinishReason.LENGTH
    assert len(rest[-1].token_ids) == 60
    assert "a/0" not in engine.progress()


async def test_an_option_the_engine_does_not_know_is_the_requests_fault(engine: Engine) -> None:
    with pytest.raises(RequestRefused, match="no_such_option"):
        await last(engine, "a/0", extra={"no_such_option": 1})
    assert len((await last(engine, "a/0")).token_ids) == 12


async def test_the_load_counts_what_was_done(engine: Engine) -> None:
    before = engine.load_snapshot()
    await last(engine, "a/0", 33, max_tokens=9)
    after = engine.load_snapshot()
    assert after.generated_tokens - before.generated_tokens == 9
    assert after.prompt_tokens - before.prompt_tokens == 33
    assert after.running == 0
