"""A server that answers as vLLM 0.32 does on the routes that the gateway uses, from a script; `/generate` is that of
Leyden's own contract.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Json = dict[str, Any]
Answer = Json | Callable[[web.Request, Json], Awaitable[web.StreamResponse]]
PROBE_IDS, PROBE_CHAT = [1, 2, 3, 4, 5, 6, 7, 8], [{"role": "user", "content": "hi"}]
OWN = "/generate"


def generated(ids: list[int], **changes: Any) -> Json:
    """An answer of /inference/v1/generate; `changes` are of its choice."""
    choice = {
        "index": 0,
        "token_ids": ids,
        "logprobs": {"content": [{"token_id": i, "logprob": -0.5, "rank": 1} for i in ids]},
        "finish_reason": "stop",
        "stop_reason": None,
        "weight_versions": [{"version": "default", "start": 0, "end": len(ids)}] if ids else [],
    }
    return {"request_id": "r", "choices": [choice | changes]}


def own(ids: list[int], **changes: Any) -> Json:
    """An answer of Leyden's own contract."""
    spans = [[0, len(ids)]] if ids else []
    return {"token_ids": ids, "logprobs": [-0.5] * len(ids), "finish_reason": "stop", "spans": spans} | changes


def completed(ids: list[int], **changes: Any) -> Json:
    """An answer of /v1/completions."""
    choice = {
        "index": 0,
        "text": "text",
        "token_ids": ids,
        "logprobs": {"tokens": [f"token_id:{i}" for i in ids], "token_logprobs": [-0.5] * len(ids)},
        "finish_reason": "stop",
        "stop_reason": None,
    }
    return {"id": "c", "choices": [choice | changes]}


def chatted(prompt_ids: list[int] | None, ids: list[int], message: Json | None = None, **changes: Any) -> Json:
    """An answer of /v1/chat/completions."""
    content = [{"token": f"token_id:{i}", "logprob": -0.5, "bytes": [1], "top_logprobs": []} for i in ids]
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": None, "reasoning": None} | (message or {"content": "hello"}),
        "token_ids": ids,
        "logprobs": {"content": content},
        "finish_reason": "stop",
        "stop_reason": None,
    }
    return {"id": "c", "prompt_token_ids": prompt_ids, "choices": [choice | changes]}


def refused(status: int, message: str = "no", **headers: str) -> Answer:
    async def answer(_request: web.Request, _body: Json) -> web.StreamResponse:
        return web.json_response({"error": {"message": message, "code": status}}, status=status, headers=headers)

    return answer


def raw(text: str) -> Answer:
    """A 200 whose body is no strict JSON."""

    async def answer(_request: web.Request, _body: Json) -> web.StreamResponse:
        return web.Response(text=text, content_type="application/json")

    return answer


async def cut_before(request: web.Request, _body: Json) -> web.StreamResponse:
    """The connection closes without a byte."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def cut_within(request: web.Request, _body: Json) -> web.StreamResponse:
    """The connection closes in the middle of the answer."""
    response = web.StreamResponse(headers={"content-type": "application/json", "content-length": "1000"})
    await response.prepare(request)
    await response.write(b'{"choices": [')
    assert request.transport is not None
    request.transport.abort()
    return response


def is_probe(body: Json) -> bool:
    ids = body.get("token_ids", body.get("prompt", body.get("prompt_ids")))
    return ids in (PROBE_IDS, [1]) or body.get("messages") == PROBE_CHAT


@dataclass
class FakeVllm:
    """`script` is answered in order, then `default`. `asked` holds path and body of every call but the probes."""

    url: str = ""
    script: list[Answer] = field(default_factory=list)
    default: Answer = field(default_factory=lambda: generated([300, 301, 2]))
    missing: set[str] = field(default_factory=set)
    probe_logprob: float | None = 0.0
    probe_answer: Answer | None = None
    max_model_len: int = 4096
    healthy: bool = True
    denied: int | None = None
    key: str | None = None
    keys: set[str | None] = field(default_factory=set)
    asked: list[tuple[str, Json]] = field(default_factory=list)
    probes: int = 0
    peak: int = 0
    open: int = 0
    cancelled: int = 0
    arrived: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def bodies(self) -> list[Json]:
        return [body for _, body in self.asked]

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """What vLLM does where it was started with `--api-key`; it repeats what it refuses."""
        given = request.headers.get("authorization")
        self.keys.add(given)
        if self.key is not None and given != f"Bearer {self.key}":
            return web.json_response({"error": {"message": f"no such key: {given}"}}, status=401)
        response: web.StreamResponse = await handler(request)
        return response

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._guard])
        for path in (OWN, "/inference/v1/generate", "/v1/completions", "/v1/chat/completions", "/tokenize"):
            app.router.add_post(path, self._post)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        return app

    async def _post(self, request: web.Request) -> web.StreamResponse:
        if request.path in self.missing:
            return web.json_response({"detail": "Not Found"}, status=404)
        if self.denied:
            return web.json_response({"error": "Unauthorized"}, status=self.denied)
        body = await request.json()
        if is_probe(body):
            self.probes += 1
            probe = self.probe_answer or self._probe(request.path)
            return web.json_response(probe) if isinstance(probe, dict) else await probe(request, body)
        self.asked.append((request.path, body))
        self.arrived.set()
        self.open += 1
        self.peak = max(self.peak, self.open)
        try:
            answer = self.script.pop(0) if self.script else self.default
            return web.json_response(answer) if isinstance(answer, dict) else await answer(request, body)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.open -= 1

    def _probe(self, path: str) -> Json:
        if path == OWN:
            answer = own([5])
        elif path == "/v1/chat/completions":
            answer = chatted([9], [5])
            answer["choices"][0]["logprobs"]["content"][0]["logprob"] = self.probe_logprob
        elif path == "/v1/completions":
            answer = completed([5])
            answer["choices"][0]["logprobs"]["token_logprobs"] = [self.probe_logprob]
        else:
            answer = generated([5])
            answer["choices"][0]["logprobs"]["content"][0]["logprob"] = self.probe_logprob
        return json.loads(json.dumps(answer))

    async def _health(self, _request: web.Request) -> web.StreamResponse:
        return web.Response(status=200 if self.healthy else 503)

    async def _models(self, _request: web.Request) -> web.StreamResponse:
        return web.json_response({"data": [{"id": "tiny", "max_model_len": self.max_model_len}]})


@asynccontextmanager
async def listening(fake: FakeVllm, *, port: int = 0, idle_s: float = 75.0) -> AsyncIterator[FakeVllm]:
    """Serve `fake` on loopback. A handler is cancelled when its caller hangs up, as vLLM's are."""
    runner = web.AppRunner(fake.app(), handler_cancellation=True, keepalive_timeout=idle_s, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    assert site._server is not None
    fake.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[attr-defined]
    try:
        yield fake
    finally:
        await runner.cleanup()
