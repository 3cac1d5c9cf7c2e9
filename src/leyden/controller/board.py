"""The controller's memory: what the gateway said, what runs here. Changed in one event loop only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from leyden.controller.jobs import Exit
from leyden.controller.plan import AttemptStatus, Observed, Phase
from leyden.records import Rollout


class Board:
    """Rollouts by id as the gateway last described them, attempts by rollout id as they stand here, and the
    controllers that are gone."""

    def __init__(self) -> None:
        self.rollouts: dict[str, Rollout] = {}
        self.attempts: dict[str, AttemptStatus] = {}
        self.grader_keys: dict[str, str] = {}
        self.gone: frozenset[str] = frozenset()

    def absorb(self, rollouts: Iterable[Rollout]) -> None:
        """Take over newer descriptions; a finished rollout that nothing runs for is dropped.

        A task never changes, and the feed leaves it out: what is known of it stays.
        """
        for told in rollouts:
            known = self.rollouts.get(told.rollout_id, told)
            newest = told if told.change >= known.change else known
            task = told.task or known.task
            self.rollouts[told.rollout_id] = replace(newest, task=task) if task and not newest.task else newest
            if newest.state.terminal and told.rollout_id not in self.attempts:
                del self.rollouts[told.rollout_id]

    def observed(self, jobs: Iterable[str]) -> Observed:
        return Observed(self.attempts, tuple(jobs), self.gone)

    def change(self, rollout_id: str, **fields: object) -> None:
        """Replace fields of an attempt, if it is still there."""
        if rollout_id in self.attempts:
            self.attempts[rollout_id] = replace(self.attempts[rollout_id], **fields)  # type: ignore[arg-type]

    def started(self, job_id: str, started: float) -> None:
        """A job's program runs, since `started` (Unix seconds)."""
        for attempt in self.attempts.values():
            if attempt.job_id == job_id and attempt.phase in (Phase.STARTING, Phase.GRADING):
                phase = Phase.RUNNING if attempt.phase is Phase.STARTING else Phase.GRADING
                self.change(attempt.rollout_id, phase=phase, started=started, waits=False)
                return

    def placed(self, job_id: str, now: float) -> None:
        """A job was handed over; if it does not run yet, its wait for a place begins now."""
        for attempt in self.attempts.values():
            if attempt.job_id == job_id and (attempt.phase is Phase.STARTING or attempt.waits):
                self.change(attempt.rollout_id, started=now)
                return

    def waiting(self, job_id: str, why: str) -> None:
        """A job's program does not run yet."""
        for attempt in self.attempts.values():
            if attempt.job_id == job_id:
                self.change(attempt.rollout_id, problem=why)
                return

    def ended(self, job_id: str, exit_: Exit) -> None:
        """A job is over; a late report of an older job changes nothing."""
        for attempt in self.attempts.values():
            if attempt.job_id != job_id:
                continue
            if attempt.phase in (Phase.STARTING, Phase.RUNNING):
                self.change(attempt.rollout_id, phase=Phase.EXITED, exit=exit_, killing=False)
            elif attempt.phase is Phase.GRADING:
                self.change(
                    attempt.rollout_id, phase=Phase.GRADED, grader_exit=exit_, killing=False, waits=False, refreshed=0.0
                )
            return

    def forget(self, rollout_id: str) -> None:
        self.attempts.pop(rollout_id, None)
        self.grader_keys.pop(rollout_id, None)
        rollout = self.rollouts.get(rollout_id)
        if rollout is not None and rollout.state.terminal:
            del self.rollouts[rollout_id]
