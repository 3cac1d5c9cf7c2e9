"""What to do next, as a pure function: `plan(observed, desired, limits, now)` -> actions.

`desired` is what the gateway says (rollouts and their states), `observed` what runs on this machine. Capacity
is counted from `observed` at every call, so that no ending can leak a slot. An attempt with an action under
way is `busy`: it holds its slot and gets no second action.

    queued ── Start ──▶ running ── harness ends ── Report ──▶ grading ── Grade ── grader ends ── Finish ──▶
    final
                           │ deadline: Refresh, then Kill                 │ crash: Grade again, then
                           Infrastructure └ lost, killed by Leyden, never started: Infrastructure ──▶ queued
                           again, or failed
    the gateway says otherwise (cancelled, another attempt): Kill what runs, then Forget
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from leyden.controller.jobs import CANCELLED, OWN_ENDS, TIMEOUT, Exit, grader_job, harness_job
from leyden.records import Rollout
from leyden.types import RolloutState

LONGEST_WAIT_S = 90.0  # a wait that is longer was begun before the clock was set back
LIVE = (RolloutState.RUNNING, RolloutState.GRADING)


class Phase(StrEnum):
    """Where an attempt of this machine stands."""

    STARTING = "starting"  # and, where that takes time, waiting for a place to run
    RUNNING = "running"
    EXITED = "exited"
    GRADING = "grading"
    GRADED = "graded"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class AttemptStatus:
    """One attempt as this machine sees it. Times are Unix seconds.

    `started` is the start of the harness, later of the grader, or of the wait for a place to run while it is STARTING
    or, GRADING, `waits`; `tries` counts graders started; `refreshed` is when the gateway's record was last read on
    purpose; `problem` says why an attempt is lost, or still waits, `final` that another one would be lost too.
    """

    rollout_id: str
    attempt: int
    phase: Phase
    started: float = 0.0
    exit: Exit | None = None
    tries: int = 0
    grader_exit: Exit | None = None
    refreshed: float = 0.0
    busy: bool = False
    killing: bool = False
    waits: bool = False
    problem: str = "nothing is known of it on this machine any more"
    final: bool = False

    @property
    def job_id(self) -> str:
        """The job that runs, or ran last."""
        if self.tries:
            return grader_job(self.rollout_id, self.attempt, self.tries)
        return harness_job(self.rollout_id, self.attempt)


@dataclass(frozen=True, slots=True)
class Observed:
    """What runs: attempts by rollout id, the ids of all jobs, and the controllers whose leases have ended."""

    attempts: Mapping[str, AttemptStatus]
    jobs: Iterable[str] = ()
    gone: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Limits:
    """`concurrency` attempts at once. `grader_tries` 0: the harness itself reports its reward."""

    controller_id: str
    concurrency: int
    start_timeout_s: float
    timeout_s: float
    grader_timeout_s: float
    grader_tries: int
    min_free_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Start:
    """Claim a queued rollout and start its harness."""

    rollout_id: str


@dataclass(frozen=True, slots=True)
class Adopt:
    """Find out on this machine how an attempt stands that an earlier controller started."""

    rollout_id: str


@dataclass(frozen=True, slots=True)
class TakeOver:
    """Become responsible for an attempt whose controller is gone; then adopt it."""

    rollout_id: str


@dataclass(frozen=True, slots=True)
class Report:
    """Tell the gateway how the harness ended."""

    rollout_id: str


@dataclass(frozen=True, slots=True)
class Grade:
    """Start the grader for the `number`-th time."""

    rollout_id: str
    number: int


@dataclass(frozen=True, slots=True)
class Finish:
    rollout_id: str


@dataclass(frozen=True, slots=True)
class Infrastructure:
    """The attempt is void; if that is `final`, so would be the next one."""

    rollout_id: str
    reason: str
    final: bool = False


@dataclass(frozen=True, slots=True)
class Refresh:
    """Read the rollout from the gateway: its held time or reward may be newer than what the feed told."""

    rollout_id: str


@dataclass(frozen=True, slots=True)
class Kill:
    job_id: str
    reason: str
    rollout_id: str | None = field(default=None)


@dataclass(frozen=True, slots=True)
class Forget:
    """Clean up after an attempt that is over."""

    rollout_id: str


Action = Start | Adopt | TakeOver | Report | Grade | Finish | Infrastructure | Refresh | Kill | Forget


def plan(observed: Observed, desired: Mapping[str, Rollout], limits: Limits, now: float) -> list[Action]:
    """The actions that are due. Applying none of them and asking again gives the same ones."""
    actions: list[Action] = []
    for attempt in observed.attempts.values():
        if not attempt.busy:
            actions += _next(attempt, desired.get(attempt.rollout_id), limits, now)
    others = [r for r in desired.values() if r.rollout_id not in observed.attempts]
    live = [r for r in others if r.state in LIVE]
    adoptable = [r for r in live if r.controller == limits.controller_id]
    actions += [Adopt(r.rollout_id) for r in adoptable]
    actions += [TakeOver(r.rollout_id) for r in live if r.controller in observed.gone]
    actions += _strays(observed, live)
    free = limits.concurrency - len(observed.attempts) - len(adoptable)
    waiting = [r for r in others if r.state is RolloutState.QUEUED and not now < r.retry_at < now + LONGEST_WAIT_S]
    waiting.sort(key=lambda r: (r.created, r.step, r.slot, r.member))
    actions += [Start(r.rollout_id) for r in waiting[: max(0, free)]]
    return actions


def next_deadline(observed: Observed, desired: Mapping[str, Rollout], limits: Limits, now: float) -> float | None:
    """When, after `now`, `plan` may answer something else although nothing happened; None if never."""
    times = [_deadline(a, desired.get(a.rollout_id), limits) for a in observed.attempts.values() if not a.killing]
    times += [r.retry_at for r in desired.values() if r.state is RolloutState.QUEUED]
    return min((t for t in times if t is not None and t > now), default=None)


def _next(attempt: AttemptStatus, rollout: Rollout | None, limits: Limits, now: float) -> list[Action]:
    if not is_current(attempt, rollout, limits.controller_id):
        return _abandon(attempt)
    assert rollout is not None
    if attempt.phase in (Phase.STARTING, Phase.RUNNING, Phase.GRADING):
        return _watch(attempt, rollout, limits, now)
    if attempt.phase is Phase.EXITED:
        return _after_harness(attempt, rollout, limits)
    if attempt.phase is Phase.GRADED:
        return _after_grader(attempt, rollout, limits)
    if attempt.phase is Phase.LOST:
        return [Infrastructure(attempt.rollout_id, attempt.problem, attempt.final)]
    return []


def is_current(attempt: AttemptStatus, rollout: Rollout | None, controller_id: str) -> bool:
    """Whether the gateway still counts on this attempt, and on this controller for it."""
    return (
        rollout is not None
        and rollout.state in LIVE
        and rollout.attempt == attempt.attempt
        and rollout.controller == controller_id
    )


def _abandon(attempt: AttemptStatus) -> list[Action]:
    """The gateway has no use for this attempt: end what runs, then clean up."""
    if attempt.phase in (Phase.STARTING, Phase.RUNNING, Phase.GRADING):
        return [] if attempt.killing else [Kill(attempt.job_id, CANCELLED, attempt.rollout_id)]
    return [Forget(attempt.rollout_id)]


def _watch(attempt: AttemptStatus, rollout: Rollout, limits: Limits, now: float) -> list[Action]:
    """At the deadline read once more how long Leyden held the harness; then kill it."""
    deadline = _deadline(attempt, rollout, limits)
    if attempt.killing or deadline is None or now < deadline:
        return []
    if attempt.phase is Phase.STARTING or attempt.waits:
        why = f"not started after {now - attempt.started:.0f} s: {attempt.problem}"
        return [Kill(attempt.job_id, why, attempt.rollout_id)]
    if attempt.phase is Phase.RUNNING and attempt.refreshed < deadline:
        return [Refresh(attempt.rollout_id)]
    return [Kill(attempt.job_id, TIMEOUT, attempt.rollout_id)]


def _deadline(attempt: AttemptStatus, rollout: Rollout | None, limits: Limits) -> float | None:
    if attempt.phase is Phase.STARTING or attempt.waits:
        return attempt.started + limits.start_timeout_s
    if attempt.phase is Phase.RUNNING:
        return attempt.started + limits.timeout_s + (rollout.held_s if rollout else 0.0)
    if attempt.phase is Phase.GRADING:
        return attempt.started + limits.grader_timeout_s
    return None


def _after_harness(attempt: AttemptStatus, rollout: Rollout, limits: Limits) -> list[Action]:
    assert attempt.exit is not None
    if attempt.exit.error or attempt.exit.killed not in OWN_ENDS:
        return [Infrastructure(attempt.rollout_id, attempt.exit.describe(), attempt.exit.final)]
    if rollout.state is RolloutState.RUNNING:
        return [Report(attempt.rollout_id)]
    if limits.grader_tries == 0 or rollout.reward is not None:
        return [Finish(attempt.rollout_id)]
    return [Grade(attempt.rollout_id, 1)]


def _after_grader(attempt: AttemptStatus, rollout: Rollout, limits: Limits) -> list[Action]:
    """A reward that was accepted stands, whatever became of the grader afterwards."""
    assert attempt.grader_exit is not None
    if rollout.reward is not None or attempt.grader_exit.clean:
        return [Finish(attempt.rollout_id)]
    if not attempt.refreshed:
        return [Refresh(attempt.rollout_id)]
    if attempt.tries < limits.grader_tries:
        return [Grade(attempt.rollout_id, attempt.tries + 1)]
    why = f"the grader failed {attempt.tries} times, last: {attempt.grader_exit.describe()}"
    return [Infrastructure(attempt.rollout_id, why)]


def _strays(observed: Observed, live: list[Rollout]) -> list[Action]:
    """Jobs that belong to no attempt that this controller knows, and to no live one of any controller."""
    known = {(a.rollout_id, a.attempt) for a in observed.attempts.values()}
    known |= {(r.rollout_id, r.attempt) for r in live}
    prefixes = {harness_job(*key) for key in known}
    return [Kill(job, CANCELLED) for job in observed.jobs if job.partition(".grade")[0] not in prefixes]
