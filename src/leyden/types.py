"""The words of the project as types. Three shapes carry the data: Turn -> Sample -> batch.

Ids are `int32`, log-probs `float32`, both one-dimensional numpy arrays of equal length where they describe the
same tokens. A suffix names the axis: `_P` prompt tokens, `_T` sampled tokens, `_L` the tokens of a sample.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]
Logprobs = NDArray[np.float32]
Mask = NDArray[np.bool_]
Json = dict[str, Any]


class RolloutState(StrEnum):
    """`queued -> running -> grading -> succeeded | failed | cancelled`. The last three are final."""

    QUEUED = "queued"
    RUNNING = "running"
    GRADING = "grading"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def terminal(self) -> bool:
        return self in TERMINAL


TERMINAL = frozenset({RolloutState.SUCCEEDED, RolloutState.FAILED, RolloutState.CANCELLED})


class FailureClass(StrEnum):
    """An agent failure is graded as it stands; an infrastructure failure is retried and never scored."""

    AGENT = "agent"
    INFRASTRUCTURE = "infrastructure"


class TurnState(StrEnum):
    """`open` while the engine works; `committed` is the only state that is trained."""

    OPEN = "open"
    COMMITTED = "committed"
    ABANDONED = "abandoned"
    FAILED = "failed"
    LOST = "lost"


class FinishReason(StrEnum):
    """Why sampling ended: a stop token or string, or a limit (tokens, context).

    `abort`: the engine stopped early, for an update. The gateway samples on, so no turn ends like this.
    """

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class VersionSpan(NamedTuple):
    """`length` consecutive sampled tokens came from policy `version`."""

    version: int
    length: int


@dataclass(frozen=True, slots=True)
class Generation:
    """What an engine answers: the contract `generate(prompt ids) -> Generation`.

    `logprobs_T` are those of the distribution that was sampled from (temperature and truncation included);
    None if the engine could not give a finite one for every token. `spans` sum to `len(token_ids_T)`.
    `stop_string` is the stop string that ended the text, if one did; its tokens are part of `token_ids_T`.
    """

    token_ids_T: list[int]
    logprobs_T: list[float] | None
    finish_reason: FinishReason
    spans: tuple[VersionSpan, ...]
    stop_string: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One committed model call. Its whole prompt is the parent's prompt + the parent's sampled ids + `delta_P`.

    A turn without `parent_id` is the root of a tree and `delta_P` its whole prompt; `fork_cause` says why an
    attempt has another root or a second child (None for an attempt's first turn and for plain continuation).
    `protocol` and `streamed` say how the call came, `tools` how many tools it offered.
    """

    turn_id: int
    rollout_id: str
    attempt: int
    parent_id: int | None
    delta_P: Ids
    sampled_T: Ids
    logprobs_T: Logprobs | None
    spans: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    fork_cause: str | None = None
    protocol: str = "openai-chat"
    streamed: bool = False
    tools: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One training sequence: a root-to-leaf path of an attempt's tree.

    `mask_L` is True exactly on sampled tokens that this sample trains. `logprobs_L` holds the recorded log-prob
    where the mask is True, NaN where none was recorded, 0 elsewhere. `turn_ids` are the turns on the path.
    """

    rollout_id: str
    ids_L: Ids
    mask_L: Mask
    logprobs_L: Logprobs
    turn_ids: tuple[int, ...]


class Scope(StrEnum):
    """What a key may do: `agent` calls the model, `grader` reads the workspace and posts a reward, `workspace` hands in
    what the harness left, `control` does everything."""

    AGENT = "agent"
    GRADER = "grader"
    WORKSPACE = "workspace"
    CONTROL = "control"


@dataclass(frozen=True, slots=True)
class Claims:
    """What a valid key says. `rollout_id` and `attempt` are empty for control keys; `expires` is Unix seconds."""

    scope: Scope
    rollout_id: str
    attempt: int
    expires: float
