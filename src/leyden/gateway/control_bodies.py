"""What the control API is sent: bodies and queries of its operations. A field that is wrong is a 422 that names it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request

from leyden.config import EvalSamplingConfig
from leyden.errors import Unprocessable
from leyden.rewards import reward_number
from leyden.types import Claims, RolloutState

LARGEST = 2**63 - 1  # what the store's integers hold

Whole = Annotated[int, Field(ge=0, le=LARGEST)]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Query(BaseModel):
    model_config = ConfigDict(extra="forbid")


Read = TypeVar("Read", bound=BaseModel)


def read(kind: type[Read], value: Any) -> Read:
    """`value` as a `kind`. Raises Unprocessable that names the first field that is wrong."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        if first["type"] == "missing":
            raise Unprocessable(f"{where} is missing", param=where) from None
        why = first["msg"].removeprefix("Value error, ")
        raise Unprocessable(f"{where}: {first['input']!r:.200} is refused: {why}", param=where) from None


@dataclass(frozen=True, slots=True)
class ControlCall:
    """A call of an operation: `body` and `query` are of the types that the operation names."""

    request: Request
    claims: Claims
    body: Any = None
    query: Any = None

    @property
    def rollout_id(self) -> str:
        return str(self.request.path_params["rollout_id"])


class GroupSpec(Body):
    kind: Literal["train", "eval"]
    step: int = Field(ge=0, le=10**9)
    slot: int = Field(ge=0, le=10**6)
    size: int = Field(ge=1, le=10_000)
    task: dict[str, Any]
    sampling: EvalSamplingConfig | None = None


class CreateGroups(Body):
    groups: list[GroupSpec] = Field(max_length=10_000)


class GroupIds(Body):
    group_ids: list[str]


class Recover(Body):
    step: Whole
    version: Whole


class ClaimBody(Body):
    controller: str = Field(min_length=1, max_length=200)


class TakeOverBody(ClaimBody):
    attempt: int = Field(ge=1, le=LARGEST)


class ExitBody(Body):
    attempt: Whole
    exit_code: Annotated[int, Field(ge=-LARGEST, le=LARGEST)] | None = None
    timed_out: bool = False
    reason: str | None = None


class FinishBody(Body):
    attempt: Whole
    reason: str | None = None


class FailureBody(Body):
    attempt: Whole
    reason: str = Field(min_length=1, max_length=4000)


class VoidBody(FailureBody):
    """`final`: another attempt would meet the same."""

    final: bool = False


class CancelBody(Body):
    reason: str = "cancelled"


SEND_REWARD = '; send {"value": 0.5}: one finite number, nothing else with a grader\'s key'


class RewardBody(Body):
    """Numbers beyond 64 bits are read as floats; true and false are 1 and 0."""

    value: Annotated[Any, AfterValidator(reward_number)]
    rollout_id: str | None = None
    attempt: Whole | None = None


class EventBody(Body):
    kind: str = Field(min_length=1, max_length=200)
    data: dict[str, Any] = {}
    rollout_id: str | None = None
    attempt: Whole | None = None


class ModelBody(Body):
    engines: list[str]
    version: Whole
    lineage: str
    context_tokens: int = Field(ge=1, le=LARGEST)


class RolloutIds(Body):
    rollout_ids: list[str]


class GroupQuery(Query):
    kind: str | None = None
    step: Whole | None = None
    state: str | None = None


def _known(states: str) -> str:
    unknown = sorted({name for name in states.split(",") if name} - {state.value for state in RolloutState})
    if unknown:
        raise ValueError(f"states {unknown} are unknown; known are {[state.value for state in RolloutState]}")
    return states


class RolloutQuery(Query):
    """The feed: changes after a cursor, of rollouts in some states (separated by commas; all where empty)."""

    after: Whole = 0
    limit: int = Field(default=1000, ge=1, le=LARGEST)
    states: Annotated[str, AfterValidator(_known)] = ""
    wait_s: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    tasks: Literal["0", "1"] = "1"
    controller: str | None = Field(default=None, min_length=1, max_length=200)


class EventQuery(Query):
    rollout_id: str
