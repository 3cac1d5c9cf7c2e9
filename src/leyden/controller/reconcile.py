"""The controller's loop: observe, plan, act.

Concurrency. Everything runs in one event loop. Three coroutines live as long as the controller: `_feed`
follows the gateway's rollouts by long-poll, the backend's `supervise` reads the launcher's messages, `_loop`
plans; where attempts run on this machine, `pressure` looks at its load. Each of the first two changes the board and
sets `_wake`; so does every action when it ends. `_loop` waits for `_wake` or for the next deadline, whichever comes
first, asks `plan`, and starts one task per action. An attempt with a running task is marked busy before the task
starts, so that at most one action per attempt is under way; kills and adoptions are done at once. Nothing waits for a
poll interval: the resync every RESYNC_S is a safety net only.

A controller that is killed leaves the launcher and its jobs running; the next one, with the same id and run
folder, connects to the launcher, reads the feed and adopts them. On a clean stop the attempts are killed and
given back, so that their rollouts are queued again with no attempt used up, and the launcher ends.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from dataclasses import replace
from typing import Any

from leyden.client.control import ControlClient
from leyden.config import RunConfig
from leyden.controller.act import Actor
from leyden.controller.backends.interface import Backend, Events
from leyden.controller.backends.local import LocalBackend
from leyden.controller.board import Board
from leyden.controller.clock import Clock
from leyden.controller.jobs import Exit
from leyden.controller.plan import (
    Action,
    Adopt,
    AttemptStatus,
    Kill,
    Limits,
    Phase,
    Start,
    TakeOver,
    is_current,
    next_deadline,
    plan,
)
from leyden.controller.pressure import Pressure
from leyden.errors import GatewayError
from leyden.room import shortage
from leyden.types import RolloutState

log = logging.getLogger(__name__)
RESYNC_S = 30.0
GATHER_S = 0.01  # what changes in this time comes in one answer of the feed; most of it this controller did itself
STOP_ACTIONS_S = 5.0
STOP_REPORT_S = 10.0
PAGE = 1000
WANTED = (RolloutState.QUEUED, RolloutState.RUNNING, RolloutState.GRADING)


async def run_controller(config: RunConfig, url: str, key: str, controller_id: str, *, stop: asyncio.Event) -> None:
    """Run harnesses for the gateway at `url` until `stop` is set.

    `key` is a control key. `controller_id` must be the same after a restart, or attempts are not adopted.
    Raises LaunchError if the launcher cannot be started (a preloaded module that fails, for instance).
    """
    board, clock = Board(), Clock()
    wake = asyncio.Event()
    async with ControlClient(url, key) as client:
        backend = await _backend(config, url.rstrip("/"), client, controller_id, _events(board, wake, clock))
        keep, passes = config.workspace.keep, config.eval.pass_threshold
        actor = Actor(controller_id, client, backend, board, config.run_dir, keep, passes, clock)
        await backend.open()
        pressure = Pressure(config.controller.concurrency) if config.controller.backend == "local" else None
        await Controller(actor, limits(config, controller_id), wake, pressure).run(stop)


async def _backend(config: RunConfig, url: str, client: ControlClient, controller_id: str, events: Events) -> Backend:
    if config.controller.backend == "local":
        parent = {name: value for name, value in os.environ.items() if name != config.engine.api_key_env}
        return LocalBackend(config, url, parent, events)
    from leyden.controller.backends.kubernetes.backend import KubernetesBackend

    return KubernetesBackend(config, url, await client.run_name(), controller_id, events)


def _events(board: Board, wake: asyncio.Event, clock: Clock) -> Events:
    """What the backend tells changes the board and wakes the loop."""

    def started(job_id: str, at: float) -> None:
        board.started(job_id, clock.own(at))
        wake.set()

    def waiting(job_id: str, why: str) -> None:
        board.waiting(job_id, why)

    def ended(job_id: str, exit_: Exit) -> None:
        board.ended(job_id, exit_)
        wake.set()

    return Events(started, waiting, ended)


def limits(config: RunConfig, controller_id: str) -> Limits:
    return Limits(
        controller_id=controller_id,
        concurrency=config.controller.concurrency,
        min_free_bytes=config.controller.min_free_bytes,
        start_timeout_s=config.controller.start_timeout_s,
        timeout_s=config.harness.timeout_s,
        grader_timeout_s=config.grader.timeout_s,
        grader_tries=0 if config.grader.harness else config.grader.max_tries,
    )


class Controller:
    """The loop of the module's docstring."""

    def __init__(self, actor: Actor, limits_: Limits, wake: asyncio.Event, pressure: Pressure | None = None) -> None:
        self._actor = actor
        self._board = actor.board
        self._limits = limits_
        self._wake = wake
        self._pressure = pressure
        self._informed = asyncio.Event()
        self._short: str | None = None
        self._settled = False
        self._actions: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None

    async def run(self, stop: asyncio.Event) -> None:
        """Until `stop`, or until one of the coroutines fails: then its exception is raised."""
        stopped = asyncio.create_task(stop.wait())
        workers: list[asyncio.Task[Any]] = [
            asyncio.create_task(c) for c in (self._feed(), self._actor.backend.supervise(), self._loop())
        ]
        if self._pressure:
            workers.append(asyncio.create_task(self._pressure.watch(lambda: len(self._board.attempts), self._wake.set)))
        try:
            done, _ = await asyncio.wait([stopped, *workers], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            await self._cancel([workers[0], workers[2]])
            if self._actions:
                await asyncio.wait(self._actions, timeout=STOP_ACTIONS_S)
            await self._cancel(list(self._actions))
            await self._shut_down()
        finally:
            await self._cancel([stopped, *workers, *self._actions])
            await self._actor.backend.close()

    async def _feed(self) -> None:
        cursor = await self._snapshot()
        self._informed.set()
        synced = time.monotonic()
        while True:
            try:
                rollouts, cursor = await self._actor.client.rollouts(
                    after=cursor,
                    states=RolloutState,
                    wait_s=RESYNC_S,
                    limit=PAGE,
                    tasks=False,
                    controller=self._limits.controller_id,
                )
                self._board.absorb(rollouts)
                self._wake.set()
                await asyncio.sleep(GATHER_S)
                if time.monotonic() > synced + RESYNC_S:
                    await self._snapshot()
                    synced = time.monotonic()
            except GatewayError as error:
                log.warning("the feed of rollouts: %s; trying again", error)
                await asyncio.sleep(1.0)
            self._wake.set()

    async def _snapshot(self) -> int:
        """All live rollouts, page by page, and the cursor after them. What is live here but not there is read again."""
        cursor, live = 0, set()
        while True:
            rollouts, cursor = await self._actor.client.rollouts(after=cursor, states=WANTED, limit=PAGE, tasks=False)
            self._board.absorb(rollouts)
            live |= {r.rollout_id for r in rollouts}
            if len(rollouts) < PAGE:
                break
        for rollout_id in [i for i, r in self._board.rollouts.items() if not r.state.terminal and i not in live]:
            self._board.absorb([await self._actor.client.rollout(rollout_id)])
        leases = await self._actor.client.controllers()
        self._board.gone = frozenset(name for name, alive in leases.items() if not alive)
        self._wake.set()
        if not self._settled:
            self._settled = await self._actor.settle_earlier()
        return cursor

    async def _loop(self) -> None:
        await self._informed.wait()  # before, everything that runs here would look like a stray
        while True:
            self._wake.clear()
            if self._failure is not None:
                raise self._failure
            now = self._actor.clock.now()
            observed = self._board.observed(self._actor.backend.running)
            limits_ = self._limits
            if self._pressure:
                limits_ = replace(limits_, concurrency=min(limits_.concurrency, self._pressure.allowed))
            if self._no_room():
                limits_ = replace(limits_, concurrency=0)
            for action in plan(observed, self._board.rollouts, limits_, now):
                self._dispatch(action)
            deadline = next_deadline(self._board.observed(()), self._board.rollouts, self._limits, now)
            wait_s = (
                RESYNC_S if deadline is None else min(RESYNC_S, max(0.0, deadline - self._actor.clock.now()) + 0.001)
            )
            try:
                async with asyncio.timeout(wait_s):
                    await self._wake.wait()
            except TimeoutError:
                continue

    def _no_room(self) -> bool:
        """Whether the disk is too full for another attempt; logged when that changes."""
        short = shortage(self._actor.run_dir, self._limits.min_free_bytes)
        if short and not self._short:
            log.warning("%s", short)
        elif self._short and not short:
            log.info("there is room again: rollouts are started")
        self._short = short
        return short is not None

    def _dispatch(self, action: Action) -> None:
        match action:
            case Adopt():
                self._actor.adopt(action)
                self._wake.set()
            case Kill():
                self._actor.kill(action)
            case Start(rollout_id) | TakeOver(rollout_id):
                self._board.attempts[rollout_id] = AttemptStatus(
                    rollout_id, 0, Phase.STARTING, self._actor.clock.now(), busy=True
                )
                self._spawn(action)
            case _:
                self._board.change(action.rollout_id, busy=True)
                self._spawn(action)

    def _spawn(self, action: Action) -> None:
        task = asyncio.create_task(self._actor.perform(action))
        self._actions.add(task)
        task.add_done_callback(self._on_done)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._actions.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._failure = task.exception()
        self._wake.set()

    async def _shut_down(self) -> None:
        """Kill everything, end the launcher, give the rollouts back."""
        await self._actor.backend.stop()
        try:
            async with asyncio.timeout(STOP_REPORT_S):
                await asyncio.gather(*(self._give_back(a) for a in list(self._board.attempts.values())))
        except TimeoutError:
            log.warning("the gateway did not take back all attempts; the next controller will report them")

    async def _give_back(self, attempt: AttemptStatus) -> None:
        rollout = self._board.rollouts.get(attempt.rollout_id)
        try:
            if is_current(attempt, rollout, self._limits.controller_id):
                await self._actor.client.give_back(attempt.rollout_id, attempt.attempt, "the controller was stopped")
            await self._actor.forget(attempt)
        except GatewayError as error:
            log.warning("rollout %s could not be given back: %s", attempt.rollout_id, error)

    @staticmethod
    async def _cancel(tasks: list[asyncio.Task[Any]]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
