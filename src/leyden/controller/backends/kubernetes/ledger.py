"""What is known of a run's Jobs: the latest state of each, its pods, the warnings about them. One reader changes it.

Jobs and pods are told of apart, and each may be behind the other: `verdict` says which ends rest on that, and `read`
takes in what the API server answers when it is asked. A state older than the known one changes nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from leyden.controller.backends.kubernetes.api import EVENTS, JOBS, PODS
from leyden.controller.backends.kubernetes.manifest import JOB_ID
from leyden.controller.backends.kubernetes.objects import Object, unix_time
from leyden.controller.backends.kubernetes.states import Seen
from leyden.controller.backends.kubernetes.watch import DELETED, MODIFIED, Change

MOST_WARNED = 5000
WARNINGS_EACH = 20


class Ledger:
    """By job id. Of two Jobs with one id, a deleted one and its successor, the younger counts."""

    def __init__(self) -> None:
        self._jobs: dict[str, Object] = {}
        self._pods: dict[str, dict[str, Object]] = {}
        self._gone: dict[str, set[str]] = {}
        self._changed: dict[str, float] = {}
        self._pod_changed: dict[str, float] = {}
        self._warnings: OrderedDict[str, list[Object]] = OrderedDict()
        self._job_of: dict[str, str] = {}
        self._deleted: set[str] = set()
        self._killed: dict[str, tuple[str, float]] = {}
        self._said: dict[str, str] = {}

    def absorb(self, change: Change, now: float) -> str | None:
        """Take in a change. Answers the id of the job that it is about, if that is known."""
        thing = change.object
        if thing is None:
            return None
        if change.kind is EVENTS:
            return self._warn(thing) if change.event != DELETED else None
        metadata = thing["metadata"]
        job_id: str | None = metadata.get("annotations", {}).get(JOB_ID)
        if job_id is None:
            return None
        self._job_of[metadata["uid"]] = job_id
        self._changed[job_id] = now
        if change.kind is JOBS:
            self._absorb_job(job_id, thing, deleted=change.event == DELETED)
        else:
            self._absorb_pod(job_id, thing, now, deleted=change.event == DELETED)
        return job_id

    def read(self, job_id: str, jobs: Sequence[Object], found: Sequence[Object], now: float) -> None:
        """Take in all Jobs of this id, and all pods found after them, that exist by now."""
        for kind, things in ((JOBS, jobs), (PODS, found)):
            for thing in things:
                self.absorb(Change(kind, MODIFIED, thing), now)
        known, present = self._jobs.get(job_id), {thing["metadata"]["uid"] for thing in (*jobs, *found)}
        if known is not None and known["metadata"]["uid"] not in present:
            self.absorb(Change(JOBS, DELETED, known), now)
        for uid, pod in tuple(self._pods.get(job_id, {}).items()):
            if uid not in present and uid not in self._gone.get(job_id, ()):
                self.absorb(Change(PODS, DELETED, pod), now)

    def job(self, job_id: str) -> Object | None:
        return self._jobs.get(job_id)

    def jobs(self) -> Iterator[str]:
        return iter(tuple(self._jobs))

    def created(self, since: float) -> list[float]:
        """When the Jobs that exist were created, after `since` (Unix seconds), oldest first."""
        times = (unix_time(job["metadata"].get("creationTimestamp")) for job in self._jobs.values())
        return sorted(t for t in times if t > since)

    def pod(self, job_id: str) -> Object | None:
        """The first pod of a Job: an attempt runs once."""
        pods = self._pods.get(job_id, {}).values()
        return min(pods, key=lambda p: unix_time(p["metadata"].get("creationTimestamp")), default=None)

    def pod_changed(self, job_id: str) -> float:
        """When a pod of the Job was last told of, by this machine's clock; 0 if none was."""
        return self._pod_changed.get(job_id, 0.0)

    def seen(self, job_id: str) -> Seen:
        job, pods = self._jobs.get(job_id), self._pods.get(job_id, {})
        uids = [*pods, *([job["metadata"]["uid"]] if job else [])]
        warnings = [event for uid in uids for event in self._warnings.get(uid, ())]
        gone = frozenset(self._gone.get(job_id, ()))
        expected = job is None and job_id not in self._deleted
        changed, killed = self._changed.get(job_id, 0.0), self._killed.get(job_id)
        return Seen(job, tuple(pods.values()), warnings, gone, changed, expected, killed, self._said.get(job_id))

    def kill(self, job_id: str, reason: str, now: float) -> None:
        """Note that this controller ends a Job."""
        self._killed[job_id] = reason, now

    def hear(self, job_id: str, said: str) -> None:
        """Note what the keeper has printed."""
        self._said[job_id] = said

    def is_gone(self, job_id: str) -> bool:
        """Whether neither the Job nor a pod of it exists."""
        return job_id not in self._jobs and self._pods.get(job_id, {}).keys() <= self._gone.get(job_id, set())

    def forget(self, job_id: str) -> None:
        """Drop what is known of a Job's pods; the Job itself stays until the cluster has deleted it."""
        for uid in (*self._pods.pop(job_id, {}), *self._gone.pop(job_id, set())):
            self._job_of.pop(uid, None)
            self._warnings.pop(uid, None)
        self._changed.pop(job_id, None)
        self._pod_changed.pop(job_id, None)
        self._deleted.discard(job_id)
        self._killed.pop(job_id, None)
        self._said.pop(job_id, None)

    def _absorb_job(self, job_id: str, job: Object, *, deleted: bool) -> None:
        known = self._jobs.get(job_id)
        uid = job["metadata"]["uid"]
        if deleted:
            self._job_of.pop(uid, None)
            if known is not None and known["metadata"]["uid"] == uid:
                del self._jobs[job_id]
                self._deleted.add(job_id)
            return
        same = known is not None and known["metadata"]["uid"] == uid
        if known is None or (same and not _is_older(job, known)) or (not same and _age(job) >= _age(known)):
            self._jobs[job_id] = job
            self._deleted.discard(job_id)

    def _absorb_pod(self, job_id: str, pod: Object, now: float, *, deleted: bool) -> None:
        uid, pods = pod["metadata"]["uid"], self._pods.setdefault(job_id, {})
        known, gone = pods.get(uid), self._gone.setdefault(job_id, set())
        self._pod_changed[job_id] = now
        if known is None or not _is_older(pod, known):
            pods[uid] = pod
        if deleted:
            gone.add(uid)
        elif known is None or _is_older(known, pod):
            gone.discard(uid)

    def _warn(self, event: Object) -> str | None:
        uid = event.get("involvedObject", {}).get("uid")
        if not uid:
            return None
        kept = self._warnings.setdefault(uid, [])
        others = [e for e in kept if e["metadata"]["uid"] != event["metadata"]["uid"]]
        kept[:] = [*others[-WARNINGS_EACH + 1 :], event]
        self._warnings.move_to_end(uid)
        while len(self._warnings) > MOST_WARNED:
            self._warnings.popitem(last=False)
        return self._job_of.get(uid)


def _age(job: Object) -> float:
    return unix_time(job["metadata"].get("creationTimestamp"))


def _is_older(thing: Object, known: Object) -> bool:
    """Whether a state of an object precedes the known one. Versions of one kind are numbers that grow."""
    versions = [str(t["metadata"].get("resourceVersion", "")) for t in (thing, known)]
    return all(v.isdecimal() for v in versions) and int(versions[0]) < int(versions[1])
