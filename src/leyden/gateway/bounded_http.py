"""Connections of callers that nobody knows yet: uvicorn's, with bounds on the head of a request and on its time.

A head has at most `HEAD_BYTES` and comes within `HEAD_S`; a body goes on at least every `BODY_S`, and ends within that
time once its answer is complete. A connection that keeps to none of it is closed. Between requests, and while a call is
answered, a connection may be silent for as long as uvicorn lets it.
"""

from __future__ import annotations

import asyncio
from enum import Enum

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_BYTES = 64 * 1024
HEAD_S = 30.0
BODY_S = 120.0
LOOK_S = 5.0


class _Part(Enum):
    HEAD = "head"
    BODY = "body"
    BETWEEN = "between"


class BoundedHttp(HttpToolsProtocol):
    """Each connection looks at its own clock every `look_s`: that costs less than a timer for each request."""

    head_s, body_s, look_s = HEAD_S, BODY_S, LOOK_S

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._part = _Part.HEAD
        self._head_bytes = 0
        self._since = self.loop.time()
        self._look = self.loop.call_later(self.look_s, self._check)

    def connection_lost(self, exc: Exception | None) -> None:
        self._look.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._part is _Part.HEAD:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES:
                self._refuse(f"431 Request Header Fields Too Large: the limit is {HEAD_BYTES} bytes")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._enter(_Part.HEAD)
        self._head_bytes = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._part is _Part.HEAD:  # else a trailer, which nothing here reads
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._enter(_Part.BODY)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self.cycle.response_complete:
            self._since = self.loop.time()
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._enter(_Part.BETWEEN)
        super().on_message_complete()

    def _enter(self, part: _Part) -> None:
        self._part = part
        self._since = self.loop.time()

    def _check(self) -> None:
        if self.transport.is_closing():
            return
        waited_s = self.loop.time() - self._since
        if self._part is _Part.HEAD and waited_s > self.head_s:
            self._refuse(f"408 Request Timeout: no whole request came within {self.head_s:g} s")
            return
        if self._part is _Part.BODY:
            if self.flow.read_paused and not self.cycle.response_complete:
                self._enter(_Part.BODY)  # it is the gateway that does not read
            elif waited_s > self.body_s:
                self.transport.close()
                return
        self._look = self.loop.call_later(self.look_s, self._check)

    def _refuse(self, said: str) -> None:
        status, _, why = said.partition(": ")
        if self._head_bytes and not self.transport.is_closing():
            head = f"HTTP/1.1 {status}\r\ncontent-type: text/plain\r\ncontent-length: {len(why)}\r\n"
            self.transport.write(f"{head}connection: close\r\n\r\n{why}".encode())
        self.transport.close()
