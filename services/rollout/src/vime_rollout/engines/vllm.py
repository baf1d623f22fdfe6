"""vLLM's AsyncLLM as an `Engine`. The model runs in child processes; this module talks to them in one event loop.

Two choices keep the numbers right. Logprobs are `processed_logprobs`: those of the distribution that was sampled from.
Streams are CUMULATIVE and everything else FINAL_ONLY, because vLLM loses routes when it merges DELTA outputs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Iterable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from vime_client.logs import get_logger
from vime_rollout.config import VllmConfig
from vime_rollout.engine import (
    EngineDescription,
    EngineDied,
    EngineEnd,
    EngineError,
    EngineLoad,
    EngineOutput,
    EngineRequest,
    FinishReason,
    MemoryPart,
    PauseMode,
    RequestRefused,
    Routes,
    SamplingSettings,
    ScoreAborted,
    SequenceScore,
    Tokenizer,
    WeightLoadReport,
    WeightsBroken,
    WeightsRefused,
)
from vime_rollout.engines import vllm_compat
from vime_rollout.engines.core_answer import answer_of
from vime_rollout.engines.core_watch import CoreWatch
from vime_rollout.engines.load_plan import LoadRecord, combine, problems
from vime_rollout.engines.vllm_settings import (
    Expected,
    checkpoint_tensors,
    engine_arguments,
    eos_ids,
    experts_per_token,
    prepare_environment,
)

if TYPE_CHECKING:
    from vime_rollout.engines.core_cause import CoreCause
    from vime_service.bulk import Manifest

T = TypeVar("T")
_log = get_logger(__name__)
_ABORT_TRIES = 200
SHUTDOWN_S = 3.0


class VllmEngine:
    """See `vime_rollout.engine.Engine`."""

    description: EngineDescription
    tokenizer: Tokenizer

    def __init__(self, config: VllmConfig, updatable: bool = True, staging_dir: Path | None = None) -> None:
        """Remember the settings; `start` does the work.

        Args:
            config: the engine's settings.
            updatable: find out at start what an update must consist of.
            staging_dir: directory to be removed by the engine's processes if this one is killed.
        """
        self._config = config
        self._updatable = updatable
        self._staging_dir = staging_dir
        self._llm: Any = None
        self._cause: CoreCause | None = None
        self._moe_layers: list[int] = []
        self._expected: Expected | None = None
        self._unwritten: frozenset[str] = frozenset()
        self._tried: dict[tuple[Any, ...], str] = {}
        self._active: dict[str, Any] = {}
        """vLLM's state of every request whose end was not read; None until vLLM has taken it."""
        self._resumed: dict[str, int] = {}
        """How many tokens of its prompt belong to the response, of each of those requests that was resumed."""
        self._load = EngineLoad()
        self._watch = CoreWatch(
            lambda: self._llm.is_sleeping(), config.frozen_after_seconds, config.abandoned_after_seconds
        )

    # ---------------------------------------------------------------- life

    async def start(self) -> None:
        """See `Engine.start`."""
        prepare_environment(self._config, self._staging_dir)
        try:
            async with asyncio.timeout(self._config.start_timeout_seconds):
                await asyncio.to_thread(self._create)
                vllm_compat.on_taken(self._llm, self._taken)
                (facts, *_) = await self._rpc("vime_facts")
                self._moe_layers = facts["moe_layer_ids"]
                self._describe(facts["dtype"])
                if self._updatable:
                    await self._learn_expected()
                await self._prove()
        except TimeoutError as error:
            raise EngineError(f"vLLM was not up after {self._config.start_timeout_seconds:g} s") from error

    async def _prove(self) -> None:
        """Generate and score one token: what the kernels cannot do shows in the first forward pass, not before."""
        routes = self.description.returns_routes
        request = EngineRequest("first", [0], SamplingSettings(max_tokens=1), seed=0, return_routes=routes)
        try:
            async for _ in self.generate(request):
                pass
            await self.score("first", [0, 0], routes)
        except EngineError as error:
            raise EngineError(f"vLLM cannot run {self._config.model!r}: {error}") from error

    def _create(self) -> None:
        from vllm.v1.engine.async_llm import AsyncLLM

        from vime_rollout.engines.core_cause import CoreCause
        from vime_rollout.engines.hf_tokenizer import HfTokenizer

        self._cause = CoreCause()
        try:
            arguments = engine_arguments(self._config)
            self._llm = AsyncLLM.from_engine_args(arguments, stat_loggers=[self._stat_logger])
        except Exception as error:  # whatever stops vLLM from starting stops this service
            cause = self._cause.heard() or error
            raise EngineError(f"vLLM cannot serve {self._config.model!r}: {cause}") from error
        self.tokenizer = HfTokenizer(self._llm.get_tokenizer())

    def _describe(self, dtype: str) -> None:
        model = self._llm.model_config
        experts = int(model.get_num_experts()) if self._moe_layers else 0
        self.description = EngineDescription(
            model_id=self._config.model_id or Path(self._config.model).name,
            architecture=model.architectures[0],
            dtype=dtype,
            max_model_len=int(model.max_model_len),
            vocab_size=int(model.get_vocab_size()),
            eos_token_ids=eos_ids(model, self._llm.get_tokenizer()),
            moe_layer_ids=tuple(self._moe_layers),
            num_experts=experts,
            experts_per_token=experts_per_token(model) if experts else 0,
            returns_routes=bool(model.enable_return_routed_experts),
            max_running_requests=self._config.max_num_seqs,
            engine_version=f"vllm {vllm_compat.version()}",
        )

    async def stop(self) -> None:
        """See `Engine.stop`."""
        self._watch.stop()
        if self._llm is not None:
            await asyncio.to_thread(self._llm.shutdown, SHUTDOWN_S)

    async def check_health(self) -> None:
        """See `Engine.check_health`."""
        await self._answer("check_health", self._llm.check_health())  # whether it has ended; not whether it works
        self._watch.check()

    # ---------------------------------------------------------------- requests

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
        """See `Engine.generate`."""
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        prompt = {"prompt_token_ids": list(request.input_ids)}
        self._active[request.request_id] = None
        self._resumed[request.request_id] = request.resumed
        try:
            params = self._sampling_params(request)
            outputs = self._llm.generate(
                prompt, params, request_id=request.request_id, trace_headers=request.trace_headers
            )
            async with aclosing(outputs):  # closing it is what tells vLLM to stop
                async for output in outputs:
                    yield self._output(output.outputs[0], output.num_cached_tokens or 0, request.return_routes)
        except EngineDeadError as error:
            raise self._died(error) from error
        except EngineGenerateError as error:
            raise EngineError(f"{request.request_id}: {error.__cause__!r}") from error
        except vllm_compat.request_errors() as error:
            raise RequestRefused(str(error)) from error
        finally:
            self._active.pop(request.request_id, None)
            self._resumed.pop(request.request_id, None)

    async def score(self, request_id: str, token_ids: Sequence[int], return_routes: bool) -> SequenceScore:
        """See `Engine.score`. One token is sampled after the sequence, and thrown away.

        Behind a sequence that fills the context there is no room for it: then the last id is taken off, and looked up
        in the distribution of its place.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.exceptions import EngineDeadError

        read = token_ids[: self.description.max_model_len - 1]
        params = SamplingParams(
            temperature=0.0,
            max_tokens=1,
            prompt_logprobs=0,
            logprobs=-1 if len(read) < len(token_ids) else None,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        final: Any = None
        prompt = {"prompt_token_ids": list(read)}
        self._active[request_id] = None
        try:
            async for output in self._llm.generate(prompt, params, request_id=request_id):
                final = output
        except EngineDeadError as error:
            raise self._died(error) from error
        except vllm_compat.request_errors() as error:
            raise RequestRefused(str(error)) from error
        finally:
            self._active.pop(request_id, None)
        if final is None or final.prompt_logprobs is None or final.outputs[0].finish_reason == "abort":
            raise ScoreAborted(f"{request_id}: scoring was aborted")
        flat = final.prompt_logprobs
        # The first position has no logprob; the first entry of every other is the token that stands there.
        values = [flat.logprobs[at] for at in flat.start_indices[1:]]
        if len(read) < len(token_ids):
            last = final.outputs[0].logprobs
            values.append(last.logprobs[list(last.token_ids).index(token_ids[-1])])
        logprobs = np.asarray(values, dtype=np.float32)
        routes = self._routes(final.outputs[0].routed_experts) if return_routes else None
        return SequenceScore(logprobs, None if routes is None else routes[: len(token_ids) - 1])

    async def abort(self, request_ids: Iterable[str]) -> None:
        """See `Engine.abort`."""
        left = set(request_ids)
        for _ in range(_ABORT_TRIES):
            known = left & vllm_compat.known_requests(self._llm)
            if known:
                await self._answer("abort", self._llm.abort(list(known)))
            left = {i for i in left - known if i in self._active and self._active[i] is None}
            if not left:  # those left have been handed to vLLM, and are not in its tables yet
                return
            await asyncio.sleep(0.005)

    def progress(self) -> Mapping[str, int]:
        """See `Engine.progress`."""
        return {i: 0 if state is None else vllm_compat.tokens_of(state) for i, state in self._active.items()}

    def _taken(self, request_id: str, state: Any) -> int:
        if request_id in self._active:
            self._active[request_id] = state
        return self._resumed.get(request_id, 0)

    def load_snapshot(self) -> EngineLoad:
        """See `Engine.load_snapshot`."""
        return self._load

    def _sampling_params(self, request: EngineRequest) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = request.sampling
        eos = () if sampling.ignore_eos else self.description.eos_token_ids
        options: dict[str, Any] = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "max_tokens": sampling.max_tokens,
            "seed": request.seed,
            "stop": list(sampling.stop) or None,
            "stop_token_ids": sorted({*sampling.stop_token_ids, *eos}),
            "ignore_eos": sampling.ignore_eos,
            "logprobs": 0,
            "flat_logprobs": True,
            "detokenize": bool(sampling.stop),
            "skip_special_tokens": False,
            "output_kind": RequestOutputKind.CUMULATIVE if request.stream else RequestOutputKind.FINAL_ONLY,
        }
        try:
            return SamplingParams(**(options | dict(sampling.extra)))
        except TypeError as error:
            raise RequestRefused(f"sampling options: {error}") from error

    def _output(self, completion: Any, cached: int, return_routes: bool) -> EngineOutput:
        token_ids = completion.token_ids
        flat = completion.logprobs
        logprobs = flat.logprobs if flat is not None else []
        if len(logprobs) != len(token_ids):
            raise EngineError(f"vLLM returned {len(logprobs)} logprobs for {len(token_ids)} tokens")
        if completion.finish_reason is None:
            return EngineOutput(token_ids, logprobs)
        if completion.finish_reason not in tuple(FinishReason):
            raise EngineError(f"vLLM ended a request for the reason {completion.finish_reason!r}")
        reason = FinishReason(completion.finish_reason)
        matched = completion.stop_reason if isinstance(completion.stop_reason, str) else None
        routes = self._routes(completion.routed_experts) if return_routes else None
        return EngineOutput(token_ids, logprobs, EngineEnd(reason, matched, routes, cached))

    def _routes(self, routes: Any) -> Routes | None:
        """Rows of the MoE layers alone: vLLM has one for every layer."""
        if routes is None:
            return None
        picked: Routes = np.ascontiguousarray(routes[:, self._moe_layers, :])
        return picked

    # ---------------------------------------------------------------- pauses

    async def pause(self, mode: PauseMode) -> None:
        """See `Engine.pause`."""
        paused = self._llm.pause_generation(mode=mode.value, clear_cache=False)
        # Waiting for what runs may take as long as that runs; whoever wants it has a deadline.
        await self._answer("pause_generation", paused, at_once=mode is not PauseMode.WAIT)
        await self._answer("taking in the last outputs", vllm_compat.outputs_drained(self._llm))

    async def resume(self) -> None:
        """See `Engine.resume`."""
        await self._answer("resume_generation", self._llm.resume_generation())

    async def sleep(self) -> int:
        """See `Engine.sleep`."""
        if not self._config.enable_sleep_mode:
            raise EngineError("vllm.enable_sleep_mode is off: device memory cannot be given away")
        before = sum(await self._rpc("vime_free_bytes"))
        await self._answer("sleep", self._watch.working(self._llm.sleep(level=1, mode="abort")))
        return max(0, int(sum(await self._rpc("vime_free_bytes")) - before))

    async def wake(self, part: MemoryPart | None = None) -> None:
        """See `Engine.wake`."""
        tags = None if part is None else [part.value]
        await self._answer("wake_up", self._watch.working(self._llm.wake_up(tags)))

    # ---------------------------------------------------------------- weights

    async def check_manifest(self, manifest: Manifest) -> None:
        """See `Engine.check_manifest`."""
        if self._expected is not None:
            diff = manifest.compare(self._expected)
            if diff:
                names = [*diff.missing, *diff.extra, *(m[0] for m in (*diff.misshaped, *diff.wrong_dtype))]
                raise WeightsRefused(diff.describe(), names[0])
            return
        schema = tuple((meta.name, meta.dtype, meta.shape) for meta in manifest.tensors)
        if schema not in self._tried:
            record = await self._try(schema)
            self._tried[schema] = "; ".join(problems(record, _sizes(manifest), self._unwritten)[:8])
        if self._tried[schema]:
            raise WeightsRefused(self._tried[schema])

    async def load_weights(self, manifest: Manifest, path: Path) -> WeightLoadReport:
        """See `Engine.load_weights`."""
        # The updater bounds it: a bound here would be a second, hidden one.
        results = await self._rpc("vime_load", manifest.to_dict(), str(path), at_once=False)
        refused = [result["refused"] for result in results if result["refused"]]
        if len(refused) == len(results):
            raise WeightsRefused(refused[0])
        failed = refused + [result["failed"] for result in results if result["failed"]]
        record = combine([LoadRecord(**result["record"]) for result in results])
        failed += problems(record, _sizes(manifest), self._unwritten)
        if failed:
            raise WeightsBroken("; ".join(dict.fromkeys(failed[:8])))
        seconds = max(result["seconds"] for result in results)
        return WeightLoadReport(len(record.written), manifest.plan.total_bytes, seconds)

    async def drop_prefix_cache(self) -> None:
        """See `Engine.drop_prefix_cache`. vLLM can only do so by preempting what is frozen: it is prefilled again."""
        reset = self._llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        if not await self._answer("reset_prefix_cache", reset):
            raise EngineError("vLLM kept KV of the old weights in its prefix cache")

    async def _learn_expected(self) -> None:
        """What an update must consist of, from the model's own checkpoint and a trial load of its tensors."""
        found = checkpoint_tensors(Path(self._llm.model_config.model))
        if not found:
            _log.warning(
                "no safetensors beside the model: each new manifest costs a trial load", model=self._config.model
            )
            return
        dtype = self.description.dtype
        specs = {name: (dtype if "float" in kind else kind, shape) for name, (kind, shape) in found.items()}
        record = await self._try([(name, kind, shape) for name, (kind, shape) in specs.items()])
        if record.error:
            raise EngineError(f"a trial load of the model's own checkpoint failed: {record.error}")
        for name, _, _, wanted in record.wrong_dtype:  # parameters that keep a type of their own, such as router biases
            specs[name] = (wanted, specs[name][1])
        self._expected = {name: spec for name, spec in specs.items() if name in record.read}
        self._unwritten = frozenset(record.unwritten)
        if self._unwritten:
            _log.warning("parameters that the checkpoint does not write", names=sorted(self._unwritten)[:8])

    async def _try(self, schema: Sequence[tuple[str, str, tuple[int, ...]]]) -> LoadRecord:
        return combine([LoadRecord(**record) for record in await self._rpc("vime_try", list(schema))])

    async def _rpc(self, method: str, *args: Any, at_once: bool = True) -> list[Any]:
        answers = self._watch.working(self._llm.collective_rpc(method, args=args))
        return list(await self._answer(method, answers, at_once=at_once))

    async def _answer(self, what: str, answer: Awaitable[T], *, at_once: bool = True) -> T:
        try:
            return await answer_of(what, answer, self._config.rpc_timeout_seconds if at_once else None)
        except EngineDied as error:
            raise self._died(error) from error

    def _died(self, error: Exception) -> EngineDied:
        """What the core died of, if it told; vLLM's own words point at a stack trace."""
        return EngineDied((self._cause and self._cause.heard()) or str(error))

    # ---------------------------------------------------------------- statistics

    def _stat_logger(self, *_: Any, **__: Any) -> Any:
        """vLLM calls this to make a logger; the logger calls `_record` at every step."""
        from vllm.v1.metrics.loggers import StatLoggerBase

        engine = self

        class Recorder(StatLoggerBase):  # type: ignore[misc]  # vLLM is skipped by mypy: its classes are Any
            def __init__(self) -> None:
                pass

            def record(self, scheduler_stats: Any = None, iteration_stats: Any = None, *_: Any, **__: Any) -> None:
                engine._record(scheduler_stats, iteration_stats)

            def log_engine_initialized(self) -> None:
                pass

        return Recorder()

    def _record(self, scheduler: Any, iteration: Any) -> None:
        last = self._load
        running, waiting, usage, hits = last.running, last.waiting, last.kv_cache_usage, 0
        if scheduler is not None:
            running, waiting, usage = scheduler.num_running_reqs, scheduler.num_waiting_reqs, scheduler.kv_cache_usage
            hits = scheduler.prefix_cache_stats.hits
        self._load = EngineLoad(
            running,
            waiting,
            usage,
            last.generated_tokens + (iteration.num_generation_tokens if iteration else 0),
            last.prompt_tokens + (iteration.num_prompt_tokens if iteration else 0),
            last.cached_tokens + hits,
        )


def _sizes(manifest: Manifest) -> dict[str, int]:
    return {meta.name: int(np.prod(meta.shape, dtype=np.int64)) for meta in manifest.tensors}
