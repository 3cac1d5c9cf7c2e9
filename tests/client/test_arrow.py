from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

import leyden.client.arrow as arrow
from leyden.client import decode, encode
from leyden.types import FinishReason, Turn, VersionSpan


def turn(turn_id: int, delta: list[int], sampled: list[int], logprobs: list[float] | None, **fields: object) -> Turn:
    known: dict[str, object] = {
        "rollout_id": "r1", "attempt": 1, "parent_id": None, "spans": (VersionSpan(0, len(sampled)),),
        "finish_reason": FinishReason.STOP,
    }  # fmt: skip
    return Turn(
        turn_id=turn_id,
        delta_P=np.array(delta, np.int32),
        sampled_T=np.array(sampled, np.int32),
        logprobs_T=None if logprobs is None else np.array(logprobs, np.float32),
        **(known | fields),  # type: ignore[arg-type]
    )


TURNS = [
    turn(1, [5, 6, 7], [8, 9], [-0.5, -0.25]),
    turn(2**40, [], [10, 11, 12], None, parent_id=1, spans=(VersionSpan(3, 1), VersionSpan(4, 2))),
    turn(
        3, [1], [], [], rollout_id="r2", attempt=3, finish_reason=FinishReason.LENGTH, fork_cause="compaction", spans=()
    ),
    turn(4, [2], [3], [-1.5], parent_id=2**40),
]


def same(a: Turn, b: Turn) -> bool:
    arrays = ("delta_P", "sampled_T", "logprobs_T")
    for name in arrays:
        left, right = getattr(a, name), getattr(b, name)
        if (left is None) != (right is None):
            return False
        if left is not None and (left.dtype != right.dtype or left.tolist() != right.tolist()):
            return False
    scalars = ("turn_id", "rollout_id", "attempt", "parent_id", "spans", "finish_reason", "fork_cause")
    return all(getattr(a, n) == getattr(b, n) for n in scalars)


def test_turns_come_back_as_they_went() -> None:
    decoded = decode(encode(TURNS))
    assert len(decoded) == 4 and all(map(same, TURNS, decoded))
    assert isinstance(decoded[1].spans[0], VersionSpan) and decoded[2].finish_reason is FinishReason.LENGTH


def test_no_turns() -> None:
    assert decode(encode([])) == []


def test_many_batches_keep_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrow, "BATCH_TOKENS", 5)
    turns = TURNS * 10
    body = encode(iter(turns))
    assert sum(1 for _ in pa.ipc.open_stream(body)) == 30
    assert all(map(same, turns, decode(body)))


def test_tokens_are_views_of_the_body() -> None:
    body = encode([turn(1, list(range(1000)), [1], [0.0])])
    delta = decode(body)[0].delta_P
    start = np.frombuffer(body, np.uint8).ctypes.data
    assert start <= delta.ctypes.data < start + len(body) and not delta.flags.owndata and not delta.flags.writeable


def test_other_bodies_are_refused() -> None:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, pa.schema([pa.field("x", pa.int64())])):
        pass
    with pytest.raises(ValueError, match="another schema"):
        decode(sink.getvalue().to_pybytes())
    with pytest.raises(ValueError, match=r".+"):
        decode(b"<html>")
