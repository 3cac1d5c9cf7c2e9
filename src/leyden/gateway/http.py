"""Small HTTP pieces that both kinds of routes use: bounded bodies and JSON answers."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable
from typing import Any

import orjson
import zstandard
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from leyden.errors import RequestError, TooLarge, Unsupported
from leyden.gateway.metrics import Metrics
from leyden.protocols.checks import kind_of, loads
from leyden.types import Json


class ClientGone(Exception):
    """The caller hung up while its request was being read."""


class Unsaid(Exception):
    """Stands in a log for an error whose words may hold what was said."""


def log_bug(log: logging.Logger, where: str, error: Exception) -> None:
    """What happened and the lines it came through, but nothing that was said: no message, no values."""
    kind = type(error).__name__
    log.error("%s: %s", where, kind, exc_info=(Unsaid, Unsaid(kind), error.__traceback__))


class JsonResponse(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return orjson.dumps(content)


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """The whole body as it came. Raises TooLarge beyond `limit` bytes, before they are read where the
    length is declared."""
    declared = Headers(scope=scope).get("content-length", "0")
    if declared.isdigit() and int(declared) > limit:
        raise TooLarge(f"the body has {int(declared)} bytes; the limit is {limit} (gateway.max_body_bytes)")
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunks.append(message.get("body", b""))
        size += len(chunks[-1])
        if size > limit:
            raise TooLarge(f"the body has more than {limit} bytes (gateway.max_body_bytes)")
        if not message.get("more_body"):
            return b"".join(chunks)


def content_encoding(scope: Scope) -> str | None:
    """How the body is compressed, None if it is not. Raises Unsupported for an encoding that is not read."""
    encoding = Headers(scope=scope).get("content-encoding", "identity").strip().lower()
    if encoding in ("identity", ""):
        return None
    if encoding not in ENCODINGS:
        known = ", ".join(sorted(ENCODINGS))
        raise Unsupported(f"the body is encoded as {encoding!r:.40}; send it as it is, or as one of {known}")
    return encoding


def decoded(body: bytes, encoding: str | None, limit: int) -> bytes:
    """The body without its compression, of which no more than `limit` bytes are made. Raises TooLarge, or RequestError
    for a body that is not in this encoding or not whole."""
    if encoding is None:
        return body
    try:
        plain, whole = ENCODINGS[encoding](body, limit + 1)
    except (zlib.error, zstandard.ZstdError) as error:
        raise RequestError(f"the body is not {encoding}: {error}", code="invalid_encoding") from None
    if len(plain) > limit:
        raise TooLarge(f"the body has more than {limit} bytes without its {encoding} (gateway.max_body_bytes)")
    if not whole:
        raise RequestError(f"the body is not whole {encoding}", code="invalid_encoding")
    return plain


def _inflate(body: bytes, most: int) -> tuple[bytes, bool]:
    """gzip, or deflate with the zlib head that it should have, or without."""
    bare = not body.startswith(b"\x1f\x8b") and (body[:1] != b"\x78" or int.from_bytes(body[:2], "big") % 31 != 0)
    inflater = zlib.decompressobj(-zlib.MAX_WBITS if bare else zlib.MAX_WBITS | 32)
    return inflater.decompress(body, most), inflater.eof and not inflater.unused_data


def _unzstd(body: bytes, most: int) -> tuple[bytes, bool]:
    inflater = zstandard.ZstdDecompressor(max_window_size=MOST_WINDOW_BYTES)
    with inflater.stream_reader(body) as reader:
        plain: bytes = reader.read(most)
    return plain, zstandard.get_frame_parameters(body).content_size in (len(plain), zstandard.CONTENTSIZE_UNKNOWN)


MOST_WINDOW_BYTES = 8 * 2**20  # as browsers and servers bound it
ENCODINGS: dict[str, Callable[[bytes, int], tuple[bytes, bool]]] = {
    "gzip": _inflate,
    "x-gzip": _inflate,
    "deflate": _inflate,
    "zstd": _unzstd,
}


def parse_object(body: bytes, metrics: Metrics) -> Json:
    """A JSON object as `protocols.checks.loads` reads it. Raises RequestError for anything else."""
    try:
        value, halves = loads(body)
    except ValueError as error:
        raise RequestError(f"the body is not JSON that can be read: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise RequestError(f"the body is {kind_of(value)}, not a JSON object", code="invalid_json")
    if halves:
        metrics.halves.inc(halves)
    return value


def is_retry(scope: Scope) -> bool:
    """Whether the caller's SDK says that it tries a call again."""
    count = Headers(scope=scope).get("x-stainless-retry-count", "")
    return count.isdigit() and count.strip("0") != ""


async def send_json(send: Send, status: int, content: Any) -> None:
    body = orjson.dumps(content)
    await start(send, status, b"application/json", len(body))
    await send({"type": "http.response.body", "body": body})


async def start(send: Send, status: int, content_type: bytes, length: int | None = None) -> None:
    headers = [(b"content-type", content_type), (b"cache-control", b"no-store")]
    if length is not None:
        headers.append((b"content-length", b"%d" % length))
    await send({"type": "http.response.start", "status": status, "headers": headers})
