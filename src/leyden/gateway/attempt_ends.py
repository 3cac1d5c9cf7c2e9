"""How an attempt ends: graded, void and run again, or given back. What the gateway holds of it goes with it."""

from __future__ import annotations

from dataclasses import dataclass

from leyden.config import RunConfig
from leyden.gateway.attempts import Attempts
from leyden.gateway.control_bodies import ExitBody
from leyden.gateway.workspaces import Workspaces
from leyden.records import Rollout
from leyden.store import UNSEEN, Store
from leyden.types import RolloutState


@dataclass(frozen=True, slots=True)
class AttemptEnds:
    config: RunConfig
    store: Store
    attempts: Attempts
    workspaces: Workspaces

    def unscored(self, rollout_id: str, attempt: int) -> str | None:
        """Why a running attempt will not be graded, or None."""
        if self.store.rollouts.get(rollout_id).state is not RolloutState.RUNNING:
            return None
        if why := self.attempts.incomplete(rollout_id, attempt):
            return f"incomplete: {why}"
        return UNSEEN if self.store.rollouts.outage(rollout_id, attempt) else None

    def exit(self, rollout_id: str, body: ExitBody) -> Rollout:
        """The harness has ended, and its attempt is graded now."""
        rollout = self.store.rollouts.exit(
            rollout_id, body.attempt, exit_code=body.exit_code, timed_out=body.timed_out, reason=body.reason
        )
        self.attempts.drop(rollout_id, body.attempt)
        return rollout

    def finish(self, rollout_id: str, attempt: int, why: str | None) -> Rollout:
        """The grader has ended. Without a reward the attempt is void; a harness that grades itself and failed has 0."""
        rollout, by_harness = self.store.rollouts.get(rollout_id), self.config.grader.harness
        grading = rollout.attempt == attempt and rollout.state is RolloutState.GRADING
        unscored = grading and rollout.reward is None
        if unscored and by_harness and (rollout.timed_out or rollout.exit_code != 0):
            self.store.rollouts.reward(rollout_id, attempt, 0.0, while_running=False)
        elif unscored:
            return self.void(rollout_id, attempt, f"no reward: {why}" if why else "no reward")
        rollout = self.store.rollouts.finish(rollout_id, attempt, why)
        self._over(rollout, attempt)
        return rollout

    def void(self, rollout_id: str, attempt: int, reason: str, *, final: bool = False) -> Rollout:
        """An attempt that an outage of the gateway or a full disk may have hit uses up none of `max_attempts`."""
        let_down = self.store.rollouts.outage(rollout_id, attempt) or self.attempts.let_down(rollout_id, attempt)
        if let_down and not final:
            rollout = self.store.rollouts.give_back(rollout_id, attempt, reason)
        else:
            harness = self.config.harness
            rollout = self.store.rollouts.infrastructure(
                rollout_id, attempt, reason, 0 if final else harness.max_attempts, harness.retry_backoff_s
            )
        self._over(rollout, attempt)
        return rollout

    def give_back(self, rollout_id: str, attempt: int, reason: str) -> Rollout:
        rollout = self.store.rollouts.give_back(rollout_id, attempt, reason)
        self.attempts.drop(rollout_id, attempt)
        return rollout

    def cancel(self, rollout_id: str, reason: str) -> Rollout:
        rollout = self.store.rollouts.cancel(rollout_id, reason)
        self.attempts.drop(rollout.rollout_id, rollout.attempt)
        return rollout

    def _over(self, rollout: Rollout, attempt: int) -> None:
        """What the attempt handed in goes, as `workspace.keep` says."""
        self.attempts.drop(rollout.rollout_id, attempt)
        keep = self.config.workspace.keep
        if keep == "none" or (keep == "failed" and rollout.state is RolloutState.SUCCEEDED):
            self.workspaces.remove(rollout.rollout_id, attempt)
