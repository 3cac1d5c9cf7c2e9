"""What is remembered of Jobs whose changes come in any order, and what is dropped again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from leyden.controller.backends.kubernetes.api import JOBS, PODS
from leyden.controller.backends.kubernetes.ledger import Ledger
from leyden.controller.backends.kubernetes.manifest import JOB_ID
from leyden.controller.backends.kubernetes.objects import unix_time
from leyden.controller.backends.kubernetes.states import Ended, Patience, Running
from leyden.controller.backends.kubernetes.verdict import KILLED, verdict
from leyden.controller.backends.kubernetes.watch import ADDED, DELETED, MODIFIED, Change

PATIENCE = Patience(queue_s=600, image_s=60, save_s=60)


def recorded(shape: str) -> tuple[Any, Any]:
    """A Job and its pod."""
    found = json.loads((Path(__file__).parent / "shapes" / f"{shape}.json").read_text())
    job, (pod,) = found["job"], found["pods"]
    for thing in (job, pod):
        thing["metadata"].setdefault("annotations", {})[JOB_ID] = "r.1"
    return job, pod


def test_a_pod_that_is_seen_before_its_job_runs() -> None:
    """Jobs and pods are watched apart: nobody has deleted a Job that was not seen yet."""
    job, pod = recorded("running")
    now = unix_time("2026-11-30T08:11:40Z")
    ledger = Ledger()
    ledger.absorb(Change(PODS, ADDED, pod), now)
    assert isinstance(verdict(ledger.seen("r.1"), PATIENCE, now), Running)
    ledger.absorb(Change(JOBS, ADDED, job), now)
    assert isinstance(verdict(ledger.seen("r.1"), PATIENCE, now), Running)
    ledger.absorb(Change(JOBS, DELETED, job), now)
    found = verdict(ledger.seen("r.1"), PATIENCE, now)
    assert isinstance(found, Ended) and "was deleted while it ran" in str(found.exit.error)


def test_a_pod_that_goes_before_its_job_says_who_killed_it() -> None:
    """The change that kills a Job is one of the Job; the pod's end may be told first."""
    job, pod = recorded("killed_ending")
    del job["metadata"]["annotations"][KILLED]
    job["spec"]["activeDeadlineSeconds"], job["status"]["conditions"] = 3600, []
    now = unix_time("2026-11-30T08:16:10Z")
    ledger = Ledger()
    for change in (Change(JOBS, ADDED, job), Change(PODS, ADDED, pod)):
        ledger.absorb(change, now)
    found = verdict(ledger.seen("r.1"), PATIENCE, now)
    assert isinstance(found, Ended) and "was deleted while it ran" in str(found.exit.error)
    ledger.kill("r.1", "timeout", unix_time("2026-11-30T08:16:01Z"))
    assert isinstance(verdict(ledger.seen("r.1"), PATIENCE, now), Running)
    ledger.absorb(Change(PODS, DELETED, pod), now)
    found = verdict(ledger.seen("r.1"), PATIENCE, now)
    assert isinstance(found, Ended) and (found.exit.killed, found.exit.error) == ("timeout", None)


def test_what_is_gone_can_be_forgotten() -> None:
    job, pod = recorded("succeeded")
    ledger = Ledger()
    for change in (Change(JOBS, ADDED, job), Change(PODS, ADDED, pod), Change(JOBS, DELETED, job)):
        ledger.absorb(change, 1.0)
        assert not ledger.is_gone("r.1")
    ledger.forget("r.1")
    ledger.absorb(Change(PODS, MODIFIED, pod), 2.0)
    assert not ledger.is_gone("r.1")
    ledger.absorb(Change(PODS, DELETED, pod), 3.0)
    assert ledger.is_gone("r.1")
    ledger.forget("r.1")
    assert ledger.pod("r.1") is None
