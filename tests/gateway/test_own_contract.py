"""What an engine of Leyden's own contract answers, read: what is kept, what is dropped, what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from leyden.errors import CaptureError, EngineUnavailable
from leyden.gateway.engines.base import joined
from leyden.gateway.engines.leyden import read
from leyden.types import FinishReason, Generation, VersionSpan


def answer(**changes: Any) -> dict[str, Any]:
    return {"token_ids": [5, 6], "logprobs": [-0.1, -0.2], "finish_reason": "stop", "spans": [[3, 2]]} | changes


def test_an_answer_is_read_as_it_was_sampled() -> None:
    assert read(answer()) == Generation([5, 6], [-0.1, -0.2], FinishReason.STOP, (VersionSpan(3, 2),), None)


@pytest.mark.parametrize("logprobs", [None, [-0.1, None], [-0.1, float("nan")], [-0.1, 0.5]], ids=str)
def test_log_probs_that_are_missing_or_impossible_are_dropped_whole(logprobs: Any) -> None:
    assert read(answer(logprobs=logprobs)) == Generation([5, 6], None, FinishReason.STOP, (VersionSpan(3, 2),), None)


@pytest.mark.parametrize(
    "changes",
    [{"logprobs": [-0.1]}, {"logprobs": []}, {"spans": [[3, 1]]}, {"token_ids": None}, {"finish_reason": None}],
)
def test_what_contradicts_itself_is_refused(changes: Any) -> None:
    with pytest.raises(CaptureError):
        read(answer(**changes))


@pytest.mark.parametrize("said", ["repetition", "tool_calls"])
def test_an_end_of_any_name_is_a_stop(said: str) -> None:
    assert read(answer(finish_reason=said)).finish_reason is FinishReason.STOP


def test_an_answer_that_ends_in_an_error_is_none() -> None:
    with pytest.raises(EngineUnavailable):
        read(answer(finish_reason="error"))


@pytest.mark.parametrize("logprobs", [None, []])
def test_a_part_without_tokens_takes_no_log_probs_away(logprobs: Any) -> None:
    """An update can cut a generation short before its first token."""
    empty = answer(token_ids=[], logprobs=logprobs, spans=[], finish_reason="abort")
    assert read(empty).logprobs_T == []
    nothing = Generation([], None, FinishReason.ABORT, ())
    whole = joined([nothing, read(answer(finish_reason="abort")), read(empty), nothing, read(answer(spans=[[4, 2]]))])
    assert whole.token_ids_T == [5, 6, 5, 6]
    assert whole.logprobs_T == [-0.1, -0.2, -0.1, -0.2]
    assert whole.spans == (VersionSpan(3, 2), VersionSpan(4, 2))
