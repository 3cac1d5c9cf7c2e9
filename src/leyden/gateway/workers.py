"""Work on large requests, off the event loop: reading JSON, comparing histories, rendering, packing.

Small work runs where it is called. Large work runs in one of a few threads: one piece at a time for each attempt, in
the order in which attempts asked, so that an attempt that sends much waits for itself. What it waits for others is
held time. Work gets what it needs as arguments and changes nothing that the loop reads.

Threads share the interpreter: nothing here may stay in one call of C for long, which is why bodies are bounded
(`protocols/checks`) and long texts are tokenised with the interpreter free (`tokenizer`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import TypeVar

from leyden.gateway.attempts import Attempt

T = TypeVar("T")
THREADS = 2
LARGE_BYTES = 16 * 1024
LOOK_S, STALL_S = 0.25, 0.5

log = logging.getLogger(__name__)


class Workers:
    """`held(attempt, since)` is `EngineCalls.held`: where the wait for a thread is counted."""

    def __init__(self, held: Callable[[Attempt, float], AbstractContextManager[None]]) -> None:
        self._held = held
        self._threads = ThreadPoolExecutor(THREADS, "leyden-worker")
        self._free = asyncio.Semaphore(THREADS)

    async def run(self, attempt: Attempt, size: int, work: Callable[[], T]) -> T:
        """The result of `work`, which is about a body of `size` bytes."""
        if size < LARGE_BYTES:
            return work()
        await attempt.working.acquire()
        try:
            if self._free.locked():
                with self._held(attempt, time.monotonic()):
                    await self._free.acquire()
            else:
                await self._free.acquire()
        except BaseException:
            attempt.working.release()
            raise
        running = asyncio.get_running_loop().run_in_executor(self._threads, work)
        running.add_done_callback(lambda _: self._release(attempt))
        return await asyncio.shield(running)  # a thread cannot be stopped: its place is free when it has ended

    def _release(self, attempt: Attempt) -> None:
        self._free.release()
        attempt.working.release()

    async def watch_loop(self, stalled: Callable[[float], None]) -> None:
        """Say of each time that the event loop did not run for a while how many seconds it was."""
        while True:
            before = time.monotonic()
            await asyncio.sleep(LOOK_S)
            late_s = time.monotonic() - before - LOOK_S
            if late_s > STALL_S:
                log.warning("the gateway stood still for %.1f s; no attempt's time-out counts it", late_s)
                stalled(late_s)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
