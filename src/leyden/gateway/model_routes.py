"""The routes that harnesses call. One ASGI endpoint serves any protocol: parse, answer, reply.

The answer is sent when it is committed. Until then the caller sees nothing for `KEEP_ALIVE_S`, so that errors keep
their status; after that bytes that SDKs skip: the protocol's own in a stream, blanks before a JSON body. A caller that
hangs up cancels its call.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from urllib.parse import parse_qsl

import orjson
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from leyden.errors import LeydenError, RequestError, Unauthorized
from leyden.gateway.attempts import Delivery
from leyden.gateway.auth import authenticate
from leyden.gateway.http import ClientGone, parse_object, read_body, send_json, start
from leyden.gateway.turn import TurnService
from leyden.protocols import Call, ChatReply, ChatRequest, WireProtocol, openai_chat
from leyden.protocols.chat import CountProtocol
from leyden.types import Claims, Json
from leyden.types import Scope as KeyScope

KEEP_ALIVE_S = 10.0
BLANK = b" "


@dataclass(frozen=True, slots=True)
class Limits:
    """What holds for every route that harnesses call."""

    secret: bytes
    max_body_bytes: int
    keep_alive_s: float


class ModelEndpoint:
    """POST of one protocol, as an ASGI application."""

    def __init__(self, protocol: WireProtocol, turns: TurnService, limits: Limits) -> None:
        self._protocol = protocol
        self._turns = turns
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            claims, body, request = await _read(self._protocol.parse, self._turns, self._limits, scope, receive)
        except ClientGone:
            return
        except RequestError as error:
            await send_json(send, error.status, self._protocol.error(error))
            return
        retried = Headers(scope=scope).get("x-stainless-retry-count", "0") not in ("", "0")
        work = asyncio.create_task(self._turns.answer(claims, request, retried=retried, wire=body))
        gone = asyncio.create_task(_hang_up(receive))
        try:
            await self._deliver(request, work, gone, send)
        except asyncio.CancelledError:
            if not self._turns.closing:
                raise
        finally:
            gone.cancel()
            work.cancel()
            with contextlib.suppress(asyncio.CancelledError, LeydenError):
                await work

    async def _deliver(
        self, request: ChatRequest, work: asyncio.Task[Delivery], gone: asyncio.Task[None], send: Send
    ) -> None:
        kind = b"text/event-stream" if request.stream else b"application/json"
        started = False
        while True:
            timeout = self._limits.keep_alive_s
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
            delivery = work.result()
        except RequestError as error:
            await self._fail(request, error, send, started=started)
            return
        assert delivery.reply is not None
        content = self._content(delivery.reply, request)
        if not started:
            await start(send, 200, kind, len(content))
        await send({"type": "http.response.body", "body": content})
        delivery.cut = gone.done()

    def _content(self, reply: ChatReply, request: ChatRequest) -> bytes:
        if request.stream:
            return b"".join(self._protocol.stream(reply, request))
        return orjson.dumps(self._protocol.reply(reply, request))

    async def _fail(self, request: ChatRequest, error: RequestError, send: Send, *, started: bool) -> None:
        """With its status where none was sent; in the stream; else by cutting the answer, so that the SDK tries again
        and then gets the status."""
        if not started:
            await send_json(send, error.status, self._protocol.error(error))
        elif request.stream:
            await send({"type": "http.response.body", "body": self._protocol.stream_error(error)})
        else:
            raise ConnectionAbortedError(str(error))


class CountEndpoint:
    """POST of a request whose prompt is only counted."""

    def __init__(self, protocol: CountProtocol, turns: TurnService, limits: Limits) -> None:
        self._protocol = protocol
        self._turns = turns
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            claims, _body, request = await _read(self._protocol.parse_count, self._turns, self._limits, scope, receive)
            await send_json(send, 200, self._protocol.count(self._turns.count(claims, request)))
        except ClientGone:
            return
        except RequestError as error:
            await send_json(send, error.status, self._protocol.error(error))


class ModelList:
    """GET /v1/models."""

    def __init__(self, secret: bytes, name: str) -> None:
        self._secret = secret
        self._name = name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            authenticate(Headers(scope=scope), self._secret, {KeyScope.AGENT, KeyScope.CONTROL})
            answer: Json = openai_chat.models([self._name])
            await send_json(send, 200, answer)
        except RequestError as error:
            await send_json(send, error.status, openai_chat.error(error))


async def _read(
    parse: Callable[[Json, Call], ChatRequest], turns: TurnService, limits: Limits, scope: Scope, receive: Receive
) -> tuple[Claims, Json, ChatRequest]:
    """Who calls, the body, and the request that it holds. Raises RequestError, or ClientGone."""
    claims = authenticate(Headers(scope=scope), limits.secret, {KeyScope.AGENT})
    path = scope.get("path_params", {})
    _check_path(path, claims.rollout_id)
    body = parse_object(await read_body(scope, receive, limits.max_body_bytes))
    query = dict(parse_qsl(scope.get("query_string", b"").decode("latin-1")))
    return claims, body, parse(body, Call(path, turns.recall(claims), query))


def _check_path(path: Mapping[str, str], rollout_id: str) -> None:
    """`/rollouts/ID/...` must name the key's own rollout."""
    named = path.get("rollout_id")
    if named is not None and named != rollout_id:
        raise Unauthorized(f"this key belongs to another rollout than {named!r}", forbidden=True)


async def _hang_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
