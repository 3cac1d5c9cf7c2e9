"""The routes that harnesses call. One ASGI endpoint serves any protocol: parse, answer, reply.

The answer is sent when it is committed. Until then the caller sees nothing for `KEEP_ALIVE_S`, so that errors keep
their status; after that bytes that SDKs skip: the protocol's own in a stream, blanks before a JSON body. A caller that
hangs up cancels its call.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from urllib.parse import parse_qsl

import orjson
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from leyden.errors import InternalError, RequestError, Unauthorized
from leyden.gateway.attempts import Attempt, Delivery
from leyden.gateway.auth import authenticate
from leyden.gateway.http import (
    ClientGone,
    content_encoding,
    decoded,
    is_retry,
    parse_object,
    read_body,
    send_json,
    start,
)
from leyden.gateway.metrics import Metrics
from leyden.gateway.turn import Asked, TurnService
from leyden.gateway.workers import Workers
from leyden.protocols import Call, ChatRequest, WireProtocol
from leyden.protocols.chat import CountProtocol, ListProtocol
from leyden.types import Claims, Json
from leyden.types import Scope as KeyScope

KEEP_ALIVE_S = 10.0
BLANK = b" "


@dataclass(frozen=True, slots=True)
class Entry:
    """What every route that harnesses call shares: who may call, how large a body may be, what becomes of errors."""

    secret: bytes
    max_body_bytes: int
    keep_alive_s: float
    turns: TurnService
    metrics: Metrics
    workers: Workers

    def caller(self, scope: Scope, protocol: WireProtocol) -> Claims:
        """The claims of the agent key. Raises Unauthorized."""
        return _caller(scope, self.secret, {KeyScope.AGENT}, protocol.KEY_PARAMETER)

    async def read(
        self, scope: Scope, receive: Receive, attempt: Attempt, parse: Callable[[Json, Call], ChatRequest]
    ) -> Asked:
        """The call that the body holds. Raises RequestError, or ClientGone."""
        query = {name: value for name, value in _query(scope).items() if name != "key"}
        call = Call(scope.get("path_params", {}), self.turns.recall(attempt), query)
        encoding = content_encoding(scope)
        async with attempt.reading:
            raw = await read_body(scope, receive, self.max_body_bytes)
            size = len(raw) if encoding is None else self.max_body_bytes
            return await self.workers.run(attempt, size, partial(self._asked, raw, encoding, call, parse))

    def _asked(self, raw: bytes, encoding: str | None, call: Call, parse: Callable[[Json, Call], ChatRequest]) -> Asked:
        raw = decoded(raw, encoding, self.max_body_bytes)
        body = parse_object(raw, self.metrics)
        return self.turns.asked(body, replace(parse(body, call), body_bytes=len(raw)))

    def problem(self, error: Exception, claims: Claims | None) -> RequestError:
        """What the caller hears of an error."""
        if not isinstance(error, RequestError):
            self.turns.attempts.broken(claims, error)
            error = InternalError(f"the gateway failed on this call ({type(error).__name__}); its log says where")
        self.metrics.refused.labels(error.code).inc()
        self.turns.attempts.refused(claims, error)
        return error


class ModelEndpoint:
    """POST of one protocol, as an ASGI application."""

    def __init__(self, protocol: WireProtocol, entry: Entry) -> None:
        self._protocol = protocol
        self._entry = entry
        self._turns = entry.turns

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        claims = None
        try:
            claims = self._entry.caller(scope, self._protocol)
            attempt = self._turns.attempts.get(claims)
            asked = await self._entry.read(scope, receive, attempt, self._protocol.parse)
        except ClientGone:
            return
        except Exception as error:
            problem = self._entry.problem(error, claims)
            await send_json(send, problem.status, self._protocol.error(problem))
            return
        work = asyncio.create_task(self._answer(attempt, asked, retried=is_retry(scope)))
        gone = asyncio.create_task(_hang_up(receive))
        try:
            await self._deliver(claims, asked.request, work, gone, send)
        except asyncio.CancelledError:
            if not self._turns.closing:
                raise
        finally:
            gone.cancel()
            work.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await work

    async def _answer(self, attempt: Attempt, asked: Asked, *, retried: bool) -> tuple[Delivery, bytes]:
        """The delivery, and the bytes that say it."""
        delivery = await self._turns.answer(attempt, asked, retried=retried)
        spell = partial(self._spelled, delivery, asked.request)
        try:
            return delivery, await self._entry.workers.run(attempt, asked.request.body_bytes, spell)
        except asyncio.CancelledError:
            delivery.cut = True
            raise

    def _spelled(self, delivery: Delivery, request: ChatRequest) -> bytes:
        assert delivery.reply is not None
        if request.stream:
            return b"".join(self._protocol.stream(delivery.reply, request))
        return orjson.dumps(self._protocol.reply(delivery.reply, request))

    async def _deliver(
        self,
        claims: Claims,
        request: ChatRequest,
        work: asyncio.Task[tuple[Delivery, bytes]],
        gone: asyncio.Task[None],
        send: Send,
    ) -> None:
        kind = b"text/event-stream" if request.stream else b"application/json"
        started = False
        while True:
            timeout = self._entry.keep_alive_s
            await asyncio.wait({work, gone}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                break
            if gone.done():
                return
            if not started:
                await start(send, 200, kind)
                started = True
            filler = self._protocol.KEEP_ALIVE if request.stream else BLANK
            await send({"type": "http.response.body", "body": filler, "more_body": True})
        try:
            delivery, content = _result(work)
        except Exception as error:
            await self._fail(request, self._entry.problem(error, claims), send, started=started)
            return
        if not started:
            await start(send, 200, kind, len(content))
        await send({"type": "http.response.body", "body": content, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": True})  # waits until most of it has left
        delivery.cut = gone.done()
        await send({"type": "http.response.body", "body": b""})

    async def _fail(self, request: ChatRequest, error: RequestError, send: Send, *, started: bool) -> None:
        """With its status where none was sent; in the stream; else by cutting the answer, so that the SDK tries again
        and then gets the status."""
        if not started:
            await send_json(send, error.status, self._protocol.error(error))
        elif request.stream:
            await send({"type": "http.response.body", "body": self._protocol.stream_error(error)})


class CountEndpoint:
    """POST of a request whose prompt is only counted."""

    def __init__(self, protocol: CountProtocol, entry: Entry) -> None:
        self._protocol = protocol
        self._entry = entry

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        claims = None
        try:
            claims = self._entry.caller(scope, self._protocol)
            attempt = self._entry.turns.attempts.get(claims)
            asked = await self._entry.read(scope, receive, attempt, self._protocol.parse_count)
            await send_json(send, 200, self._protocol.count(await self._entry.turns.count(attempt, asked.request)))
        except ClientGone:
            return
        except Exception as error:
            problem = self._entry.problem(error, claims)
            await send_json(send, problem.status, self._protocol.error(problem))


class ModelList:
    """GET of the models that are served: the one of the run."""

    def __init__(self, protocol: ListProtocol, entry: Entry, name: str) -> None:
        self._protocol = protocol
        self._entry = entry
        self._name = name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            claims = _caller(
                scope, self._entry.secret, {KeyScope.AGENT, KeyScope.CONTROL}, self._protocol.KEY_PARAMETER
            )
            if claims.scope is KeyScope.AGENT:
                self._entry.turns.attempts.get(claims)
            await send_json(send, 200, self._protocol.models([self._name]))
        except RequestError as error:
            await send_json(send, error.status, self._protocol.error(error))


def _caller(scope: Scope, secret: bytes, scopes: Collection[KeyScope], parameter: str | None) -> Claims:
    """The claims of a key. On `/rollouts/ID/...`, an agent's must be for that rollout. Raises Unauthorized."""
    in_query = _query(scope).get(parameter) if parameter else None
    claims = authenticate(Headers(scope=scope), secret, scopes, in_query=in_query)
    named = scope.get("path_params", {}).get("rollout_id", claims.rollout_id)
    if claims.scope is KeyScope.AGENT and named != claims.rollout_id:
        raise Unauthorized(f"this key belongs to another rollout than {named!r:.80}", forbidden=True)
    return claims


def _result(work: asyncio.Task[tuple[Delivery, bytes]]) -> tuple[Delivery, bytes]:
    if work.cancelled():
        raise RequestError("the call was given up: a later try took its place, or its attempt ended", code="gone")
    return work.result()


def _query(scope: Scope) -> dict[str, str]:
    return dict(parse_qsl(scope.get("query_string", b"").decode("latin-1")))


async def _hang_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
