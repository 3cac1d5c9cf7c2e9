"""Who may sample now, and who samples. A paused gateway, or one whose model has no engine that works, holds calls:
latency, never an error.

Single-threaded: used from the event loop alone. A call is interrupted from another task as `asyncio.timeout` does it:
its task is cancelled, and the cancellation ends where the call does.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from leyden.errors import LeydenError
from leyden.gateway.metrics import Metrics

INTERRUPTION_S = 10.0


class Interrupted(LeydenError):
    """The call was ended to be made again: its engine is gone, or an update did not wait for it any longer."""


@dataclass(slots=True, eq=False)
class _Call:
    url: str
    drains: bool
    task: asyncio.Task[object]
    interrupted: bool = False

    def interrupt(self) -> None:
        if not self.interrupted:
            self.interrupted = True
            self.task.cancel()


class InFlight:
    """The engine calls that are open now."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._calls: set[_Call] = set()
        self._ended = asyncio.Event()

    @contextlib.contextmanager
    def call(self, url: str, *, drains: bool) -> Iterator[None]:
        """One call, of the current task. An update waits for it if it `drains`. Raises Interrupted if it is
        ended from here.
        """
        task = asyncio.current_task()
        assert task is not None
        cancelled_before = task.cancelling()
        call = _Call(url, drains, task)
        self._calls.add(call)
        self._metrics.engine_calls.labels(url).inc()
        try:
            yield
        except asyncio.CancelledError as error:
            if call.interrupted and task.uncancel() <= cancelled_before:
                self._metrics.interrupted.inc()
                raise Interrupted(f"a call of engine {url} was interrupted") from error
            raise
        finally:
            self._calls.discard(call)
            self._metrics.engine_calls.labels(url).dec()
            self._ended.set()

    def interrupt(self, url: str) -> None:
        """End the calls of an engine that is gone."""
        for call in self._calls:
            if call.url == url:
                call.interrupt()

    def interrupt_draining(self) -> None:
        for call in self._calls:
            if call.drains:
                call.interrupt()

    async def drained(self, limit_s: float) -> bool:
        """Whether, within `limit_s`, no call that drains was open any more."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while any(call.drains for call in self._calls):
                    self._ended.clear()
                    await self._ended.wait()
        return not any(call.drains for call in self._calls)


class Admission:
    """Open while not paused and an engine works."""

    def __init__(self, in_flight: InFlight, drain_limit_s: float, *, ready: bool) -> None:
        self._in_flight = in_flight
        self._drain_limit_s = drain_limit_s
        self._paused = False
        self._pauses = 0
        self._ready = ready
        self._open = asyncio.Event()
        self._update()

    @property
    def paused(self) -> bool:
        return self._paused

    @property
    def period(self) -> int | None:
        """Which period between two pauses it is; None in a pause."""
        return None if self._paused else self._pauses

    async def pause(self) -> None:
        """Hold calls from now on, also those that are not sent yet (`period`). Return when none is open that must not
        span an update: those that do not end within the limit are made again after it.
        """
        self._paused = True
        self._pauses += 1
        self._update()
        if not await self._in_flight.drained(self._drain_limit_s) and self._paused:
            self._in_flight.interrupt_draining()
            await self._in_flight.drained(INTERRUPTION_S)

    def resume(self) -> None:
        self._paused = False
        self._update()

    def set_ready(self, ready: bool) -> None:
        self._ready = ready
        self._update()

    @property
    def open(self) -> bool:
        return self._open.is_set()

    async def wait(self) -> None:
        """Return when sampling is allowed."""
        while not self.open:
            await self._open.wait()

    def _update(self) -> None:
        if self._ready and not self._paused:
            self._open.set()
        else:
            self._open.clear()
