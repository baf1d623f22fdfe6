"""One lease's work: render, generate (or take a demonstration), check, score, filter. What goes wrong becomes a failure
class, never a reward."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count

import grpc
from opentelemetry import trace

from vime.buffer.v1 import prompt_service_pb2 as buffer_pb
from vime.common.v1 import trajectory_pb2 as pb
from vime_client.errors import FenceNotMet, RpcError
from vime_client.generation import GenerationClient
from vime_client.logs import get_logger
from vime_client.recipe import EVAL_PREFIX
from vime_client.retry import is_transient, whole_step
from vime_client.rewards.functions import FunctionError
from vime_client.rewards.reward import Reward, apply_score
from vime_client.rewards.values import Score, unscored
from vime_client.worker.config import WorkerSettings
from vime_client.worker.demonstrations import (
    SFT_TABLE,
    BadDemonstration,
    answered,
    build_demonstration,
    demonstration_of,
)
from vime_client.worker.filters import GroupFilter, KeepAll
from vime_client.worker.group import Aborted, BadGeneration, build_group

_ABORTED_ATTEMPTS = 3
"""How often one lease is generated again because samples were aborted, such as by weight updates."""
_RENDERED_KEPT = 4096
"""Prompts whose ids are kept."""
_CLASS_OF = {
    grpc.StatusCode.DEADLINE_EXCEEDED: buffer_pb.FAILURE_CLASS_TIMEOUT,
    # Every engine would say the same of this prompt, however often it is leased.
    grpc.StatusCode.INVALID_ARGUMENT: buffer_pb.FAILURE_CLASS_INVALID,
    grpc.StatusCode.OUT_OF_RANGE: buffer_pb.FAILURE_CLASS_INVALID,
}
_log = get_logger(__name__)
_tracer = trace.get_tracer("vime_client.worker")
_keep_all = KeepAll()


@dataclass(frozen=True)
class Made:
    """A group to insert; with `drop_reason` it is counted and not stored."""

    group: pb.TrajectoryGroup
    drop_reason: str = ""


@dataclass(frozen=True)
class Failed:
    """A lease to give back."""

    failure: buffer_pb.FailureClass.ValueType
    detail: str


class GroupMaker:
    """Makes the group of a lease. Holds no state but counts."""

    def __init__(
        self,
        settings: WorkerSettings,
        engine: GenerationClient,
        rewards: Mapping[str, Reward],
        group_filter: GroupFilter,
    ) -> None:
        self._settings = settings
        self._engine = engine
        self._rewards = rewards
        self._filter = group_filter
        self._requests = count()
        self._rendered: dict[bytes, list[int]] = {}
        self.unscored: Counter[str] = Counter()
        """Samples without a reward, by reason."""

    async def make(self, lease: buffer_pb.PromptLease) -> Made | Failed:
        """The lease's group, or why there is none. Raises only what is a fault of this program."""
        table = self._settings.table(lease.table)
        seconds = lease.generation_deadline.ToTimedelta().total_seconds() or table.generation_timeout_s
        try:
            group = await self._generate_again(lease, seconds, routes=lease.require_routes or table.require_routes)
        except TimeoutError:
            return Failed(buffer_pb.FAILURE_CLASS_TIMEOUT, f"no group within {seconds:g} s")
        except RpcError as error:
            return Failed(_CLASS_OF.get(error.code, buffer_pb.FAILURE_CLASS_GENERATION), str(error))
        except (Aborted, BadGeneration) as error:
            return Failed(buffer_pb.FAILURE_CLASS_GENERATION, str(error))
        except BadDemonstration as error:
            return Failed(buffer_pb.FAILURE_CLASS_INVALID, str(error))
        scores = await self._score(group, lease.reward or table.reward)
        if all(score.unscored for score in scores):
            return Failed(buffer_pb.FAILURE_CLASS_REWARD, f"no sample has a reward: {scores[0].detail}")
        return await self._filtered(group)

    async def _generate_again(
        self, lease: buffer_pb.PromptLease, generation_s: float, *, routes: bool
    ) -> pb.TrajectoryGroup:
        """The whole step again, from the prompt, where that can help.

        While no engine can take it (none there, none with the right weights, the router away) the lease is held, for up
        to `engines_away_s`: an outage of the fleet is no fault of the prompt and must not use up its attempts.
        """
        aborted = 0

        def again(error: BaseException) -> bool:
            nonlocal aborted
            if isinstance(error, Aborted):
                aborted += 1
                return aborted < _ABORTED_ATTEMPTS
            return is_transient(error) or isinstance(error, FenceNotMet)

        seconds = self._settings.engines_away_s
        steps = whole_step(f"group {lease.group_id}", attempts=10_000, seconds=seconds, max_wait_s=5.0, retry_if=again)
        async for attempt in steps:
            with attempt:
                async with asyncio.timeout(generation_s):
                    return await self._generate(lease, generation_s, routes=routes)
        raise AssertionError("tenacity returned without a result or an error")

    async def _generate(self, lease: buffer_pb.PromptLease, seconds: float, *, routes: bool) -> pb.TrajectoryGroup:
        prompt_token_ids = await self._token_ids(lease.prompt)
        if lease.table == SFT_TABLE:
            return await self._demonstrate(lease, prompt_token_ids)
        answer = await self._engine.generate(
            prompt_token_ids,
            lease.sampling,
            lease.seeds,
            timeout_s=seconds,
            request_id=f"{lease.lease_id}-{next(self._requests)}",
            session_id=lease.group_id,
            fence=lease.fence if lease.HasField("fence") else None,
            return_routes=routes,
            return_text=True,
            allow_inexact_sampling=lease.table.startswith(EVAL_PREFIX),
        )
        return build_group(lease, prompt_token_ids, answer)

    async def _demonstrate(self, lease: buffer_pb.PromptLease, prompt_token_ids: list[int]) -> pb.TrajectoryGroup:
        section = self._settings.demonstration
        text = demonstration_of(lease.prompt, section)
        whole = await self._token_ids(answered(lease.prompt, text, section.end))
        return build_demonstration(lease, prompt_token_ids, whole, text)

    async def _token_ids(self, prompt: pb.Prompt) -> list[int]:
        match prompt.WhichOneof("input"):
            case "token_ids":
                return list(prompt.token_ids.ids)
            case "text" | "chat":
                return await self._render(prompt)
            case _:
                raise BadGeneration(f"prompt {prompt.prompt_id} holds no text, chat or token ids")

    async def _render(self, prompt: pb.Prompt) -> list[int]:
        """Ids of a prompt; kept, since eval rounds and epochs bring the same ones again and a run has one tokenizer."""
        text = prompt.HasField("text")
        key = prompt.text.encode() if text else b"\0" + prompt.chat.SerializeToString(deterministic=True)
        kept = self._rendered.get(key)
        if kept is None:
            kept = await self._engine.render(prompt.text if text else prompt.chat)
            if len(self._rendered) >= _RENDERED_KEPT:
                self._rendered.pop(next(iter(self._rendered)))
            self._rendered[key] = kept
        return kept

    async def _score(self, group: pb.TrajectoryGroup, name: str) -> Sequence[Score]:
        """Score the samples in place."""
        reward = self._rewards.get(name)
        with _tracer.start_as_current_span("worker.reward", attributes={"reward": name}) as span:
            if reward is None:
                known = ", ".join(self._rewards)
                scores = [unscored("RAISED", f'no reward "{name}" in the recipe; there are: {known}')] * len(
                    group.samples
                )
            else:
                try:
                    scores = await reward.score(group.prompt, group.samples, group.table)
                except FunctionError as error:  # the file changed or vanished since the worker started
                    scores = [unscored("RAISED", str(error))] * len(group.samples)
            reasons = [score.unscored for score in scores if score.unscored]
            span.set_attribute("unscored", len(reasons))
        for sample, score in zip(group.samples, scores, strict=True):
            apply_score(sample, score)
            if score.unscored:
                self.unscored[score.unscored] += 1
                _log.warning(
                    f"sample without a reward: {score.detail}",
                    group_id=group.group_id,
                    sample_index=sample.sample_index,
                    reason=score.unscored,
                )
        return scores

    async def _filtered(self, group: pb.TrajectoryGroup) -> Made | Failed:
        group_filter = _keep_all if group.table.startswith(EVAL_PREFIX) else self._filter
        try:
            return Made(group, await group_filter.drop_reason(group))
        except (FunctionError, RpcError) as error:
            return Failed(buffer_pb.FAILURE_CLASS_USER_CODE, str(error))
