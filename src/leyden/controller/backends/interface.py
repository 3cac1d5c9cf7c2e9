"""What the controller asks of a place where attempts run. Two implementations: `local` and `kubernetes`."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

from leyden.controller.jobs import Exit
from leyden.controller.plan import AttemptStatus
from leyden.records import Claim, Rollout


@dataclass(frozen=True, slots=True)
class Events:
    """What a backend tells: `started(job id, Unix seconds)` when a job's program runs, `waiting(job id, why)` while it
    does not yet, `ended(job id, exit)` once for every job that ended."""

    started: Callable[[str, float], None]
    waiting: Callable[[str, str], None]
    ended: Callable[[str, Exit], None]


class Backend(Protocol):
    """Jobs are named by `jobs.harness_job` and `jobs.grader_job`. A job id runs once, whoever asks and how often.

    All methods run in the controller's event loop. Starting raises LaunchError if the attempt cannot be started.
    """

    @property
    def running(self) -> Collection[str]:
        """Ids of the jobs that exist here and have not ended."""

    async def open(self) -> None:
        """Find what an earlier controller left running. Raises LaunchError."""

    async def supervise(self) -> None:
        """Report events until `stop` or `close`."""

    async def start_harness(self, claim: Claim) -> None: ...

    async def start_grader(self, rollout: Rollout, key: str, number: int) -> None:
        """Start the grader for the `number`-th time on what the harness left."""

    def kill(self, job_id: str, reason: str) -> None:
        """End a job; its exit will say `killed: reason`."""

    def find(self, rollout: Rollout) -> AttemptStatus:
        """How an attempt that another controller started stands here."""

    async def forget(self, attempt: AttemptStatus, *, keep: bool) -> None:
        """Clean up after an attempt that is over; `keep` leaves what the harness wrote."""

    def where(self, attempt: AttemptStatus) -> str:
        """Where to look for what an attempt printed."""

    async def stop(self) -> None:
        """End all jobs."""

    async def close(self) -> None:
        """Let go of everything; jobs go on."""
