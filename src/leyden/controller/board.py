"""The controller's memory: what the gateway said, what runs here. Changed in one event loop only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from leyden.client.records import Rollout
from leyden.controller.jobs import Exit, grader_job, harness_job, read_exit
from leyden.controller.launch import attempt_paths
from leyden.controller.plan import Attempt, Observed, Phase
from leyden.controller.workspace import grade_tries
from leyden.types import RolloutState


class Board:
    """Rollouts by id as the gateway last described them, attempts by rollout id as they stand here."""

    def __init__(self) -> None:
        self.rollouts: dict[str, Rollout] = {}
        self.attempts: dict[str, Attempt] = {}
        self.grader_keys: dict[str, str] = {}

    def absorb(self, rollouts: Iterable[Rollout]) -> None:
        """Take over newer descriptions; a finished rollout that nothing runs for is dropped."""
        for rollout in rollouts:
            known = self.rollouts.get(rollout.rollout_id)
            if known is None or rollout.change >= known.change:
                self.rollouts[rollout.rollout_id] = rollout
                if rollout.state.terminal and rollout.rollout_id not in self.attempts:
                    del self.rollouts[rollout.rollout_id]

    def observed(self, jobs: Iterable[str]) -> Observed:
        return Observed(self.attempts, tuple(jobs))

    def change(self, rollout_id: str, **fields: object) -> None:
        """Replace fields of an attempt, if it is still there."""
        if rollout_id in self.attempts:
            self.attempts[rollout_id] = replace(self.attempts[rollout_id], **fields)  # type: ignore[arg-type]

    def ended(self, job_id: str, exit_: Exit) -> None:
        """A job is over; a late report of an older job changes nothing."""
        for attempt in self.attempts.values():
            if attempt.job_id != job_id:
                continue
            if attempt.phase in (Phase.STARTING, Phase.RUNNING):
                self.change(attempt.rollout_id, phase=Phase.EXITED, exit=exit_, killing=False)
            elif attempt.phase is Phase.GRADING:
                self.change(attempt.rollout_id, phase=Phase.GRADED, grader_exit=exit_, killing=False)
            return

    def forget(self, rollout_id: str) -> None:
        self.attempts.pop(rollout_id, None)
        self.grader_keys.pop(rollout_id, None)
        rollout = self.rollouts.get(rollout_id)
        if rollout is not None and rollout.state.terminal:
            del self.rollouts[rollout_id]


def find_attempt(rollout: Rollout, run_dir: Path, running: dict[str, float]) -> Attempt:
    """How an attempt of an earlier controller stands: from the jobs that run and the files it left.

    Without a job that runs or an exit.json it is lost, for instance because the controller was killed between
    its claim and the start.
    """
    rollout_id, number = rollout.rollout_id, rollout.attempt
    paths = attempt_paths(run_dir, rollout_id, number)
    job = harness_job(rollout_id, number)
    if job in running:
        return Attempt(rollout_id, number, Phase.RUNNING, started=running[job])
    exit_ = read_exit(paths.root)
    if exit_ is None:
        return Attempt(rollout_id, number, Phase.LOST)
    attempt = Attempt(rollout_id, number, Phase.EXITED, started=exit_.started, exit=exit_)
    if rollout.state is not RolloutState.GRADING:
        return attempt
    tries = grade_tries(paths) + 1
    grader = grader_job(rollout_id, number, tries)
    if grader in running:
        return replace(attempt, phase=Phase.GRADING, tries=tries, started=running[grader])
    graded = read_exit(paths.grade)
    if graded is not None:
        return replace(attempt, phase=Phase.GRADED, tries=tries, grader_exit=graded)
    return attempt
