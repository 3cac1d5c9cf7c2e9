"""Turns as one columnar body (Arrow IPC stream). The gateway encodes, the trainer decodes; both use this file.

One row per turn, ids as list<int32>, log-probs as nullable list<float32>, version spans as two list<int32>
columns of equal lengths. A body is a sequence of record batches of bounded size, so list offsets never
overflow 32 bits. `decode` copies no token: the arrays of its turns are read-only views of the body.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from leyden.types import FinishReason, Turn, VersionSpan

SCHEMA = pa.schema(
    [
        pa.field("turn_id", pa.int64(), nullable=False),
        pa.field("rollout_id", pa.string(), nullable=False),
        pa.field("attempt", pa.int32(), nullable=False),
        pa.field("parent_id", pa.int64()),
        pa.field("delta", pa.list_(pa.int32()), nullable=False),
        pa.field("sampled", pa.list_(pa.int32()), nullable=False),
        pa.field("logprobs", pa.list_(pa.float32())),
        pa.field("span_versions", pa.list_(pa.int32()), nullable=False),
        pa.field("span_counts", pa.list_(pa.int32()), nullable=False),
        pa.field("finish_reason", pa.string(), nullable=False),
        pa.field("fork_cause", pa.string()),
        pa.field("protocol", pa.string(), nullable=False),
        pa.field("streamed", pa.bool_(), nullable=False),
        pa.field("tools", pa.int32(), nullable=False),
    ]
)
BATCH_TOKENS = 1 << 20


def encode(turns: Iterable[Turn]) -> bytes:
    """An Arrow IPC stream of `turns`, in their order."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, SCHEMA) as writer:
        for batch in _batches(turns):
            writer.write_batch(_record_batch(batch))
    body: bytes = sink.getvalue().to_pybytes()
    return body


def decode(body: bytes) -> list[Turn]:
    """The turns of a body made by `encode`. Raises pyarrow.ArrowInvalid (a ValueError) if it is not one."""
    with pa.ipc.open_stream(pa.py_buffer(body)) as reader:
        if not reader.schema.equals(SCHEMA):
            raise pa.ArrowInvalid(f"turns have another schema than this version of Leyden reads: {reader.schema}")
        return [turn for batch in reader for turn in _turns(batch)]


def _batches(turns: Iterable[Turn]) -> Iterator[list[Turn]]:
    """Consecutive runs of turns with at most BATCH_TOKENS ids (or a single longer turn)."""
    batch: list[Turn] = []
    tokens = 0
    for turn in turns:
        size = turn.delta_P.size + turn.sampled_T.size
        if batch and tokens + size > BATCH_TOKENS:
            yield batch
            batch, tokens = [], 0
        batch.append(turn)
        tokens += size
    if batch:
        yield batch


def _record_batch(turns: list[Turn]) -> Any:
    columns = [
        pa.array([t.turn_id for t in turns], pa.int64()),
        pa.array([t.rollout_id for t in turns], pa.string()),
        pa.array([t.attempt for t in turns], pa.int32()),
        pa.array([t.parent_id for t in turns], pa.int64()),
        _lists([t.delta_P for t in turns], np.int32),
        _lists([t.sampled_T for t in turns], np.int32),
        _lists([t.logprobs_T for t in turns], np.float32),
        _lists([np.array([s.version for s in t.spans], np.int32) for t in turns], np.int32),
        _lists([np.array([s.length for s in t.spans], np.int32) for t in turns], np.int32),
        pa.array([str(t.finish_reason) for t in turns], pa.string()),
        pa.array([t.fork_cause for t in turns], pa.string()),
        pa.array([t.protocol for t in turns], pa.string()),
        pa.array([t.streamed for t in turns], pa.bool_()),
        pa.array([t.tools for t in turns], pa.int32()),
    ]
    return pa.record_batch(columns, schema=SCHEMA)


def _lists(arrays: Sequence[NDArray[Any] | None], dtype: type[np.generic]) -> Any:
    """A list array whose values are the arrays laid end to end; None becomes a null entry."""
    sizes = [0 if a is None else a.size for a in arrays]
    offsets = np.zeros(len(arrays) + 1, np.int32)
    np.cumsum(sizes, out=offsets[1:])
    present = [a for a in arrays if a is not None]
    values: NDArray[Any] = np.empty(0, dtype)
    if present:
        values = np.concatenate(present, dtype=dtype, casting="same_kind")
    mask = np.array([a is None for a in arrays])
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values), mask=pa.array(mask) if mask.any() else None)


def _turns(batch: Any) -> Iterator[Turn]:
    delta, sampled, logprobs = (_slices(batch.column(n)) for n in ("delta", "sampled", "logprobs"))
    spans = zip(batch.column("span_versions").to_pylist(), batch.column("span_counts").to_pylist(), strict=True)
    plain = ("turn_id", "rollout_id", "attempt", "parent_id", "fork_cause", "protocol", "streamed", "tools")
    scalars = zip(*(batch.column(name).to_pylist() for name in plain), strict=True)
    finish_reasons = map(FinishReason, batch.column("finish_reason").to_pylist())
    for values, d, s, lp, (versions, counts), finish_reason in zip(
        scalars, delta, sampled, logprobs, spans, finish_reasons, strict=True
    ):
        yield Turn(
            **dict(zip(plain, values, strict=True)),
            delta_P=d,
            sampled_T=s,
            logprobs_T=lp,
            spans=tuple(map(VersionSpan, versions, counts)),
            finish_reason=finish_reason,
        )


def _slices(column: Any) -> list[Any]:
    """Row i of a list column as a view of the column's values; None where it is null."""
    values = column.values.to_numpy(zero_copy_only=True)
    offsets = column.offsets.to_numpy(zero_copy_only=True).tolist()
    rows = [values[a:b] for a, b in pairwise(offsets)]
    if column.null_count == 0:
        return rows
    valid = column.is_valid().to_pylist()
    return [row if ok else None for row, ok in zip(rows, valid, strict=True)]
