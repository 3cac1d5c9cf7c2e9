"""Calls of engines on behalf of attempts: the one place where a call is held, moved to another engine or tried again.

an update, no engine works     the call waits; that time counts against no budget of the rollout
connection lost, 429, 503      waits and tries again, on another engine if this one is gone; counts against none either
500 of an engine that works    tries again on the rollout's own time: its deadline ends what never succeeds
another 4xx                    one attempt; the engine's words and status go to the harness
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

from leyden.errors import EngineRejected, EngineUnavailable, EngineUnsuitable, LeydenError, RequestError
from leyden.gateway.admission import Admission, InFlight, Interrupted
from leyden.gateway.attempts import Attempt
from leyden.gateway.metrics import Metrics
from leyden.gateway.models import Models
from leyden.gateway.watch import Watch
from leyden.store import Store

T = TypeVar("T")
FIRST_RETRY_S, LONGEST_RETRY_S, LONGEST_RETRY_AFTER_S = 0.05, 2.0, 30.0
BROKEN_CALL = frozenset({200, 500})


class EngineCalls:
    """Asks the engine of an attempt, for as long as it takes."""

    def __init__(
        self,
        store: Store,
        models: Models,
        admission: Admission,
        watch: Watch,
        in_flight: InFlight,
        metrics: Metrics,
    ) -> None:
        self._store = store
        self._models = models
        self._admission = admission
        self._watch = watch
        self._in_flight = in_flight
        self._metrics = metrics

    async def admitted(self, attempt: Attempt) -> None:
        """Return when sampling is allowed. The wait is held time."""
        if not self._admission.open:
            with self.held(attempt, time.monotonic()):
                await self._admission.wait()

    async def ask(self, attempt: Attempt, call: Callable[[str, int], Awaitable[T]], *, drains: bool = False) -> T:
        """The answer of `call(url, version)`, `version` being the one that is registered when it is asked.

        `drains`: an update waits for the call a while, then it is made again afterwards. Raises RequestError for what
        the engine rejects, EngineUnsuitable if no engine can serve the run.
        """
        delay_s = FIRST_RETRY_S
        failed = False
        while True:
            await self.admitted(attempt)
            url = self._models.choose(attempt.rollout_id)
            start = time.monotonic()
            try:
                with self._metrics.engine_seconds.time(), self._in_flight.call(url, drains=drains):
                    return await call(url, self._models.version)
            except Interrupted:
                with self.held(attempt, start):
                    await self._admission.wait()
            except EngineRejected as error:
                self._note(attempt, error, error.status)
                raise _refusal(error) from error
            except EngineUnsuitable as error:
                self._watch.failed(url, error)
            except EngineUnavailable as error:
                self._metrics.engine_errors.inc()
                if not failed:
                    self._note(attempt, error, error.status)
                failed = True
                await self._before_another_try(attempt, url, error, start, delay_s)
                delay_s = min(2 * delay_s, LONGEST_RETRY_S)

    async def _before_another_try(
        self, attempt: Attempt, url: str, error: EngineUnavailable, start: float, delay_s: float
    ) -> None:
        """Wait as long as makes sense. `start` is when the call that failed began."""
        answered = error.status is not None and error.status not in BROKEN_CALL
        works = answered or await self._watch.check(url)
        if works and error.status in BROKEN_CALL:
            await asyncio.sleep(delay_s)
            return
        with self.held(attempt, start):
            if works:
                await asyncio.sleep(max(delay_s, min(error.retry_after_s, LONGEST_RETRY_AFTER_S)))
            await self._admission.wait()

    @contextlib.contextmanager
    def held(self, attempt: Attempt, since: float) -> Iterator[None]:
        """Time from `since` (monotonic) to the end of the block, in which Leyden made the attempt wait: it counts
        against no budget. Holds that overlap count once.
        """
        attempt.begin_hold(since)
        try:
            yield
        finally:
            if seconds := attempt.end_hold():
                self._metrics.held_seconds.inc(seconds)
                self._store.rollouts.add_held(attempt.rollout_id, attempt.attempt, seconds)

    def _note(self, attempt: Attempt, error: LeydenError, status: int | None) -> None:
        data = {"status": status, "message": str(error)}
        self._store.turns.add_event(attempt.rollout_id, attempt.attempt, "engine_error", data)


def _refusal(error: EngineRejected) -> RequestError:
    """What the harness hears: the engine's own status and words."""
    refusal = RequestError(str(error), code="engine_rejected")
    refusal.status = error.status
    return refusal
