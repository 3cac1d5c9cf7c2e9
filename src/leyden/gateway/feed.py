"""The feed of changed rollouts: readers wait here, every change of the store wakes them."""

from __future__ import annotations

import asyncio
import contextlib


class Feed:
    """Create it first and hand `notify` to the store; wait in the event loop."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    def notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait(self, timeout_s: float) -> None:
        """Return at the next change or after `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), timeout_s)
