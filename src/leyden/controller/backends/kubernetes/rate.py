"""How fast Jobs are made: so many a minute, whoever asks first, also over a restart."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

log = logging.getLogger(__name__)
MINUTE_S = 60.0


class CreationRate:
    """At most `limit` creations begin in any MINUTE_S. `path` remembers when those of the last minute did, one Unix
    time a line: a Job that is made and gone again between two controllers counts as well. A file that cannot be written
    holds nothing up: the Jobs that exist are counted after a start too.
    """

    def __init__(
        self,
        limit: int,
        path: Path,
        *,
        now: Callable[[], float] = time.time,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._limit = limit
        self._path = path
        self._now = now
        self._sleep = sleep
        self._turn = asyncio.Lock()
        self._times: list[float] = []
        self._lines = 0

    def resume(self, existing: Iterable[float]) -> None:
        """After a start: what the file tells, or the creation times of the Jobs that exist, where those are more."""
        self._times = max(self._recent(self._written()), self._recent(existing), key=len)
        self._write()

    async def room(self) -> None:
        """Wait until another Job may be created, in the order of the asking; it counts from now on."""
        async with self._turn:
            self._times = self._recent(self._times)
            while len(self._times) >= self._limit:
                await self._sleep(self._times[-self._limit] + MINUTE_S - self._now())
                self._times = self._recent(self._times)
            self._times.append(self._now())
            self._note()

    def _written(self) -> list[float]:
        """Nothing, where the file is missing, damaged, or cannot be read."""
        try:
            return [float(line) for line in self._path.read_text().splitlines()]
        except (OSError, ValueError):
            return []

    def _recent(self, times: Iterable[float]) -> list[float]:
        """Those of the last minute, in order. One in the future was read from another clock: it counts as now."""
        now = self._now()
        return sorted(min(t, now) for t in times if t > now - MINUTE_S)

    def _note(self) -> None:
        """Without rewriting what the file has, until most of that is old."""
        if self._lines >= 10 * self._limit:
            self._write()
            return
        try:
            with self._path.open("a") as file:
                file.write(f"{self._times[-1]}\n")
        except OSError as error:
            self._is_not_kept(error)
        self._lines += 1

    def _write(self) -> None:
        part = self._path.with_name(self._path.name + ".part")
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            part.write_text("".join(f"{t}\n" for t in self._times))
            part.replace(self._path)
        except OSError as error:
            self._is_not_kept(error)
        self._lines = len(self._times)

    def _is_not_kept(self, error: OSError) -> None:
        log.warning("when Jobs were made is not kept in %s: %s", self._path, error)
