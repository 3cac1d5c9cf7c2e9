"""How many attempts this machine can carry now: `controller.concurrency`, or fewer under pressure.

    tight      as many as run, at least 1: what ends is not replaced
    between    as many as before
    relaxed    more again, an eighth of `concurrency` at a time

Memory is tight when less than TIGHT_FREE of it is available, or all tasks stand still waiting for it (the kernel's
pressure stall information, PSI). The processors are when TIGHT_QUEUE tasks per core want to run; where there is PSI, it
must confirm that they wait. (PSI alone cannot tell 2 waiting tasks from 200; the load average alone counts tasks that
wait for disks.)
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger(__name__)
EVERY_S = 2.0
TIGHT_FREE, RELAXED_FREE = 0.05, 0.10
TIGHT_STALL, RELAXED_STALL = 0.20, 0.05
TIGHT_QUEUE, RELAXED_QUEUE = 16.0, 8.0
WAITING = 0.50


@dataclass(frozen=True, slots=True)
class Load:
    """`memory_free` is the available share of the memory; `memory_stall` and `cpu_wait` are PSI's shares of the last 10
    seconds (all stalled; some waiting), None where the kernel has none; `queue` is the load average per core.
    """

    memory_free: float
    memory_stall: float | None
    cpu_wait: float | None
    queue: float

    @property
    def tight(self) -> str | None:
        """What there is too little of, in words."""
        if self.memory_free < TIGHT_FREE or (self.memory_stall or 0.0) > TIGHT_STALL:
            return f"memory is short: {self.memory_free:.0%} available, {self.memory_stall or 0:.0%} stalled"
        if self.queue > TIGHT_QUEUE and (self.cpu_wait is None or self.cpu_wait > WAITING):
            return f"the processors are short: {self.queue:.0f} tasks per core"
        return None

    @property
    def relaxed(self) -> bool:
        return (
            self.memory_free > RELAXED_FREE
            and (self.memory_stall or 0.0) < RELAXED_STALL
            and self.queue < RELAXED_QUEUE
        )


def allowed(before: int, running: int, most: int, load: Load) -> int:
    """How many attempts there may be now, after `before` was allowed and `running` are there."""
    if load.tight:
        return max(1, min(before, running))
    return min(most, before + max(1, most // 8)) if load.relaxed else before


def read(proc: Path = Path("/proc")) -> Load:
    """The machine's load now."""
    memory = {line.split(":")[0]: int(line.split()[1]) for line in (proc / "meminfo").read_text().splitlines()}
    queue = float((proc / "loadavg").read_text().split()[0]) / (os.cpu_count() or 1)
    return Load(
        memory_free=memory["MemAvailable"] / memory["MemTotal"],
        memory_stall=_stall(proc / "pressure" / "memory", "full"),
        cpu_wait=_stall(proc / "pressure" / "cpu", "some"),
        queue=queue,
    )


def _stall(path: Path, kind: str) -> float | None:
    """A share of the last 10 seconds; None where the kernel does not count."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        name, average, *_ = line.split()
        if name == kind:
            return float(average.removeprefix("avg10=")) / 100
    return None


class Pressure:
    """The number in force, looked at again every EVERY_S; every change is logged."""

    def __init__(self, most: int, look: Callable[[], Load] = read) -> None:
        self.allowed = most
        self._most = most
        self._look = look

    async def watch(self, running: Callable[[], int], changed: Callable[[], None]) -> None:
        """Until cancelled; `changed` is called after a change."""
        while True:
            await asyncio.sleep(EVERY_S)
            if self.update(running()):
                changed()

    def update(self, running: int) -> bool:
        load, before = self._look(), self.allowed
        self.allowed = allowed(before, running, self._most, load)
        if self.allowed < before:
            log.warning("%s; at most %d attempts at once instead of %d", load.tight, self.allowed, before)
        elif self.allowed > before:
            log.info("pressure is gone; at most %d attempts at once (of %d)", self.allowed, self._most)
        return self.allowed != before
