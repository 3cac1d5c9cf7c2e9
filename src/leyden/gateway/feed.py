"""The feed of changed rollouts: readers wait here, every change of the store wakes them."""

from __future__ import annotations

import asyncio
import contextlib


class Feed:
    """Create it first and hand `notify` to the store; wait in the event loop."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()
        self._closed = False

    def notify(self) -> None:
        self._changed.set()
        if not self._closed:
            self._changed = asyncio.Event()

    def close(self) -> None:
        """Wake all readers for good: the gateway stops."""
        self._closed = True
        self._changed.set()

    @property
    def closed(self) -> bool:
        return self._closed

    async def wait(self, timeout_s: float) -> None:
        """Return at the next change, when the feed closes, or after `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), timeout_s)
