"""Do a whole step again: lease lost, another engine wanted, a service restarting. Bounded in attempts and in time.

Never around a single call that the channel retries already (`ChannelSettings.max_attempts`): that multiplies.

    async for attempt in whole_step("publish", seconds=120):
        with attempt:
            await publish(version)
"""

from __future__ import annotations

from collections.abc import Callable

import tenacity

from vime_client.errors import RpcError
from vime_client.logs import get_logger

_log = get_logger(__name__)


def is_transient(error: BaseException) -> bool:
    """True for failures that go away by themselves: UNAVAILABLE, a server that names a time, a broken connection."""
    return (isinstance(error, RpcError) and error.transient) or isinstance(error, ConnectionError)


def whole_step(
    name: str,
    *,
    attempts: int = 5,
    seconds: float = 60.0,
    initial_wait_s: float = 0.2,
    max_wait_s: float = 10.0,
    retry_if: Callable[[BaseException], bool] = is_transient,
) -> tenacity.AsyncRetrying:
    """Attempts of the step `name`: at most `attempts`, none begun after `seconds`, waits that double and jitter.

    Where the server named a time (`RpcError.retry_after`) the wait is at least that. The last error is raised as it is.
    """
    backoff = tenacity.wait_exponential_jitter(initial=initial_wait_s, max=max_wait_s, jitter=initial_wait_s)

    def wait(state: tenacity.RetryCallState) -> float:
        error = state.outcome.exception() if state.outcome else None
        asked = error.retry_after if isinstance(error, RpcError) and error.retry_after else 0.0
        return max(backoff(state), asked)

    def say(state: tenacity.RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        _log.warning(
            f"{name} failed, trying again",
            attempt=state.attempt_number,
            of=attempts,
            wait_s=round(state.upcoming_sleep, 2),
            cause=str(error),
        )

    return tenacity.AsyncRetrying(
        stop=tenacity.stop_after_attempt(attempts) | tenacity.stop_before_delay(seconds),
        wait=wait,
        retry=tenacity.retry_if_exception(retry_if),
        before_sleep=say,
        reraise=True,
    )
