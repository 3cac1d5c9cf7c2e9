"""HTTP/1.1 to engines with little work per call: kept connections, one request and one whole answer at a time.

A general client costs a call of the gateway more than everything else that it does. What this one leaves out: proxies,
redirects, cookies, compression, pipelining, limits.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, cast
from urllib.parse import urlsplit

import httptools

CONNECT_S = 10.0


class NotSent(Exception):
    """What was to be sent must not be, by the time that there is a connection for it."""


class Answer(NamedTuple):
    """`retry_after` is the header, if there was one."""

    status: int
    body: bytes
    retry_after: str | None


class Connections:
    """Raises OSError, of which TimeoutError is one, where there is no whole answer. A call that is cancelled closes its
    connection. Idle connections are not used again after `idle_s`. `key` goes with every request.
    """

    def __init__(self, idle_s: float, key: str | None = None) -> None:
        self._idle_s = idle_s
        self._authorization = "" if key is None else f"authorization: Bearer {key}\r\n"
        self._idle: dict[str, deque[_EngineConnection]] = {}
        self._origins: dict[str, _Origin] = {}

    async def request(
        self, method: str, url: str, path: str, body: bytes = b"", *, still: Callable[[], bool] = lambda: True
    ) -> Answer:
        """The answer to one request for `path` under the base URL `url`. Raises NotSent, with nothing sent, if `still`
        says no once the connection is there.
        """
        origin = self._origins.get(url)
        if origin is None:
            origin = self._origins[url] = _Origin.of(url)
        connection = self._take(url) or await origin.connect()
        if not still():
            self._keep(url, connection)
            raise NotSent
        try:
            answer = await connection.send(origin.head(method, path, len(body), self._authorization) + body)
        except BaseException:
            connection.close()
            raise
        if connection.reusable:
            self._keep(url, connection)
        else:
            connection.close()
        return answer

    def close(self) -> None:
        for connections in self._idle.values():
            for connection in connections:
                connection.close()
        self._idle.clear()

    def _take(self, url: str) -> _EngineConnection | None:
        """The connection that was used last, if the engine may still hold it."""
        idle = self._idle.get(url)
        while idle:
            connection = idle.pop()
            if connection.reusable and time.monotonic() - connection.idle_since < self._idle_s:
                return connection
            connection.close()
        return None

    def _keep(self, url: str, connection: _EngineConnection) -> None:
        """For the next call. What has been idle for too long goes."""
        now = time.monotonic()
        idle = self._idle.setdefault(url, deque())
        connection.idle_since = now
        idle.append(connection)
        while now - idle[0].idle_since > self._idle_s:
            idle.popleft().close()


class _Origin(NamedTuple):
    host: str
    port: int
    tls: ssl.SSLContext | None
    netloc: str
    base: str

    @classmethod
    def of(cls, url: str) -> _Origin:
        parts = urlsplit(url)
        tls = ssl.create_default_context() if parts.scheme == "https" else None
        return cls(parts.hostname or "", parts.port or (443 if tls else 80), tls, parts.netloc, parts.path)

    def head(self, method: str, path: str, length: int, authorization: str) -> bytes:
        return (
            f"{method} {self.base}{path} HTTP/1.1\r\nhost: {self.netloc}\r\naccept: */*\r\n{authorization}"
            f"content-type: application/json\r\ncontent-length: {length}\r\n\r\n"
        ).encode()

    async def connect(self) -> _EngineConnection:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(CONNECT_S):
            _, connection = await loop.create_connection(_EngineConnection, self.host, self.port, ssl=self.tls)
        return connection


class _EngineConnection(asyncio.Protocol):
    """Methods `on_*` are what httptools calls. A body ends by its length, by its last chunk, or, where it has neither,
    with the connection.
    """

    def __init__(self) -> None:
        self.idle_since = 0.0
        self._parser = httptools.HttpResponseParser(self)
        self._answer: asyncio.Future[Answer] | None = None
        self._parts: list[bytes] = []
        self._retry_after: str | None = None
        self._begun = False
        self._has_end = False
        self._ends_with_connection = False
        self._closed = False

    @property
    def reusable(self) -> bool:
        return not self._closed and self._answer is None

    def send(self, data: bytes) -> asyncio.Future[Answer]:
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(data)
        return self._answer

    def close(self) -> None:
        self._closed = True
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._answer is None:  # nobody asked: the next call must not take it for its answer
            self.close()
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(f"it does not speak HTTP: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is None and self._ends_with_connection:
            self._complete()
        where = "in the middle of" if self._begun else "before"
        self._fail(f"the connection closed {where} the answer" + (f": {exc}" if exc else ""))

    def on_message_begin(self) -> None:
        self._begun, self._has_end = True, False
        self._parts, self._retry_after = [], None
        self._closed = self._closed or self._answer is None  # a second answer to one request

    def on_header(self, name: bytes, value: bytes) -> None:
        match name.lower():
            case b"retry-after":
                self._retry_after = value.decode("latin-1")
            case b"content-length":
                self._has_end = True
            case b"transfer-encoding" if b"chunked" in value.lower():
                self._has_end = True

    def on_headers_complete(self) -> None:
        self._ends_with_connection = not self._has_end

    def on_body(self, data: bytes) -> None:
        self._parts.append(data)

    def on_message_complete(self) -> None:
        self._ends_with_connection = False
        if self._parser.get_status_code() >= 200:
            self._closed = self._closed or not self._parser.should_keep_alive()
            self._complete()

    def _complete(self) -> None:
        answer = Answer(self._parser.get_status_code(), b"".join(self._parts), self._retry_after)
        waiting, self._answer = self._answer, None
        self._begun, self._parts = False, []
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    def _fail(self, problem: str) -> None:
        self._closed = True
        waiting, self._answer = self._answer, None
        if waiting is not None and not waiting.done():
            waiting.set_exception(ConnectionResetError(problem))
        self._transport.abort()
