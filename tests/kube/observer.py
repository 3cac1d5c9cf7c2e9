"""What a stream of changes says of Jobs and pods, kept for tests to look at."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

from leyden.controller.backends.kubernetes.api import JOBS, PODS, KubernetesApi
from leyden.controller.backends.kubernetes.states import Patience, Seen
from leyden.controller.backends.kubernetes.verdict import verdict
from leyden.controller.backends.kubernetes.watch import Change, Selection, Timing, changes

SELECTIONS = [Selection(JOBS), Selection(PODS)]


class Observer:
    """Everything that a stream of changes says, in order, and the last state of each object."""

    def __init__(self, api: KubernetesApi, timing: Timing | None = None) -> None:
        self.changes: list[Change] = []
        self.last: dict[str, Change] = {}
        self._news = asyncio.Event()
        self._task = asyncio.create_task(self._read(api, timing))

    async def _read(self, api: KubernetesApi, timing: Timing | None) -> None:
        async with aclosing(changes(api, SELECTIONS, timing)) as stream:  # type: ignore[type-var]
            async for change in stream:
                self.changes.append(change)
                if change.object:
                    self.last[change.object["metadata"]["uid"]] = change
                self._news.set()

    async def until(self, holds: Callable[[], bool], timeout_s: float = 60) -> None:
        async with asyncio.timeout(timeout_s):
            while not holds():
                self._news.clear()
                waiting = asyncio.create_task(self._news.wait())
                done, _ = await asyncio.wait([waiting, self._task], return_when=asyncio.FIRST_COMPLETED)
                if self._task in done:
                    self._task.result()

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def seen(self, name: str) -> Seen:
        """A Job and its pods as the verdict wants them."""
        found = [(c.kind, c) for c in self.last.values() if _label(c) == name]
        jobs = [c for kind, c in found if kind == JOBS and c.event != "DELETED"]
        pods = [c for kind, c in found if kind == PODS]
        gone = frozenset(p.object["metadata"]["uid"] for p in pods if p.event == "DELETED" and p.object)
        expected = not any(kind == JOBS for kind, _ in found)
        return Seen(jobs[0].object if jobs else None, [p.object for p in pods if p.object], (), gone, expected=expected)

    def verdict(self, name: str) -> Any:
        return verdict(self.seen(name), Patience(queue_s=600, image_s=60, save_s=60), time.time())

    def is_a(self, verdict_: type, name: str) -> bool:
        return bool(self.seen(name).pods) and isinstance(self.verdict(name), verdict_)

    def listed(self) -> int:
        return sum(c.event == "LISTED" for c in self.changes)


def _label(change: Change) -> str | None:
    return (change.object or {}).get("metadata", {}).get("labels", {}).get("leyden/job")
