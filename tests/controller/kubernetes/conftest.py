"""An API server of a few lines that does what the test's script says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from leyden.controller.backends.kubernetes.api import KubernetesApi

Step = Callable[[web.Request], Awaitable[web.StreamResponse]]


class FakeApiServer:
    """Answers lists and watches with the next step of `lists` and `watches` (the last one again and again), other
    calls with those of `calls`. `asked` is the query of each list and watch."""

    def __init__(self) -> None:
        self.lists: list[Step] = []
        self.watches: list[Step] = []
        self.calls: list[Step] = []
        self.asked: list[dict[str, str]] = []
        self.bodies: list[Any] = []

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.method != "GET":
            self.bodies.append((request.method, request.path, json.loads(await request.read() or b"null")))
            return await _next(self.calls)(request)
        self.asked.append(dict(request.query))
        return await _next(self.watches if "watch" in request.query else self.lists)(request)


def _next(steps: list[Step]) -> Step:
    return steps.pop(0) if len(steps) > 1 else steps[0]


def thing(name: str, version: int, **more: Any) -> dict[str, Any]:
    return {"metadata": {"name": name, "uid": f"uid-{name}", "resourceVersion": str(version)}, **more}


def items(version: int, *found: dict[str, Any], token: str = "") -> Step:
    metadata = {"resourceVersion": str(version)} | ({"continue": token} if token else {})
    return reply(200, {"metadata": metadata, "items": list(found)})


def reply(status: int, body: Any) -> Step:
    async def step(_: web.Request) -> web.StreamResponse:
        return web.json_response(body, status=status)

    return step


def refusal(status: int, message: str, reason: str = "") -> Step:
    return reply(status, {"kind": "Status", "code": status, "message": message, "reason": reason})


def stream(*events: tuple[str, dict[str, Any]] | bytes, then: str = "end") -> Step:
    """A watch with these events; then it ends, goes `silent`, or is `cut`."""

    async def step(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for event in events:
            line = event if isinstance(event, bytes) else json.dumps({"type": event[0], "object": event[1]}).encode()
            await response.write(line + b"\n" if not isinstance(event, bytes) else line)
        if then == "silent":
            await asyncio.sleep(3600)
        if then == "cut" and request.transport is not None:
            request.transport.abort()
        return response

    return step


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[FakeApiServer]:
    fake = FakeApiServer()
    app = web.Application()
    app.router.add_route("*", "/{tail:.*}", fake.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    (tmp_path / "kubeconfig").write_text(
        json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{runner.addresses[0][1]}"}}],
                "users": [{"name": "u", "user": {"token": "CANARY-token"}}],
                "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u", "namespace": "runs"}}],
                "current-context": "x",
            }
        )
    )
    yield fake
    await runner.cleanup()


@pytest.fixture
async def api(server: FakeApiServer, tmp_path: Path) -> AsyncIterator[KubernetesApi]:
    async with await KubernetesApi.connect(kubeconfig=tmp_path / "kubeconfig") as it:
        yield it
