"""Stopping: the first SIGINT or SIGTERM asks, the second one ends the process where it stands."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(Exception):
    """The work was stopped by `signal`, in order."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.exit_status = 128 + number


def run_until_signal(work: Coroutine[Any, Any, T], on_stop: Callable[[], None]) -> T:
    """`asyncio.run(work)`. The first signal calls `on_stop` and cancels `work`; raises Stopped when it has ended.

    The second signal exits at once: children see the end of their pipes.
    """
    received: list[int] = []

    async def main() -> T:
        loop = asyncio.get_running_loop()
        task = asyncio.ensure_future(work)

        def stop(number: int) -> None:
            if received:
                os._exit(128 + number)
            received.append(number)
            on_stop()
            task.cancel()

        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, stop, number)
        return await task

    try:
        return asyncio.run(main())
    except asyncio.CancelledError:
        raise Stopped(received[0] if received else signal.SIGINT) from None
