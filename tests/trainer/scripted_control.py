"""The control API in memory. A script says how each rollout ends; every feed call ends what is queued."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np

from leyden.client import Group, Recovery, Rollout
from leyden.errors import GatewayError
from leyden.types import FailureClass, FinishReason, RolloutState, Turn, VersionSpan


@dataclass(frozen=True)
class Ending:
    """How a rollout ends: one turn per entry of `responses`, each continuing the one before; then one branch after the
    last for each cause of `forks`.
    """

    reward: float | None = 1.0
    responses: tuple[tuple[int, ...], ...] = ((5, 6),)
    state: RolloutState = RolloutState.SUCCEEDED
    failure: FailureClass | None = None
    reason: str | None = None
    attempt: int = 1
    forks: tuple[str, ...] = ()


INFRASTRUCTURE = Ending(None, (), RolloutState.FAILED, FailureClass.INFRASTRUCTURE, "evicted", attempt=3)
CANCELLED = Ending(None, (), RolloutState.CANCELLED)
NO_CALLS = Ending(0.0, ())


class ScriptedControl:
    def __init__(self, script: Callable[[Rollout], Ending]) -> None:
        self.script = script
        self.version = 0
        self.group_list: list[Group] = []
        self.turn_lists: dict[str, list[Turn]] = {}
        self.strangers: list[Rollout] = []
        self.calls: list[tuple] = []
        self.die_on: str | None = None
        self._change = 0
        self._turn_id = 0

    def _call(self, name: str, *details: object) -> None:
        self.calls.append((name, *details))
        if self.die_on == name:
            raise GatewayError(f"{name}: connection lost")

    async def create_groups(self, requests: Iterable[dict]) -> list[Group]:
        requests = list(requests)
        self._call("create", [(r["kind"], r["step"], r["slot"]) for r in requests])
        return [self._find(r) or self._create(r) for r in requests]

    def _find(self, r: dict) -> Group | None:
        key = (r["kind"], r["step"], r["slot"])
        live = [g for g in self.group_list if g.state != "discarded" and (g.kind, g.step, g.slot) == key]
        return live[0] if live else None

    def _create(self, r: dict) -> Group:
        number = len(self.group_list)
        rollouts = tuple(self._new(f"g{number}", r, member) for member in range(r["size"]))
        group = Group(f"g{number}", r["kind"], r["step"], r["slot"], r["size"], "active", rollouts)
        self.group_list.append(group)
        return group

    def _new(self, group_id: str, r: dict, member: int) -> Rollout:
        return Rollout(
            rollout_id=f"{group_id}.{member}", group_id=group_id, kind=r["kind"], step=r["step"], slot=r["slot"],
            member=member, task=r["task"], state=RolloutState.QUEUED, attempt=0, change=self._next_change(),
            reward=None, failure=None, reason=None, exit_code=None, timed_out=False, turns=0, sampled_tokens=0,
            min_version=None, max_version=None, held_s=0.0,
        )  # fmt: skip

    def _next_change(self) -> int:
        self._change += 1
        return self._change

    async def groups(self, *, kind=None, step=None, state=None) -> list[Group]:
        return [
            g for g in self.group_list if kind in (None, g.kind) and step in (None, g.step) and state in (None, g.state)
        ]

    async def consume(self, group_ids: Iterable[str]) -> None:
        ids = set(group_ids)
        self._call("consume", sorted(ids))
        self._set_state(ids, "consumed")

    def _set_state(self, ids: set[str], state: str) -> None:
        self.group_list = [replace(g, state=state) if g.group_id in ids else g for g in self.group_list]

    async def rollouts(self, *, after=0, states=(), wait_s=0.0, limit=1000, tasks=True):
        self._call("rollouts", after)
        self.group_list = [replace(g, rollouts=tuple(map(self._end, g.rollouts))) for g in self.group_list]
        known = [r for g in self.group_list for r in g.rollouts] + self.strangers
        changed = sorted((r for r in known if r.change > after), key=lambda r: r.change)[:limit]
        return [replace(r, task={}) for r in changed], max((r.change for r in changed), default=after)

    def _end(self, rollout: Rollout) -> Rollout:
        if rollout.state is not RolloutState.QUEUED:
            return rollout
        ending = self.script(rollout)
        parent, turns = None, []
        for response in ending.responses:
            self._turn_id += 1
            turns.append(self._turn(rollout.rollout_id, ending.attempt, parent, response))
            parent = self._turn_id
        for cause in ending.forks:
            self._turn_id += 1
            turns.append(replace(self._turn(rollout.rollout_id, ending.attempt, parent, (7,)), fork_cause=cause))
        self.turn_lists[rollout.rollout_id] = turns
        version = self.version if turns else None
        return replace(
            rollout, state=ending.state, attempt=ending.attempt, change=self._next_change(), reward=ending.reward,
            failure=ending.failure, reason=ending.reason, turns=len(turns),
            sampled_tokens=sum(map(len, ending.responses)), min_version=version, max_version=version,
        )  # fmt: skip

    def _turn(self, rollout_id: str, attempt: int, parent: int | None, response: tuple[int, ...]) -> Turn:
        return Turn(
            turn_id=self._turn_id, rollout_id=rollout_id, attempt=attempt, parent_id=parent,
            delta_P=np.array([1, 2], np.int32), sampled_T=np.array(response, np.int32),
            logprobs_T=np.full(len(response), -1.0, np.float32),
            spans=(VersionSpan(self.version, len(response)),), finish_reason=FinishReason.STOP,
        )  # fmt: skip

    async def turns(self, rollout_ids: Iterable[str]) -> list[Turn]:
        ids = list(rollout_ids)
        self._call("turns", len(ids))
        return [turn for rollout_id in ids for turn in self.turn_lists[rollout_id]]

    async def put_model(self, name, *, engines, version, lineage, context_tokens) -> None:
        self._call("put_model", version)
        self.version = version

    async def unmet(self):
        return {}

    async def recover(self, *, step: int, version: int) -> Recovery:
        self._call("recover", step, version)
        late = {
            g.group_id
            for g in self.group_list
            if g.state != "discarded" and any((r.max_version or 0) > version for r in g.rollouts)
        }
        reopened = {
            g.group_id for g in self.group_list if g.state == "consumed" and g.step > step and g.group_id not in late
        }
        self._set_state(late, "discarded")
        self._set_state(reopened, "active")
        return Recovery(tuple(sorted(late)), tuple(sorted(reopened)))
