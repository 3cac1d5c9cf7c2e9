"""Looks after the engines: all of them every few seconds, and one at once when a call finds it broken.

An engine that fails a check is asked no more until it passes one; its open calls are interrupted when it has failed
`FAILURES` times in a row, so that one slow answer of a busy engine costs nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from leyden.errors import EngineError, EngineRejected, EngineUnsuitable
from leyden.gateway.admission import Admission, InFlight
from leyden.gateway.models import Models

FAILURES = 3
RECHECK_S = 1.0


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
            await asyncio.gather(*(self.check(url) for url in self._models.urls))
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
        check = self._checks.get(url)
        if check is None:
            check = self._checks[url] = asyncio.create_task(self._check(url))
            check.add_done_callback(lambda _: self._checks.pop(url, None))
        return await asyncio.shield(check)

    def failed(self, url: str, error: EngineError) -> None:
        """A check, or a call that is as good as one."""
        unsuitable = isinstance(error, EngineUnsuitable | EngineRejected)
        if self._models.down(url, str(error), unsuitable=unsuitable) >= FAILURES:
            self._in_flight.interrupt(url)
        self._admission.set_ready(self._models.ready)

    async def _check(self, url: str) -> bool:
        try:
            await self._health(url)
        except EngineError as error:
            self.failed(url, error)
        else:
            self._models.up(url)
            self._admission.set_ready(self._models.ready)
        return self._models.works(url)
