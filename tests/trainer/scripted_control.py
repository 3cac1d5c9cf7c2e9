"""The control API on the real store, in process. A script says how each rollout ends; every feed call ends what is
queued."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leyden.client import Group, Recovery, Rollout
from leyden.errors import Conflict, GatewayError
from leyden.protocols import ChatRequest
from leyden.store import Store
from leyden.types import FailureClass, FinishReason, Generation, Json, RolloutState, Turn, VersionSpan

MAX_ATTEMPTS = 3


@dataclass(frozen=True)
class Ending:
    """How a rollout ends: one turn per entry of `responses`, each continuing the one before; then one branch after the
    last for each cause of `forks`. The attempts before the last one are void.
    """

    reward: float | None = 1.0
    responses: tuple[tuple[int, ...], ...] = ((5, 6),)
    state: RolloutState = RolloutState.SUCCEEDED
    failure: FailureClass | None = None
    reason: str | None = None
    attempt: int = 1
    forks: tuple[str, ...] = ()


INFRASTRUCTURE = Ending(None, (), RolloutState.FAILED, FailureClass.INFRASTRUCTURE, "evicted", attempt=MAX_ATTEMPTS)
CANCELLED = Ending(None, (), RolloutState.CANCELLED)
NO_CALLS = Ending(0.0, ())


class ScriptedControl:
    """Of ControlClient what a trainer calls. `die_on` names the call at which the gateway goes away."""

    def __init__(self, script: Callable[[Rollout], Ending]) -> None:
        self.script = script
        self.version = 0
        self.calls: list[tuple[Any, ...]] = []
        self.die_on: str | None = None
        self._folder = tempfile.TemporaryDirectory()
        self._store = Store(Path(self._folder.name) / "store.sqlite")

    @property
    def group_list(self) -> list[Group]:
        return list(self._store.rollouts.groups())

    def _call(self, name: str, *details: object) -> None:
        self.calls.append((name, *details))
        if self.die_on == name:
            raise GatewayError(f"{name}: connection lost")

    async def create_groups(self, requests: Iterable[Json]) -> list[Group]:
        requests = list(requests)
        self._call("create", [(r["kind"], r["step"], r["slot"]) for r in requests])
        try:
            return list(self._store.rollouts.create_groups(requests))
        except Conflict as error:
            raise GatewayError(str(error), status=409) from error

    async def groups(
        self, *, kind: str | None = None, step: int | None = None, state: str | None = None
    ) -> list[Group]:
        return list(self._store.rollouts.groups(kind=kind, step=step, state=state))

    async def consume(self, group_ids: Iterable[str]) -> None:
        ids = sorted(group_ids)
        self._call("consume", ids)
        self._store.rollouts.consume(ids)

    async def rollouts(
        self,
        *,
        after: int = 0,
        states: Iterable[RolloutState] = tuple(RolloutState),
        wait_s: float = 0.0,
        limit: int = 1000,
        tasks: bool = True,
    ) -> tuple[list[Rollout], int]:
        self._call("rollouts", after)
        for queued in self._store.rollouts.after(0, [RolloutState.QUEUED], limit):
            self._end(queued.rollout_id, self.script(queued))
        changed = self._store.rollouts.after(after, list(states), limit, tasks=tasks)
        return changed, max((r.change for r in changed), default=after)

    def _end(self, rollout_id: str, ending: Ending) -> None:
        store = self._store.rollouts
        for attempt in range(1, ending.attempt):
            store.claim(rollout_id, "c")
            store.infrastructure(rollout_id, attempt, "void", MAX_ATTEMPTS)
        if ending.state is RolloutState.CANCELLED:
            store.cancel(rollout_id, "cancelled")
            return
        store.claim(rollout_id, "c")
        parent = None
        for response in ending.responses:
            parent = self._turn(rollout_id, ending.attempt, parent, response, None)
        for cause in ending.forks:
            self._turn(rollout_id, ending.attempt, parent, (7,), cause)
        if ending.failure is FailureClass.INFRASTRUCTURE:
            store.infrastructure(rollout_id, ending.attempt, ending.reason or "", 0)
            return
        exit_code = 0 if ending.failure is None else 1
        store.exit(rollout_id, ending.attempt, exit_code=exit_code, timed_out=False, reason=ending.reason)
        if ending.reward is not None:
            store.reward(rollout_id, ending.attempt, ending.reward, while_running=False)
        store.finish(rollout_id, ending.attempt, None)

    def _turn(
        self, rollout_id: str, attempt: int, parent: int | None, response: tuple[int, ...], cause: str | None
    ) -> int:
        spans = (VersionSpan(self.version, len(response)),)
        generation = Generation(list(response), [-1.0] * len(response), FinishReason.STOP, spans)
        turn_id = self._store.turns.open(rollout_id, attempt, b"key", ChatRequest("m"), None)
        self._store.turns.commit(
            turn_id, parent_id=parent, fork_cause=cause, delta=[1, 2], generation=generation, node={}
        )
        return turn_id

    async def turns(self, rollout_ids: Iterable[str]) -> list[Turn]:
        ids = list(rollout_ids)
        self._call("turns", len(ids))
        return list(self._store.turns.of_rollouts(ids))

    async def put_model(
        self, name: str, *, engines: list[str], version: int, lineage: str, context_tokens: int
    ) -> None:
        self._call("put_model", version)
        self.version = version

    async def unmet(self) -> dict[str, int]:
        return {}

    async def recover(self, *, step: int, version: int) -> Recovery:
        self._call("recover", step, version)
        return self._store.rollouts.recover(step, version)
