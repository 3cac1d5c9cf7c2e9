"""Columns that are not SQL values: packed integers and floats, compressed JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson
import zstandard

from leyden.types import Ids, Logprobs, VersionSpan


def pack_ids(ids: Sequence[int] | Ids) -> bytes:
    return np.asarray(ids, dtype="<i4").tobytes()


def unpack_ids(blob: bytes) -> Ids:
    return np.frombuffer(blob, dtype="<i4")


def pack_logprobs(logprobs: Sequence[float] | None) -> bytes | None:
    return None if logprobs is None else np.asarray(logprobs, dtype="<f4").tobytes()


def unpack_logprobs(blob: bytes | None) -> Logprobs | None:
    return None if blob is None else np.frombuffer(blob, dtype="<f4")


def pack_spans(spans: Sequence[VersionSpan]) -> str:
    return orjson.dumps([list(span) for span in spans]).decode()


def unpack_spans(text: str) -> tuple[VersionSpan, ...]:
    return tuple(VersionSpan(version, count) for version, count in orjson.loads(text))


def compressor() -> zstandard.ZstdCompressor:
    """Costly to make; for use in one thread."""
    return zstandard.ZstdCompressor(level=3)


def pack_json(value: Any, zstd: zstandard.ZstdCompressor) -> bytes:
    return zstd.compress(orjson.dumps(value))


def unpack_json(blob: bytes) -> Any:
    return orjson.loads(zstandard.ZstdDecompressor().decompress(blob))
