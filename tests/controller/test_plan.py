from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest

from leyden.client import Rollout
from leyden.controller.board import Board
from leyden.controller.jobs import Exit, lost
from leyden.controller.plan import (
    Action,
    Adopt,
    AttemptStatus,
    Finish,
    Forget,
    Grade,
    Infrastructure,
    Kill,
    Limits,
    Observed,
    Phase,
    Refresh,
    Report,
    Start,
    TakeOver,
    next_deadline,
    plan,
)
from leyden.types import RolloutState

LIMITS = Limits("me", concurrency=2, start_timeout_s=60.0, timeout_s=100.0, grader_timeout_s=10.0, grader_tries=2)
OK = Exit(exit_code=0, signal=None, started=0.0, ended=50.0)
BAD = replace(OK, exit_code=1)


def rollout(rollout_id: str = "r", state: str = "running", attempt: int = 1, **fields: Any) -> Rollout:
    base = {
        "rollout_id": rollout_id, "group_id": "g", "kind": "train", "step": 0, "slot": 0, "member": 0,
        "state": state, "attempt": attempt, "change": 1, "controller": "me",
    }  # fmt: skip
    return Rollout.from_json(base | fields)


def attempt(phase: Phase, rollout_id: str = "r", number: int = 1, **fields: Any) -> AttemptStatus:
    return AttemptStatus(rollout_id, number, phase, **fields)


def planned(
    attempts: list[AttemptStatus],
    rollouts: list[Rollout],
    now: float = 60.0,
    limits: Limits = LIMITS,
    jobs: tuple[str, ...] = (),
) -> list[Action]:
    observed = Observed({a.rollout_id: a for a in attempts}, jobs)
    return plan(observed, {r.rollout_id: r for r in rollouts}, limits, now)


def test_starts_the_oldest_queued_while_there_is_room() -> None:
    queued = [rollout(f"r{i}", "queued", 0, created=10.0 - i) for i in range(4)]
    assert planned([], queued) == [Start("r3"), Start("r2")]
    running = attempt(Phase.RUNNING, "x")
    assert planned([running], [*queued, rollout("x")]) == [Start("r3")]
    assert (
        planned([running, attempt(Phase.GRADING, "y", started=55.0)], [*queued, rollout("x"), rollout("y", "grading")])
        == []
    )


def test_one_group_starts_in_the_order_of_its_members() -> None:
    queued = [rollout(f"r{m}", "queued", 0, member=m) for m in (2, 0, 1)]
    assert planned([], queued) == [Start("r0"), Start("r1")]


def test_queued_again_starts_only_after_the_old_attempt_is_forgotten() -> None:
    again = rollout(state="queued", attempt=1)
    assert planned([attempt(Phase.LOST)], [again]) == [Forget("r")]
    assert planned([], [again]) == [Start("r")]


def test_claimed_attempts_without_a_trace_are_adopted_and_hold_a_slot() -> None:
    mine = [rollout("a"), rollout("b", "grading")]
    assert planned([], [*mine, rollout("q", "queued", 0)]) == [Adopt("a"), Adopt("b")]
    assert planned([], [rollout(controller="another")]) == []


@pytest.mark.parametrize(
    ("ended", "state", "fields", "expected"),
    [
        (OK, "running", {}, [Report("r")]),
        (BAD, "running", {}, [Report("r")]),
        (replace(OK, killed="timeout"), "running", {}, [Report("r")]),
        (replace(OK, exit_code=None, signal=11), "running", {}, [Report("r")]),
        (OK, "grading", {}, [Grade("r", 1)]),
        (OK, "grading", {"reward": 1.0}, [Finish("r")]),
        (replace(OK, error="cannot start 'x'"), "running", {}, [Infrastructure("r", "cannot start 'x'")]),
        (replace(OK, killed="orphaned"), "running", {}, [Infrastructure("r", "killed (orphaned)")]),
        (lost(0.0, 1.0), "running", {}, [Infrastructure("r", "killed (lost)")]),
        (OK, "cancelled", {}, [Forget("r")]),
        (OK, "succeeded", {"reward": 1.0}, [Forget("r")]),
        (OK, "running", {"attempt": 2}, [Forget("r")]),
    ],
)
def test_after_the_harness(ended: Exit, state: str, fields: dict[str, Any], expected: list[Action]) -> None:
    found = attempt(Phase.EXITED, exit=ended)
    assert planned([found], [rollout(**{"state": state, "attempt": 1} | fields)]) == expected


def test_a_void_attempt_is_followed_by_the_next_when_its_pause_is_over() -> None:
    again = rollout(state="queued", retry_at=62.0)
    assert planned([], [again], now=61.0) == []
    assert next_deadline(Observed({}), {"r": again}, LIMITS, 61.0) == 62.0
    assert planned([], [again], now=62.0) == [Start("r")]


def test_an_attempt_that_finds_no_place_is_void_and_its_wait_is_not_the_harness_s() -> None:
    waiting = attempt(Phase.STARTING, started=10.0, problem="Unschedulable: 0/1 nodes")
    assert planned([waiting], [rollout()], now=69.0) == []
    assert next_deadline(Observed({"r": waiting}), {"r": rollout()}, LIMITS, 69.0) == 70.0
    (kill,) = planned([waiting], [rollout()], now=70.0)
    assert kill == Kill("r.1", "not started after 60 s: Unschedulable: 0/1 nodes", "r")
    ended = attempt(Phase.EXITED, exit=replace(OK, exit_code=None, killed=kill.reason))
    assert planned([ended], [rollout()], now=70.0) == [Infrastructure("r", f"killed ({kill.reason})")]
    assert planned([attempt(Phase.RUNNING, started=70.0)], [rollout()], now=169.0) == []


def test_a_grader_that_finds_no_place_has_its_own_time_left() -> None:
    waiting = attempt(Phase.GRADING, exit=OK, tries=2, started=10.0, waits=True, problem="Unschedulable")
    grading = rollout(state="grading")
    assert planned([waiting], [grading], now=69.0) == []
    assert next_deadline(Observed({"r": waiting}), {"r": grading}, LIMITS, 69.0) == 70.0
    assert planned([waiting], [grading], now=70.0) == [Kill("r.1.grade2", "not started after 60 s: Unschedulable", "r")]


def test_a_wait_begins_when_the_job_was_handed_over_and_ends_with_its_start() -> None:
    """What a limit of Jobs a minute takes is nobody's time in the queue."""
    board = Board()
    board.attempts["r"] = attempt(Phase.STARTING, started=10.0, busy=True)
    board.placed("r.1", 500.0)
    assert board.attempts["r"].started == 500.0
    board.started("r.1", 520.0)
    board.placed("r.1", 530.0)  # the start was told first
    assert (board.attempts["r"].phase, board.attempts["r"].started) == (Phase.RUNNING, 520.0)
    board.attempts["r"] = attempt(Phase.GRADING, exit=OK, tries=1, started=600.0, waits=True)
    board.placed("r.1.grade1", 900.0)
    assert (board.attempts["r"].started, board.attempts["r"].waits) == (900.0, True)
    board.started("r.1.grade1", 950.0)
    assert (board.attempts["r"].started, board.attempts["r"].waits) == (950.0, False)


def test_a_controller_takes_over_from_one_that_is_gone() -> None:
    theirs = rollout(controller="other")
    observed = Observed({}, ("r.1",), frozenset({"other"}))
    assert plan(Observed({}, ("r.1",)), {"r": theirs}, LIMITS, 60.0) == []
    assert plan(observed, {"r": theirs}, LIMITS, 60.0) == [TakeOver("r")]
    assert plan(observed, {"r": rollout()}, LIMITS, 60.0) == [Adopt("r")]


def test_an_attempt_that_another_controller_took_over_is_ended_here() -> None:
    running = attempt(Phase.RUNNING, started=50.0)
    assert planned([running], [rollout(controller="other")]) == [Kill("r.1", "cancelled", "r")]


def test_harness_that_grades_itself_is_finished_after_its_report() -> None:
    limits = replace(LIMITS, grader_tries=0)
    found = attempt(Phase.EXITED, exit=OK)
    assert planned([found], [rollout()], limits=limits) == [Report("r")]
    assert planned([found], [rollout(state="grading")], limits=limits) == [Finish("r")]


def test_deadline_is_read_again_before_the_kill() -> None:
    running = attempt(Phase.RUNNING, started=10.0)
    assert planned([running], [rollout()], now=109.9) == []
    assert planned([running], [rollout()], now=110.0) == [Refresh("r")]
    assert planned([replace(running, refreshed=110.0)], [rollout()], now=110.1) == [Kill("r.1", "timeout", "r")]
    held = rollout(held_s=30.0)
    assert planned([replace(running, refreshed=110.0)], [held], now=110.1) == []
    assert planned([replace(running, refreshed=110.0)], [held], now=140.0) == [Refresh("r")]
    assert planned([replace(running, refreshed=140.0, killing=True)], [held], now=150.0) == []


def test_grader_crash_is_graded_again_then_infrastructure() -> None:
    grading = rollout(state="grading")
    crashed = attempt(Phase.GRADED, exit=OK, tries=1, grader_exit=BAD)
    assert planned([crashed], [grading]) == [Refresh("r")]
    crashed = replace(crashed, refreshed=50.0)
    assert planned([crashed], [grading]) == [Grade("r", 2)]
    assert planned([replace(crashed, tries=2)], [grading]) == [
        Infrastructure("r", "the grader failed 2 times, last: exit 1")
    ]
    assert planned([replace(crashed, tries=2)], [rollout(state="grading", reward=0.0)]) == [Finish("r")]
    assert planned([replace(crashed, grader_exit=OK)], [grading]) == [Finish("r")]


def test_grader_is_killed_at_its_own_deadline() -> None:
    grading = attempt(Phase.GRADING, exit=OK, tries=2, started=50.0)
    assert planned([grading], [rollout(state="grading")], now=59.0) == []
    assert planned([grading], [rollout(state="grading")], now=60.0) == [Kill("r.1.grade2", "timeout", "r")]


@pytest.mark.parametrize("gateway", [None, rollout(state="cancelled"), rollout(state="queued"), rollout(attempt=2)])
def test_what_the_gateway_gave_up_is_killed_then_forgotten(gateway: Rollout | None) -> None:
    given = [gateway] if gateway else []
    running = attempt(Phase.RUNNING, started=0.0)
    assert planned([running], given) == [Kill("r.1", "cancelled", "r")]
    assert planned([replace(running, killing=True)], given) == []
    assert planned([attempt(Phase.EXITED, exit=OK)], given) == [Forget("r")]


def test_jobs_of_unknown_attempts_are_killed() -> None:
    running = attempt(Phase.RUNNING, started=50.0)
    jobs = ("r.1", "r.2", "old.1.grade1", "a.1")
    assert planned([running], [rollout(), rollout("a")], jobs=jobs) == [
        Adopt("a"),
        Kill("r.2", "cancelled"),
        Kill("old.1.grade1", "cancelled"),
    ]


def test_busy_attempts_hold_their_slot_and_get_no_second_action() -> None:
    for phase in Phase:
        found = attempt(phase, exit=OK, grader_exit=OK, busy=True)
        assert planned([found], [rollout()], now=1e6) == []
    starting = attempt(Phase.STARTING, number=0, busy=True)
    queue = [rollout(state="queued", attempt=0), rollout("b", "queued", 0), rollout("c", "queued", 0)]
    assert planned([starting], queue) == [Start("b")]


def test_next_deadline_is_the_nearest_one_ahead() -> None:
    attempts = {
        "a": attempt(Phase.RUNNING, "a", started=0.0),
        "b": attempt(Phase.GRADING, "b", started=80.0),
        "c": attempt(Phase.RUNNING, "c", started=0.0, killing=True),
    }
    rollouts = {"a": rollout("a", held_s=5.0), "b": rollout("b", "grading")}
    assert next_deadline(Observed(attempts), rollouts, LIMITS, 60.0) == 90.0
    assert next_deadline(Observed(attempts), rollouts, LIMITS, 91.0) == 105.0
    assert next_deadline(Observed(attempts), rollouts, LIMITS, 106.0) is None


class Machine:
    """A world without processes: performs actions, lets jobs end in every way, cancels rollouts."""

    def __init__(self, seed: int, count: int, limits: Limits) -> None:
        self.rng = random.Random(seed)
        self.limits = limits
        self.rollouts = {f"r{i}": rollout(f"r{i}", "queued", 0, created=float(i)) for i in range(count)}
        self.attempts: dict[str, AttemptStatus] = {}
        self.now = 0.0
        self.most = 0
        self.finished: list[str] = []

    def step(self) -> None:
        self.now += self.rng.choice((0.1, 1.0, 30.0))
        for action in plan(Observed(self.attempts), self.rollouts, self.limits, self.now):
            getattr(self, f"do_{type(action).__name__.lower()}")(action)
        self.most = max(self.most, sum(a.phase in (Phase.RUNNING, Phase.GRADING) for a in self.attempts.values()))
        for found in list(self.attempts.values()):
            if self.rng.random() < 0.5:
                self.job_ends(found)
        if self.rng.random() < 0.1:
            live = [r for r in self.rollouts.values() if not r.state.terminal]
            if live:
                self.move(self.rng.choice(live), state=RolloutState.CANCELLED)
        if self.rng.random() < 0.03:
            self.attempts.clear()  # a new controller that remembers nothing

    def move(self, current: Rollout, **fields: Any) -> None:
        moved = replace(current, **fields)
        if moved.state.terminal and not current.state.terminal:
            self.finished.append(moved.rollout_id)
        self.rollouts[moved.rollout_id] = moved

    def job_ends(self, found: AttemptStatus) -> None:
        ends = [OK, BAD, replace(OK, killed="orphaned"), replace(OK, error="no")]
        ended = replace(self.rng.choice(ends), ended=self.now)
        if found.killing:
            ended = replace(ended, killed="timeout")
        if found.phase is Phase.RUNNING:
            self.attempts[found.rollout_id] = replace(found, phase=Phase.EXITED, exit=ended, killing=False)
        elif found.phase is Phase.GRADING:
            if self.rng.random() < 0.5:
                self.move(self.rollouts[found.rollout_id], reward=1.0)
            self.attempts[found.rollout_id] = replace(found, phase=Phase.GRADED, grader_exit=ended, killing=False)

    def do_start(self, action: Start) -> None:
        current = self.rollouts[action.rollout_id]
        assert current.state is RolloutState.QUEUED and action.rollout_id not in self.attempts
        self.move(current, state=RolloutState.RUNNING, attempt=current.attempt + 1, reward=None)
        self.attempts[action.rollout_id] = attempt(
            Phase.RUNNING, action.rollout_id, current.attempt + 1, started=self.now
        )

    def do_adopt(self, action: Adopt) -> None:
        current = self.rollouts[action.rollout_id]
        self.attempts[action.rollout_id] = attempt(Phase.LOST, action.rollout_id, current.attempt)

    def do_report(self, action: Report) -> None:
        self.move(self.rollouts[action.rollout_id], state=RolloutState.GRADING)

    def do_grade(self, action: Grade) -> None:
        found = self.attempts[action.rollout_id]
        assert action.number <= self.limits.grader_tries
        self.attempts[action.rollout_id] = replace(found, phase=Phase.GRADING, tries=action.number, started=self.now)

    def do_finish(self, action: Finish) -> None:
        current = self.rollouts[action.rollout_id]
        if current.reward is None:
            self.do_infrastructure(Infrastructure(action.rollout_id, "no reward"))
        else:
            self.move(current, state=RolloutState.SUCCEEDED)

    def do_infrastructure(self, action: Infrastructure) -> None:
        current = self.rollouts[action.rollout_id]
        state = RolloutState.QUEUED if current.attempt < 3 else RolloutState.FAILED
        self.move(current, state=state)

    def do_refresh(self, action: Refresh) -> None:
        found = self.attempts[action.rollout_id]
        self.attempts[action.rollout_id] = replace(found, refreshed=self.now)

    def do_kill(self, action: Kill) -> None:
        assert action.rollout_id is not None
        found = self.attempts[action.rollout_id]
        assert not found.killing
        self.attempts[action.rollout_id] = replace(found, killing=True)

    def do_forget(self, action: Forget) -> None:
        del self.attempts[action.rollout_id]


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_every_rollout_ends_once_and_all_slots_are_free(seed: int) -> None:
    """R04 over 200 rollouts: success, failure, time-out, spawn error, cancellation, controllers without memory."""
    machine = Machine(seed, 200, replace(LIMITS, concurrency=5))
    for _ in itertools.takewhile(lambda _: machine.attempts or len(set(machine.finished)) < 200, range(5000)):
        machine.step()
    assert sorted(machine.finished) == sorted(machine.rollouts)
    assert machine.attempts == {}
    assert machine.most <= 5
    assert planned([], list(machine.rollouts.values())) == []
