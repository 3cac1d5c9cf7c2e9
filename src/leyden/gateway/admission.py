"""Who may sample now. A paused gateway, or one whose model has no engine yet, holds calls: latency, never an error."""

from __future__ import annotations

import asyncio


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

    @property
    def open(self) -> bool:
        return self._open.is_set()

    async def wait(self) -> None:
        """Return when sampling is allowed."""
        await self._open.wait()

    def _update(self) -> None:
        if self._ready and not self._paused:
            self._open.set()
        else:
            self._open.clear()
