"""Jobs and pods are told of apart, late, in lists and in watches: the end that is told is the one that was.

A truth is a sequence of states of one Job and its pod, as a cluster would have them one after the other. What is told
of it may be behind at any moment, for each kind by itself; states in between are left out where a watch had expired. Of
each truth the first end that is told is compared with the one that follows from all of it.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from leyden.controller.backends.kubernetes.api import JOBS, PODS, ResourceKind
from leyden.controller.backends.kubernetes.ledger import Ledger
from leyden.controller.backends.kubernetes.states import Ended, Patience
from leyden.controller.backends.kubernetes.verdict import verdict
from leyden.controller.backends.kubernetes.watch import DELETED, MODIFIED, Change

Object = dict[str, Any]
PATIENCE = Patience(queue_s=600, image_s=60, save_s=60)
START = 1_800_000_000
NOW = START + 40.0
META = {"annotations": {"leyden/job-id": "r.1"}, "creationTimestamp": "2027-01-15T08:00:00Z"}


def clock(second: int) -> str:
    """The `second`-th second of the harness's life."""
    return f"2027-01-15T08:00:{second:02}Z"


@dataclass(frozen=True)
class State:
    """A moment: None is what does not exist, or not any more."""

    job: Object | None
    pod: Object | None


def job(**status: Any) -> Object:
    spec = {"activeDeadlineSeconds": 3600}
    return {"metadata": {**META, "name": "j", "uid": "job"}, "spec": spec, "status": {"startTime": clock(0)} | status}


def complete(kind: str = "Complete") -> Object:
    return job(conditions=[{"type": kind, "status": "True", "lastTransitionTime": clock(30)}], completionTime=clock(30))


def pod(phase: str = "Running", *, harness: Object, keep: Object, deleted: int | None = None, **status: Any) -> Object:
    metadata: Object = {**META, "name": "p", "uid": "pod"}
    if deleted is not None:
        metadata |= {"deletionTimestamp": clock(deleted + 5), "deletionGracePeriodSeconds": 5}
    statuses = [{"name": "keep", "state": keep}, {"name": "harness", "state": harness}]
    return {
        "metadata": metadata,
        "spec": {"containers": [{"name": "keep"}, {"name": "harness"}]},
        "status": {"phase": phase, "containerStatuses": statuses, **status},
    }


RUNS: Object = {"running": {"startedAt": clock(1)}}


def done(second: int, code: int = 0) -> Object:
    return {"terminated": {"exitCode": code, "startedAt": clock(1), "finishedAt": clock(second)}}


def life(code: int) -> list[State]:
    """A rollout's pod, from nothing to its end."""
    return [
        State(None, None),
        State(job(), None),
        State(job(), pod("Pending", harness={}, keep={})),
        State(job(), pod(harness=RUNS, keep=RUNS)),
        State(job(), pod(harness=done(10, code), keep=RUNS)),
        State(job(), pod("Succeeded", harness=done(10, code), keep=done(12))),
        State(complete("Failed" if code else "Complete"), pod("Succeeded", harness=done(10, code), keep=done(12))),
    ]


def taken(state: State, second: int, how: str) -> list[State]:
    """What then happens to a pod that is deleted, evicted or preempted, or whose Job is deleted."""
    assert state.pod is not None
    shown = copy.deepcopy(state.pod)
    if how == "preempted":
        condition = {
            "type": "DisruptionTarget",
            "status": "True",
            "reason": "Preempted",
            "lastTransitionTime": clock(second),
        }
        shown["status"]["conditions"] = [condition]
    shown["metadata"] |= {"deletionTimestamp": clock(second + 5), "deletionGracePeriodSeconds": 5}
    final = copy.deepcopy(shown)
    for container in final["status"]["containerStatuses"]:
        if "terminated" not in container["state"]:
            container["state"] = done(second, 143 if container["name"] == "harness" else 0)
    job_left = None if how == "job deleted" else state.job
    return [State(job_left, shown), State(job_left, final), State(job_left, None), State(None, None)]


@st.composite
def truths(draw: st.DrawFn) -> list[State]:
    whole = life(draw(st.sampled_from([0, 3])))
    if draw(st.booleans()):
        return whole
    at = draw(st.integers(3, len(whole) - 1))
    second = {3: 5, 4: 11}.get(at, 13)
    return [*whole[: at + 1], *taken(whole[at], second, draw(st.sampled_from(["deleted", "preempted", "job deleted"])))]


def things(state: State) -> dict[ResourceKind, Object | None]:
    return {JOBS: state.job, PODS: state.pod}


class Told:
    """What a controller knows that was told of a truth up to some moment, for each kind its own."""

    def __init__(self, truth: list[State]) -> None:
        self.truth = [versioned(state, i + 1) for i, state in enumerate(truth)]
        self.ledger = Ledger()
        self.known: dict[ResourceKind, int] = {JOBS: 0, PODS: 0}

    def watch(self, kind: ResourceKind, upto: int) -> None:
        """Every state in between."""
        for at in range(self.known[kind] + 1, upto + 1):
            self._tell(kind, at - 1, at)

    def relist(self, kind: ResourceKind, upto: int) -> None:
        """The last one only."""
        self._tell(kind, self.known[kind], upto)

    def _tell(self, kind: ResourceKind, before: int, after: int) -> None:
        old, new = things(self.truth[before])[kind], things(self.truth[after])[kind]
        if new is not None:
            self.ledger.absorb(Change(kind, MODIFIED, new), NOW)
        elif old is not None:
            self.ledger.absorb(Change(kind, DELETED, old), NOW)
        self.known[kind] = after

    def ask(self, now: int) -> None:
        state = self.truth[now]
        self.ledger.read("r.1", [state.job] if state.job else [], [state.pod] if state.pod else [], NOW)

    def end(self, now: int) -> Ended | None:
        """As the backend tells it: an end that is not certain once more after the API server was asked."""
        if self.ledger.job("r.1") is None and self.ledger.pod("r.1") is None:
            return None
        found = verdict(self.ledger.seen("r.1"), PATIENCE, NOW)
        if isinstance(found, Ended) and not found.certain:
            self.ask(now)
            found = verdict(self.ledger.seen("r.1"), PATIENCE, NOW)
        return found if isinstance(found, Ended) else None


def versioned(state: State, version: int) -> State:
    made = [copy.deepcopy(thing) for thing in (state.job, state.pod)]
    for thing in made:
        if thing is not None:
            thing["metadata"]["resourceVersion"] = str(version)
    return State(*made)


def orderly(truth: list[State]) -> Ended:
    """Everything told at once when it happens; then time passes."""
    told = Told(truth)
    for now in range(1, len(truth)):
        told.watch(JOBS, now)
        told.watch(PODS, now)
        if found := told.end(now):
            return found
    raise AssertionError("it never ends")


def shown(ended: Ended) -> tuple[Any, ...]:
    return ended.exit.exit_code, ended.exit.signal, ended.exit.killed, ended.exit.error is not None, ended.saved


STEPS = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from([JOBS, PODS]), st.integers(0, 9), st.booleans()), max_size=20
)


@given(truths(), STEPS)
def test_whatever_is_told_when_the_end_is_the_one_that_was(
    truth: list[State], steps: list[tuple[int, ResourceKind, int, bool]]
) -> None:
    """Each step: so many states happen; the watch or list of a kind, so far behind, is told. Only where nothing of the
    pod is left to be read, its end may be void instead; it is never another one."""
    last = len(truth) - 1
    told, now, found = Told(truth), 0, None
    for happens, kind, behind, listed in [*steps, (last, JOBS, 0, True), (0, PODS, 0, True)]:
        now = min(last, now + happens)
        upto = max(told.known[kind], now - behind)
        (told.relist if listed else told.watch)(kind, upto)
        found = told.end(now)
        if found is not None:
            break
    if found is None:
        assert told.ledger.is_gone("r.1")  # `find` and the deadline of the start see to it
        return
    void = found.exit.error is not None or not found.saved
    assert shown(found) == shown(orderly(truth)) or (truth[now].pod is None and void)


def test_a_job_and_its_pod_are_both_listed_before_anything_is_final() -> None:
    """Both watches expire; meanwhile the harness ends with exit 0, and its workspace is saved. Jobs come first."""
    truth = life(0)
    for first, second in ((JOBS, PODS), (PODS, JOBS)):
        told, last = Told(truth), len(truth) - 1
        told.watch(JOBS, 3)
        told.watch(PODS, 3)
        told.relist(first, last)
        found = told.end(last)
        if found is None:
            told.relist(second, last)
            found = told.end(last)
        assert found is not None and shown(found) == (0, None, None, False, True)


def test_a_pod_that_nobody_was_told_of_yet_is_read_before_its_job_is_final() -> None:
    truth = life(0)
    told, last = Told(truth), len(truth) - 1
    told.relist(JOBS, last)
    found = told.end(last)
    assert found is not None and shown(found) == (0, None, None, False, True)


def test_a_job_that_went_before_the_end_of_its_pod_was_told() -> None:
    """The Job was deleted after all was done; of its pod the last that is known is that it runs."""
    truth = [*life(0), State(None, life(0)[-1].pod)]
    told, last = Told(truth), len(truth) - 1
    told.watch(PODS, 3)
    told.watch(JOBS, last)
    found = told.end(last)
    assert found is not None and shown(found) == (0, None, None, False, True)


def test_a_state_that_comes_late_changes_nothing() -> None:
    told = Told(life(0))
    told.ask(5)
    told.watch(PODS, 3)
    found = told.end(5)
    assert found is not None and shown(found) == (0, None, None, False, True)
