"""Recorded turns by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from leyden.types import FinishReason, Turn, VersionSpan


def turn(
    turn_id: int,
    delta: Sequence[int],
    sampled: Sequence[int],
    parent: int | None = None,
    *,
    cause: str | None = None,
    tools: int = 0,
) -> Turn:
    return Turn(
        turn_id=turn_id,
        rollout_id="r1",
        attempt=1,
        parent_id=parent,
        delta_P=np.array(delta, np.int32),
        sampled_T=np.array(sampled, np.int32),
        logprobs_T=np.full(len(sampled), -0.5, np.float32),
        spans=(VersionSpan(0, len(sampled)),),
        finish_reason=FinishReason.STOP,
        fork_cause=cause,
        tools=tools,
    )
