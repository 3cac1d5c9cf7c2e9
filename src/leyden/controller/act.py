"""Carries out the planned actions: one coroutine per kind. Each may be cut off at any point.

A step that was done but not noted is found again: the gateway answers 409 and is read again, a job's id runs
once, and a claim whose harness never started is settled as an infrastructure failure by the next controller.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field, replace
from pathlib import Path

from leyden.client.control import ControlClient
from leyden.controller import workspace
from leyden.controller.backends.interface import Backend
from leyden.controller.board import Board
from leyden.controller.clock import Clock
from leyden.controller.jobs import OVER_LIMIT, grader_job, harness_job
from leyden.controller.last_words import last_words
from leyden.controller.launch import BASE_URL_VARIABLES
from leyden.controller.paths import attempt_paths
from leyden.controller.plan import (
    LIVE,
    Action,
    Adopt,
    AttemptStatus,
    Finish,
    Forget,
    Grade,
    Infrastructure,
    Kill,
    Phase,
    Refresh,
    Report,
    Start,
    TakeOver,
)
from leyden.errors import GatewayError, LaunchError, NoRoom
from leyden.records import LAST_WORDS, Rollout
from leyden.types import FailureClass, RolloutState

log = logging.getLogger(__name__)
RETRY_S = 1.0
NO_ROOM_PAUSE_S = 5.0
MOST_REASON_CHARS = 2000


@dataclass(frozen=True, slots=True)
class Actor:
    """What the actions work with. `keep` is `workspace.keep` of the run file, `pass_threshold` that of `eval`,
    `run_dir` holds the attempts' folders."""

    controller_id: str
    client: ControlClient
    backend: Backend
    board: Board
    run_dir: Path
    keep: str
    pass_threshold: float
    clock: Clock = field(default_factory=Clock)

    async def perform(self, action: Action) -> None:
        """One action with its failures: a conflict is read again, a failed launch voids the attempt, and one for which
        the machine has no room is given back.

        So does everything else that goes wrong, for an attempt is a stranger's: what it leaves in its folder or makes
        of its machine must end this attempt alone. The slot is free again once the gateway knows.
        """
        rollout_id = action.rollout_id or ""
        try:
            await self._dispatch(action)
        except NoRoom as error:
            await self._give_back(rollout_id, error)
        except LaunchError as error:
            self.board.change(rollout_id, phase=Phase.LOST, problem=str(error), final=error.final)
        except GatewayError as error:
            await self._reread(rollout_id, error)
        except Exception as error:
            await self._void(action, error)
        attempt = self.board.attempts.get(rollout_id)
        if attempt is not None and attempt.attempt == 0:
            self.board.forget(rollout_id)
        self.board.change(rollout_id, busy=False)

    async def _give_back(self, rollout_id: str, error: NoRoom) -> None:
        """The attempt uses up none of `max_attempts`. It is tried again, here or elsewhere, after a pause."""
        number = self.board.attempts[rollout_id].attempt
        log.warning("rollout %s attempt %d: %s; it is given back", rollout_id, number, error)
        try:
            self.board.absorb([await self.client.give_back(rollout_id, number, str(error)[:MOST_REASON_CHARS])])
        except GatewayError as refused:
            await self._reread(rollout_id, refused)
        self.board.change(rollout_id, phase=Phase.LOST, problem=str(error))
        await asyncio.sleep(NO_ROOM_PAUSE_S)

    async def _void(self, action: Action, error: Exception) -> None:
        """After an error that nobody expected. Where the attempt is void already, the plan tries again."""
        problem = f"{type(action).__name__.lower()} failed: {type(error).__name__}: {error}"[:MOST_REASON_CHARS]
        log.warning("rollout %s: %s", action.rollout_id, problem, exc_info=not isinstance(error, OSError))
        if not isinstance(action, Infrastructure):
            self.board.change(action.rollout_id or "", phase=Phase.LOST, problem=problem)
        await asyncio.sleep(RETRY_S)

    def adopt(self, action: Adopt) -> None:
        rollout = self.board.rollouts[action.rollout_id]
        try:
            found = self.backend.find(rollout)
            attempt = replace(found, started=self.clock.own(found.started))
        except Exception as error:
            attempt = AttemptStatus(
                rollout.rollout_id, rollout.attempt, Phase.LOST, problem=f"cannot be adopted: {error}"
            )
        self.board.attempts[action.rollout_id] = attempt
        log.info("rollout %s attempt %d: adopted, %s", rollout.rollout_id, rollout.attempt, attempt.phase)

    def kill(self, action: Kill) -> None:
        self.backend.kill(action.job_id, action.reason)
        if action.rollout_id:
            self.board.change(action.rollout_id, killing=True)

    async def _dispatch(self, action: Action) -> None:
        match action:
            case Start(rollout_id):
                await self._start(rollout_id)
            case TakeOver(rollout_id):
                number = self.board.rollouts[rollout_id].attempt
                self.board.absorb([await self.client.take_over(rollout_id, number, self.controller_id)])
            case Report(rollout_id):
                await self._report(self.board.attempts[rollout_id])
            case Grade(rollout_id, number):
                await self._grade(self.board.attempts[rollout_id], number)
            case Finish(rollout_id):
                await self._finish(self.board.attempts[rollout_id])
            case Infrastructure(rollout_id, reason, final):
                await self.infrastructure(self.board.attempts[rollout_id], reason, final=final)
            case Refresh(rollout_id):
                now = self.clock.now()
                self.board.absorb([await self.client.rollout(rollout_id)])
                self.board.change(rollout_id, refreshed=now)
            case Forget(rollout_id):
                await self.forget(self.board.attempts[rollout_id])
            case _:
                raise AssertionError(action)

    async def _start(self, rollout_id: str) -> None:
        claim = await self.client.claim(rollout_id, self.controller_id)
        rollout = claim.rollout
        self.board.absorb([rollout])
        self.board.change(rollout_id, attempt=rollout.attempt)
        await self.backend.start_harness(claim)
        self.board.placed(harness_job(rollout_id, rollout.attempt), self.clock.now())

    async def _report(self, attempt: AttemptStatus) -> None:
        assert attempt.exit is not None
        over_limit = attempt.exit.killed == OVER_LIMIT  # also if it ended by itself just before, with exit 0
        code = attempt.exit.exit_code if not over_limit else attempt.exit.exit_code or None
        receipt = await self.client.exit(
            attempt.rollout_id,
            attempt.attempt,
            exit_code=-attempt.exit.signal if attempt.exit.signal else code,
            timed_out=attempt.exit.timed_out,
            reason=None if attempt.exit.clean else attempt.exit.describe() + await self._last_words(attempt),
        )
        self.board.absorb([receipt.rollout])
        if receipt.grader_key is None:
            self._log_end(receipt.rollout, attempt)
            return
        self.board.grader_keys[attempt.rollout_id] = receipt.grader_key
        if attempt.exit.clean and attempt.exit.note:
            log.warning("rollout %s attempt %d: %s", attempt.rollout_id, attempt.attempt, attempt.exit.describe())
        if attempt.exit.clean and receipt.rollout.turns == 0:
            log.warning(
                "rollout %s attempt %d: the harness ended with exit 0 and made no model call; does it read one of "
                "%s? %s",
                attempt.rollout_id,
                attempt.attempt,
                ", ".join(BASE_URL_VARIABLES),
                self.backend.where(attempt),
            )

    async def _grade(self, attempt: AttemptStatus, number: int) -> None:
        if attempt.rollout_id not in self.board.grader_keys:
            await self._report(attempt)  # a restarted controller: the same answer again
        key = self.board.grader_keys.get(attempt.rollout_id)
        if key is None:
            return
        self.board.change(attempt.rollout_id, phase=Phase.GRADING, tries=number, started=self.clock.now(), waits=True)
        await self.backend.start_grader(self.board.rollouts[attempt.rollout_id], key, number)
        self.board.placed(grader_job(attempt.rollout_id, attempt.attempt, number), self.clock.now())

    async def _finish(self, attempt: AttemptStatus) -> None:
        rollout = await self.client.finish(attempt.rollout_id, attempt.attempt)
        self.board.absorb([rollout])
        self._log_end(rollout, attempt)

    async def infrastructure(self, attempt: AttemptStatus, reason: str, *, final: bool = False) -> None:
        """Report that the attempt is void."""
        reason = f"{reason}; {self.backend.where(attempt)}{await self._last_words(attempt)}"
        rollout = await self.client.infrastructure(attempt.rollout_id, attempt.attempt, reason[:4000], final=final)
        self.board.absorb([rollout])
        self._log_end(rollout, attempt)

    async def _last_words(self, attempt: AttemptStatus) -> str:
        """The last line of the job that ended last, as the end of a reason; nothing if it printed none."""
        paths = attempt_paths(self.run_dir, attempt.rollout_id, attempt.attempt)
        said = await asyncio.to_thread(last_words, paths.grade_log if attempt.tries else paths.harness_log)
        return f"{LAST_WORDS}{said}" if said else ""

    async def forget(self, attempt: AttemptStatus) -> None:
        """Drop an attempt that is over, and what it wrote if the run file says so."""
        try:
            await self._clean_up(attempt, self.board.rollouts.get(attempt.rollout_id))
        finally:
            self.board.forget(attempt.rollout_id)

    async def settle_earlier(self) -> bool:
        """Clean up after attempts that ended while an earlier controller was killed. False if one must wait."""
        settled = True
        for rollout_id, number in await asyncio.to_thread(workspace.unsettled, self.run_dir):
            known = self.board.attempts.get(rollout_id)
            if known is not None and known.attempt in (0, number):
                continue
            try:
                rollout = await self.client.rollout(rollout_id)
            except GatewayError as error:
                settled = settled and error.status == 404
                continue
            attempt = AttemptStatus(rollout_id, number, Phase.LOST)
            running = any(job.startswith(f"{attempt.job_id}.") or job == attempt.job_id for job in self.backend.running)
            if running:
                settled = False
            elif rollout.attempt != number or rollout.state not in LIVE:
                await self._clean_up(attempt, rollout)
        return settled

    async def _clean_up(self, attempt: AttemptStatus, rollout: Rollout | None) -> None:
        """What cannot be deleted stays, and is said; the next controller tries once more."""
        try:
            await self.backend.forget(attempt, keep=keeps(self.keep, rollout, attempt, self.pass_threshold))
            workspace.settle(attempt_paths(self.run_dir, attempt.rollout_id, attempt.attempt))
        except OSError as error:
            log.warning(
                "rollout %s attempt %d: what it left cannot be deleted: %s", attempt.rollout_id, attempt.attempt, error
            )

    async def _reread(self, rollout_id: str, error: GatewayError) -> None:
        """After a refusal the gateway's record counts; without a reply, wait before the plan tries again."""
        if error.status in (404, 409):
            try:
                self.board.absorb([await self.client.rollout(rollout_id)])
                return
            except GatewayError as second:
                if second.status == 404:
                    self.board.rollouts.pop(rollout_id, None)
                    return
                error = second
        log.warning("rollout %s: %s; trying again", rollout_id, error)
        await asyncio.sleep(RETRY_S)

    def _log_end(self, rollout: Rollout, attempt: AttemptStatus) -> None:
        """One line for every end of an attempt; what went wrong comes with the log's path and last words."""
        facts = f"rollout {attempt.rollout_id} attempt {attempt.attempt}: {rollout.state}"
        if rollout.reward is not None:
            facts += f", reward {rollout.reward:g}"
        facts += f", {rollout.turns} turns"
        if attempt.exit is not None:
            facts += f", {attempt.exit.describe()} in {attempt.exit.ended - attempt.exit.started:.1f} s"
            facts += f" ({attempt.exit.cpu_s or 0:.2f} CPU s)"
        if rollout.state is RolloutState.SUCCEEDED:
            log.info("%s", facts)
            return
        level = logging.INFO if rollout.failure is FailureClass.AGENT else logging.WARNING
        reason, where = rollout.reason or "", self.backend.where(attempt)
        log.log(level, "%s: %s", facts, reason if where in reason else f"{reason}; {where}")


def keeps(policy: str, rollout: Rollout | None, attempt: AttemptStatus, pass_threshold: float) -> bool:
    """Whether an attempt's workspace stays. `failed` keeps it unless its rollout succeeded or was cancelled; `unsolved`
    keeps that of a rollout that succeeded, too, if its reward is no pass.
    """
    if policy not in ("failed", "unsolved"):
        return policy == "all"
    if rollout is None or rollout.attempt != attempt.attempt:
        return True
    if rollout.state is RolloutState.SUCCEEDED:
        return policy == "unsolved" and (rollout.reward is None or rollout.reward < pass_threshold)
    return rollout.state is not RolloutState.CANCELLED
