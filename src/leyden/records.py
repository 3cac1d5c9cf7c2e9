"""What the store holds and the control API answers, as frozen records. Field names are those of the JSON.

The store makes them from rows, the gateway answers them, `openapi` describes them, and the client reads them again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, TypeAdapter

from leyden.types import FailureClass, Json, RolloutState

Record = TypeVar("Record")
LAST_WORDS = "; last words: "
"""In a reason, stands between what Leyden says and the last line that harness or grader printed."""


_adapter: Callable[[Any], TypeAdapter[Any]] = cache(TypeAdapter)


def adapter(kind: type[Record]) -> TypeAdapter[Record]:
    """Reads a record from JSON and describes it. Fields that a later gateway adds are ignored."""
    return _adapter(kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One rollout as the gateway sees it. Times are Unix seconds; `change` grows with every state change.

    `task` is empty if the answer was asked for without tasks. `forks` counts turns that fork, by cause.
    `refusals` are the calls that were not served: the first one's words by code. Of its attempts `spared` count against
    no limit. A queued rollout may be claimed from `retry_at` on.
    """

    rollout_id: str
    group_id: str
    kind: Literal["train", "eval"]
    step: int
    slot: int
    member: int
    task: Annotated[Json, BeforeValidator(lambda task: task or {})] = field(default_factory=dict)
    state: RolloutState
    attempt: int
    change: int
    reward: float | None = None
    failure: FailureClass | None = None
    reason: str | None = None
    exit_code: int | None = None
    timed_out: bool = False
    turns: int = 0
    sampled_tokens: int = 0
    min_version: int | None = None
    max_version: int | None = None
    held_s: float = 0.0
    forks: dict[str, int] = field(default_factory=dict)
    created: float = 0.0
    started: float | None = None
    finished: float | None = None
    sampling: Json | None = None
    controller: str | None = None
    retry_at: float = 0.0
    refusals: dict[str, str] = field(default_factory=dict)
    spared: int = 0

    @classmethod
    def from_json(cls, data: Json) -> Rollout:
        """Raises pydantic's ValidationError."""
        return adapter(cls).validate_python(data)


@dataclass(frozen=True, slots=True)
class Group:
    """The rollouts of one task in one step."""

    group_id: str
    kind: Literal["train", "eval"]
    step: int
    slot: int
    size: int
    state: Literal["active", "consumed", "discarded"]
    rollouts: tuple[Rollout, ...] = ()


@dataclass(frozen=True, slots=True)
class Groups:
    groups: tuple[Group, ...]


@dataclass(frozen=True, slots=True)
class RolloutPage:
    """`cursor` is where the next page begins."""

    rollouts: tuple[Rollout, ...]
    cursor: int


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
    grader_key: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class KnownController:
    """`seen` is when it last asked (Unix seconds); `alive`: its lease holds."""

    controller: str
    seen: float
    alive: bool


@dataclass(frozen=True, slots=True)
class ControllerList:
    """`run` is a name of the run that no other run has."""

    controllers: tuple[KnownController, ...]
    run: str = ""


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """`problem` says why an engine is not asked."""

    url: str
    works: bool
    problem: str | None


@dataclass(frozen=True, slots=True)
class Model:
    """A model that the gateway serves. `engines` are base URLs; `lineage` and `version` name its weights."""

    name: str
    engines: tuple[str, ...]
    version: int
    lineage: str
    context_tokens: int
    engine_states: tuple[EngineHealth, ...] = ()


@dataclass(frozen=True, slots=True)
class ServedModels:
    models: tuple[Model, ...]
    paused: bool = False


@dataclass(frozen=True, slots=True)
class Paused:
    paused: bool


@dataclass(frozen=True, slots=True)
class Recovery:
    """Group ids that a recovery discarded, and consumed ones that it made active again."""

    discarded: tuple[str, ...]
    reopened: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RewardReceipt:
    reward: float


@dataclass(frozen=True, slots=True)
class WorkspaceReceipt:
    bytes: int


@dataclass(frozen=True, slots=True)
class EventReceipt:
    seq: int


@dataclass(frozen=True, slots=True)
class EventLog:
    """What an attempt noted, in order; `kind` and `data` are its own."""

    events: tuple[dict[str, Any], ...]


@dataclass(frozen=True, slots=True)
class Unmet:
    """What harnesses asked for and did not get since the gateway started, in how many calls."""

    unmet: dict[str, int]


@dataclass(frozen=True, slots=True)
class Done:
    """Nothing to say."""
