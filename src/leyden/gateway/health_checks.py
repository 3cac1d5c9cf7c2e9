"""Looks after the engines: all of them every few seconds, and one at once when a call needs to know or finds it broken.

An engine that fails a check is asked no more until it passes one; its open calls are interrupted when it has failed
`FAILURES` times in a row, so that one slow answer of a busy engine costs nothing. One that says it is busy (429, 503)
stays as it was, and is checked again after the pause that it asks for. One engine's check waits for no other engine's.
In a pause no engine is made to sample: what such a check would have shown stays unknown until after it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

from leyden.errors import EngineBroken, EngineError, EngineRejected, EngineUnavailable, EngineUnsuitable
from leyden.gateway.admission import Admission, InFlight
from leyden.gateway.engines import NotSent
from leyden.gateway.models import Models

log = logging.getLogger(__name__)
FAILURES = 3
RECHECK_S, LONGEST_RETRY_AFTER_S = 1.0, 30.0


class Watch:
    """`health` raises EngineError for an engine that does not work."""

    def __init__(
        self,
        models: Models,
        admission: Admission,
        in_flight: InFlight,
        health: Callable[[str], Awaitable[None]],
        interval_s: float,
    ) -> None:
        self._models = models
        self._admission = admission
        self._in_flight = in_flight
        self._health = health
        self._interval_s = interval_s
        self._checks: dict[str, asyncio.Task[bool]] = {}
        self._wake = asyncio.Event()

    async def run(self) -> None:
        """Check until cancelled. Raises EngineUnsuitable when no engine can ever serve this run."""
        while not self._models.hopeless:
            self._wake.clear()
            if checks := [self._start(url) for url in self._models.urls]:
                await asyncio.wait(checks, timeout=self._interval_s)
            pause_s = self._interval_s if self._models.all_work else min(self._interval_s, RECHECK_S)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), 0 if self._models.hopeless else pause_s)
        self._models.choose("")

    def registered(self) -> None:
        """The engines are others now."""
        self._admission.set_ready(self._models.ready)
        self._wake.set()

    async def check(self, url: str) -> bool:
        """Whether the engine works. Checks of one engine at the same time are one check."""
        return await asyncio.shield(self._start(url))

    def _start(self, url: str) -> asyncio.Task[bool]:
        check = self._checks.get(url)
        if check is None:
            check = self._checks[url] = asyncio.create_task(self._check(url))
            check.add_done_callback(lambda _: self._checks.pop(url, None))
        return check

    def failed(self, url: str, error: EngineError) -> None:
        """A check, or a call that is as good as one."""
        unsuitable = isinstance(error, EngineUnsuitable | EngineRejected)
        broken = isinstance(error, EngineBroken)
        if self._models.down(url, str(error), unsuitable=unsuitable, broken=broken) >= FAILURES:
            self._in_flight.interrupt(url)
        self._admission.set_ready(self._models.ready)
        if self._models.hopeless:
            self._wake.set()

    async def _check(self, url: str) -> bool:
        try:
            await self._health(url)
        except NotSent:
            pass
        except EngineError as error:
            if isinstance(error, EngineUnavailable) and error.busy:
                await asyncio.sleep(min(max(error.retry_after_s, RECHECK_S), LONGEST_RETRY_AFTER_S))
            else:
                self.failed(url, error)
        except Exception as error:
            log.exception("the check of engine %s failed", url)
            self.failed(url, EngineBroken(f"engine {url} cannot be checked: {type(error).__name__}"))
        else:
            self._models.up(url)
            self._admission.set_ready(self._models.ready)
        return self._models.works(url)
