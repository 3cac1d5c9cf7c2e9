"""Calls of engines on behalf of attempts: the one place where a call is held, moved to another engine or tried again.

an update, no engine there     the call waits; that time counts against no budget of the rollout
connection lost, 5xx, 429, no  tries again, on another engine if there is one; counts against none either. The engine is
  JSON, nothing for too long   asked for one token, and no more calls until it gives that. What the engines that are
                               there fail for `give_up_s` is given up: the attempt is incomplete
another 4xx                    one attempt; the engine's words and status go to the harness
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from leyden.errors import (
    CaptureError,
    EngineBroken,
    EngineRejected,
    EngineUnavailable,
    EngineUnsuitable,
    LeydenError,
    RequestError,
    Unwritable,
)
from leyden.gateway.admission import Admission, InFlight, Interrupted
from leyden.gateway.attempts import Attempt
from leyden.gateway.engines import NotSent
from leyden.gateway.health_checks import LONGEST_RETRY_AFTER_S, Watch
from leyden.gateway.metrics import Metrics
from leyden.gateway.models import Models
from leyden.store import Store

T = TypeVar("T")
FIRST_RETRY_S, LONGEST_RETRY_S = 0.05, 2.0


@dataclass(slots=True)
class _Failures:
    """What one call has met: how often at which engine, and since when without an engine that works in between."""

    at: Counter[str] = field(default_factory=Counter)
    since: float | None = None


class EngineCalls:
    """Asks the engine of an attempt, for as long as it takes, or `give_up_s` where engines are there and fail."""

    def __init__(
        self,
        store: Store,
        models: Models,
        admission: Admission,
        watch: Watch,
        in_flight: InFlight,
        metrics: Metrics,
        give_up_s: float,
    ) -> None:
        self._store = store
        self._models = models
        self._admission = admission
        self._watch = watch
        self._in_flight = in_flight
        self._metrics = metrics
        self._give_up_s = give_up_s

    async def admitted(self, attempt: Attempt) -> None:
        """Return when sampling is allowed. The wait is held time. Raises EngineBroken."""
        if not self._admission.open:
            with self.held(attempt, time.monotonic()):
                await self._wait()

    async def _wait(self) -> None:
        """Engines that are gone are waited for; those that are there and fail, only so long."""
        while not self._admission.open:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._give_up_s):
                    await self._admission.wait()
            if not self._admission.open and not self._admission.paused and self._models.broken:
                raise EngineBroken(f"no engine has worked for {self._give_up_s:g} s: {self._models.problems}")

    async def ask(self, attempt: Attempt, call: Callable[[str, int], Awaitable[T]], *, drains: bool = False) -> T:
        """The answer of `call(url, version)`, `version` being the one that is registered when it is asked.

        `drains`: an update waits for the call a while, then it is made again afterwards. Raises RequestError for what
        the engine rejects, EngineUnsuitable if no engine can serve the run, EngineBroken.
        """
        failures = _Failures()
        while True:
            await self.admitted(attempt)
            url = self._models.choose(attempt.rollout_id, failures.at)
            start = time.monotonic()
            if not self._models.checked(url):
                with self.held(attempt, start):
                    await self._check(url, failures)
                continue
            try:
                with self._metrics.engine_seconds.time(), self._in_flight.call(url, drains=drains):
                    return await call(url, self._models.version)
            except (Interrupted, NotSent):
                with self.held(attempt, start):
                    await self._wait()
            except EngineRejected as error:
                self._note(attempt, error, error.status)
                raise _refusal(error) from error
            except EngineUnsuitable as error:
                self._watch.failed(url, error)
            except CaptureError:
                await self._watch.check(url)
                raise
            except EngineUnavailable as error:
                self._metrics.engine_errors.inc()
                if not failures.at:
                    self._note(attempt, error, error.status)
                with self.held(attempt, start):
                    await self._before_another_try(url, error, failures)

    async def _check(self, url: str, failures: _Failures) -> None:
        """Raises EngineBroken for an engine that was too busy for the check's one token all the time."""
        since = time.monotonic() if failures.since is None else failures.since
        if await self._watch.check(url) and not self._models.checked(url):
            failures.since = since
            if time.monotonic() - since >= self._give_up_s:
                raise EngineBroken(f"engine {url} has had no time for one token for {self._give_up_s:g} s")

    async def _before_another_try(self, url: str, error: EngineUnavailable, failures: _Failures) -> None:
        """Wait as long as makes sense. Raises EngineBroken where another try makes none."""
        failures.at[url] += 1
        tries, now = failures.at.total(), time.monotonic()
        if failures.since is None:
            failures.since = now
        works = error.busy or await self._watch.check(url)
        if not works and not self._models.is_broken(url):
            failures.since = None  # it is gone, and may come back as another
        elif now - failures.since >= self._give_up_s:
            raise EngineBroken(f"{error}; the call was made {tries} times")
        if works:
            delay_s = min(FIRST_RETRY_S * 2 ** min(tries - 1, 10), LONGEST_RETRY_S)
            await asyncio.sleep(max(delay_s, min(error.retry_after_s, LONGEST_RETRY_AFTER_S)))
        await self._wait()

    def held(self, attempt: Attempt, since: float) -> contextlib.AbstractContextManager[None]:
        return attempt.held(since, self._store, self._metrics)

    def _note(self, attempt: Attempt, error: LeydenError, status: int | None) -> None:
        data = {"status": status, "message": str(error)}
        with contextlib.suppress(Unwritable, RequestError):  # a full disk, an attempt that has ended or noted enough
            self._store.turns.add_event(attempt.rollout_id, attempt.attempt, "engine_error", data, running=True)


def _refusal(error: EngineRejected) -> RequestError:
    """What the harness hears: the engine's own status and words."""
    refusal = RequestError(str(error), code="engine_rejected")
    refusal.status = error.status
    return refusal
