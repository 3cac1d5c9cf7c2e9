"""The time that deadlines are kept by: Unix seconds as of the controller's start, and monotonic from there."""

from __future__ import annotations

import time


class Clock:
    """Whoever sets the machine's clock neither ends an attempt nor lets it run on."""

    def __init__(self) -> None:
        self._start = time.time() - time.monotonic()

    def now(self) -> float:
        return self._start + time.monotonic()

    def own(self, at: float) -> float:
        """What the machine's clock calls `at`, by this one."""
        return self.now() - (time.time() - at)
