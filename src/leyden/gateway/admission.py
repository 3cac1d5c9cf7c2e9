"""Who may sample now. A paused gateway, or one whose model has no engine yet, holds calls: latency, never an error."""

from __future__ import annotations

import asyncio
import time


class Admission:
    """Open while not paused and an engine is registered. Single-threaded: used from the event loop alone."""

    def __init__(self, *, ready: bool) -> None:
        self._paused = False
        self._ready = ready
        self._open = asyncio.Event()
        self._update()

    @property
    def paused(self) -> bool:
        return self._paused

    def pause(self) -> None:
        self._paused = True
        self._update()

    def resume(self) -> None:
        self._paused = False
        self._update()

    def set_ready(self) -> None:
        self._ready = True
        self._update()

    async def wait(self) -> float:
        """Return when sampling is allowed; answers the seconds that it held the caller."""
        if self._open.is_set():
            return 0.0
        start = time.monotonic()
        await self._open.wait()
        return time.monotonic() - start

    def _update(self) -> None:
        if self._ready and not self._paused:
            self._open.set()
        else:
            self._open.clear()
