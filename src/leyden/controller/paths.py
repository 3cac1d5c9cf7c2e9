"""Where the files of an attempt are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from leyden.controller.launch import Place
from leyden.errors import LaunchError


@dataclass(frozen=True, slots=True)
class AttemptPaths:
    """The files of one attempt, `run_dir/attempts/ROLLOUT/ATTEMPT`."""

    root: Path

    @property
    def settled(self) -> Path:
        """There once the attempt is cleaned up after; beside the attempts, where a harness does not write."""
        return self.root.parents[2] / "settled" / f"{self.root.parent.name}.{self.root.name}"

    @property
    def place(self) -> Place:
        return Place(self.workspace, self.task, self.harness_log, self.exit)

    @property
    def task(self) -> Path:
        return self.root / "task.json"

    @property
    def workspace(self) -> Path:
        return self.root / "workspace"

    @property
    def harness_log(self) -> Path:
        return self.root / "harness.log"

    @property
    def exit(self) -> Path:
        return self.root / "exit.json"

    @property
    def tmp(self) -> Path:
        """A sandboxed harness's /tmp; its grader's is `grade_tmp`."""
        return self.root / "tmp"

    @property
    def grade_tmp(self) -> Path:
        return self.grade / "tmp"

    @property
    def grade(self) -> Path:
        return self.root / "grade"

    @property
    def grade_log(self) -> Path:
        return self.grade / "grade.log"


def attempt_paths(run_dir: Path, rollout_id: str, attempt: int) -> AttemptPaths:
    """Raises LaunchError for an id that is not a plain file name."""
    if not is_plain_name(rollout_id):
        what = f"rollout id {rollout_id!r} has characters other than letters, digits, - and _"
        raise LaunchError(what, final=True)
    return AttemptPaths(run_dir / "attempts" / rollout_id / str(attempt))


def is_plain_name(rollout_id: str) -> bool:
    return bool(rollout_id) and all(c.isalnum() or c in "-_" for c in rollout_id)
