"""List and watch as one stream of changes that survives what clusters do.

    list ──▶ watch from the list's version ──▶ the server ends it ──▶ watch from the last version seen ...
      ▲            │ 410, broken, silent beyond its time, or RESYNC_S have passed
      └────────────┘

A watch that lasted goes on at once. Whatever else comes before the next list or watch, a failure or a quick end, is
followed by a pause that grows up to `longest_pause_s`; a watch that lasted makes it short again, one that ended well
and told something as well.

A list is compared with what is known: what changed meanwhile is reported as if it had been watched, and what is gone
is reported as deleted in its last known state. So a silent watch costs time, never an event. Bookmarks move the
version on where nothing of ours happens.

One task per kind reads; all put into one queue; the consumer takes from it.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Literal

from leyden.controller.backends.kubernetes.api import KubernetesApi, ResourceKind
from leyden.controller.backends.kubernetes.cluster_errors import ClusterError, ClusterForbidden, VersionGone
from leyden.controller.backends.kubernetes.objects import Object

log = logging.getLogger(__name__)
ADDED: Literal["ADDED"] = "ADDED"
MODIFIED: Literal["MODIFIED"] = "MODIFIED"
DELETED: Literal["DELETED"] = "DELETED"
LISTED: Literal["LISTED"] = "LISTED"


@dataclass(frozen=True, slots=True)
class Change:
    """What happened to an object. LISTED has none: all of the kind that exists has been reported."""

    kind: ResourceKind
    event: Literal["ADDED", "MODIFIED", "DELETED", "LISTED"]
    object: Object | None = None


@dataclass(frozen=True, slots=True)
class Timing:
    """The server ends a watch after `watch_s`; one silent for `slack_s` longer is dead; after `resync_s` a new list
    is taken anyway. Pauses between attempts grow from `pause_s` to `longest_pause_s`, which is also how long a watch
    lasts that needs no pause after it."""

    watch_s: int = 60
    slack_s: float = 10.0
    resync_s: float = 300.0
    pause_s: float = 0.2
    longest_pause_s: float = 5.0


@dataclass(frozen=True, slots=True)
class Selection:
    """One kind of object, by labels and fields."""

    kind: ResourceKind
    labels: str = ""
    fields: str = ""


async def changes(
    api: KubernetesApi, selections: Sequence[Selection], timing: Timing | None = None
) -> AsyncIterator[Change]:
    """Without end. Raises ClusterForbidden where the first list is refused."""
    queue: asyncio.Queue[Change | BaseException] = asyncio.Queue()
    tasks = [asyncio.create_task(_feed(api, s, timing or Timing(), queue)) for s in selections]
    try:
        while True:
            change = await queue.get()
            if isinstance(change, BaseException):
                raise change
            yield change
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _feed(api: KubernetesApi, selection: Selection, timing: Timing, queue: asyncio.Queue[Any]) -> None:
    try:
        await _Follower(api, selection, timing, queue).run()
    except Exception as error:
        queue.put_nowait(error)


class _Follower:
    """One kind. `known` maps uids to objects; `version` is None when a list is due."""

    def __init__(
        self, api: KubernetesApi, selection: Selection, timing: Timing, queue: asyncio.Queue[Change | BaseException]
    ) -> None:
        self._api = api
        self._selection = selection
        self._timing = timing
        self._queue = queue
        self._known: dict[str, Object] = {}
        self._version: str | None = None
        self._listed = 0.0
        self._ever_listed = False

    async def run(self) -> None:
        pause_s = self._timing.pause_s
        while True:
            began, told = time.monotonic(), False
            try:
                if self._version is None or began > self._listed + self._timing.resync_s:
                    await self._list()
                    began = time.monotonic()
                told = await self._watch()
                problem, level = "it ended at once", logging.DEBUG
            except VersionGone:
                problem, level = "it is behind", logging.INFO
                self._version = None
            except ClusterForbidden as error:
                if not self._ever_listed:
                    raise
                problem, level = str(error), logging.WARNING
                self._version = None
            except ClusterError as error:
                problem, level = str(error), logging.INFO
                self._version = None
            lasted = time.monotonic() - began >= self._timing.longest_pause_s
            if lasted and self._version is not None:
                pause_s = self._timing.pause_s
                continue
            if told or lasted:
                pause_s = self._timing.pause_s
            log.log(level, "the watch of %s: %s; going on in %.1f s", self._selection.kind.plural, problem, pause_s)
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, self._timing.longest_pause_s)

    async def _list(self) -> None:
        selection = self._selection
        items, version = await self._api.list_all(selection.kind, labels=selection.labels, fields=selection.fields)
        present = {item["metadata"]["uid"]: item for item in items}
        for uid in [uid for uid in self._known if uid not in present]:
            self._tell(DELETED, self._known[uid])
        for item in items:
            before = self._known.get(item["metadata"]["uid"])
            if before is None:
                self._tell(ADDED, item)
            elif before["metadata"]["resourceVersion"] != item["metadata"]["resourceVersion"]:
                self._tell(MODIFIED, item)
        self._version, self._listed, self._ever_listed = version, time.monotonic(), True
        self._queue.put_nowait(Change(selection.kind, LISTED))

    async def _watch(self) -> bool:
        """Whether it told anything before the server ended it."""
        selection, timing = self._selection, self._timing
        assert self._version is not None
        stream = self._api.watch(
            selection.kind,
            self._version,
            labels=selection.labels,
            fields=selection.fields,
            timeout_s=timing.watch_s,
            slack_s=timing.slack_s,
        )
        async with aclosing(stream) as events:  # type: ignore[type-var]
            told = False
            async for event, thing in events:
                if event in (ADDED, MODIFIED, DELETED):
                    self._tell(event, thing)
                    told = True
                self._version = thing["metadata"]["resourceVersion"]
        return told

    def _tell(self, event: Any, thing: Object) -> None:
        """A watch that starts anew may repeat an addition; what is known is then modified, or the same."""
        uid, version = thing["metadata"]["uid"], thing["metadata"]["resourceVersion"]
        before = self._known.get(uid)
        if event == DELETED:
            self._known.pop(uid, None)
        else:
            if before is not None and before["metadata"]["resourceVersion"] == version:
                return
            self._known[uid] = thing
            event = ADDED if before is None else MODIFIED
        self._queue.put_nowait(Change(self._selection.kind, event, thing))
