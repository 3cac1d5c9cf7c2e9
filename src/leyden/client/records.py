"""What the control API answers, as frozen records. Field names are those of the JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from leyden.types import FailureClass, Json, RolloutState

LAST_WORDS = "; last words: "
"""In a reason, stands between what Leyden says and the last line that harness or grader printed."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """One rollout as the gateway sees it. Times are Unix seconds; `change` grows with every state change.

    `task` is empty if the answer was asked for without tasks. `forks` counts turns that fork, by cause.
    `refusals` are the calls that were not served: the first one's words by code.
    A queued rollout may be claimed from `retry_at` on.
    """

    rollout_id: str
    group_id: str
    kind: str
    step: int
    slot: int
    member: int
    task: Json
    state: RolloutState
    attempt: int
    change: int
    reward: float | None
    failure: FailureClass | None
    reason: str | None
    exit_code: int | None
    timed_out: bool
    turns: int
    sampled_tokens: int
    min_version: int | None
    max_version: int | None
    held_s: float
    forks: dict[str, int] = field(default_factory=dict)
    created: float = 0.0
    started: float | None = None
    finished: float | None = None
    sampling: Json | None = None
    controller: str | None = None
    retry_at: float = 0.0
    refusals: dict[str, str] = field(default_factory=dict)

    @classmethod
    def from_json(cls, data: Json) -> Rollout:
        """Fields that a later gateway adds are ignored; a missing required field raises KeyError."""
        failure = data.get("failure")
        return cls(
            rollout_id=data["rollout_id"],
            group_id=data["group_id"],
            kind=data["kind"],
            step=data["step"],
            slot=data["slot"],
            member=data["member"],
            task=data.get("task") or {},
            state=RolloutState(data["state"]),
            attempt=data["attempt"],
            change=data["change"],
            reward=data.get("reward"),
            failure=FailureClass(failure) if failure else None,
            reason=data.get("reason"),
            exit_code=data.get("exit_code"),
            timed_out=bool(data.get("timed_out")),
            turns=data.get("turns", 0),
            sampled_tokens=data.get("sampled_tokens", 0),
            min_version=data.get("min_version"),
            max_version=data.get("max_version"),
            held_s=data.get("held_s", 0.0),
            forks=data.get("forks") or {},
            created=data.get("created", 0.0),
            started=data.get("started"),
            finished=data.get("finished"),
            sampling=data.get("sampling"),
            controller=data.get("controller"),
            retry_at=data.get("retry_at", 0.0),
            refusals=data.get("refusals") or {},
        )


@dataclass(frozen=True, slots=True)
class Group:
    """The rollouts of one task in one step. `state` is active, consumed or discarded."""

    group_id: str
    kind: str
    step: int
    slot: int
    size: int
    state: str
    rollouts: tuple[Rollout, ...]

    @classmethod
    def from_json(cls, data: Json) -> Group:
        return cls(
            group_id=data["group_id"],
            kind=data["kind"],
            step=data["step"],
            slot=data["slot"],
            size=data["size"],
            state=data["state"],
            rollouts=tuple(Rollout.from_json(r) for r in data.get("rollouts") or ()),
        )


@dataclass(frozen=True, slots=True)
class Claim:
    """A rollout that this controller now runs, the key its harness gets, and the one to hand in its workspace with."""

    rollout: Rollout
    agent_key: str = field(repr=False)
    workspace_key: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class ExitReceipt:
    """The answer to a reported exit. Without a `grader_key` there is nothing to grade."""

    rollout: Rollout
    grader_key: str | None = field(repr=False)


@dataclass(frozen=True, slots=True)
class Model:
    """A model that the gateway serves. `engines` are base URLs; `lineage` and `version` name its weights."""

    name: str
    engines: tuple[str, ...]
    version: int
    lineage: str
    context_tokens: int

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Model:
        return cls(
            name=data["name"],
            engines=tuple(data.get("engines") or ()),
            version=data["version"],
            lineage=data["lineage"],
            context_tokens=data["context_tokens"],
        )


@dataclass(frozen=True, slots=True)
class Recovery:
    """Group ids that a recovery discarded, and consumed ones that it made active again."""

    discarded: tuple[str, ...]
    reopened: tuple[str, ...]
