"""A real gateway on a loopback port, with an engine that answers from a script."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette

from leyden import run_file
from leyden.client import ControlClient, control_key
from leyden.config import RunConfig
from leyden.gateway.app import build
from leyden.gateway.bounded_http import BoundedHttp
from leyden.gateway.engines import GenerateRequest
from leyden.gateway.render import ModelRenderer
from leyden.types import FinishReason, Generation, VersionSpan

SECRET = b"s" * 32


LIMIT_S = 60.0


async def until(condition: Callable[[], bool]) -> None:
    """Return when `condition` holds. The limit is for what never happens."""
    async with asyncio.timeout(LIMIT_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


@asynccontextmanager
async def listening(
    handler: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]], host: str = "127.0.0.1"
) -> AsyncIterator[str]:
    """The URL of a server. Its own context would wait for every connection from Python 3.12 on; this one does not."""
    server = await asyncio.start_server(handler, host, 0)
    try:
        port = server.sockets[0].getsockname()[1]
        yield f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    finally:
        server.close()


async def forever() -> None:
    await asyncio.Event().wait()


async def at_once() -> None:
    """Nothing is waited for."""


@dataclass
class ScriptedEngine:
    """Answers texts in turn, as ids; `spell` chooses the tokenisation. Everything asked is kept in `requests`, and
    answered when what was `before` it then is over.
    """

    renderer: ModelRenderer
    replies: list[str | Generation | Exception] = field(default_factory=list)
    requests: list[GenerateRequest] = field(default_factory=list)
    before: Callable[[], Awaitable[None]] = at_once
    version: int = 0
    cancelled: int = 0
    spell: Callable[[str], list[int]] | None = None

    async def generate(self, url: str, request: GenerateRequest) -> Generation:
        self.requests.append(request)
        number = len(self.requests)
        try:
            await self.before()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        reply = self.replies.pop(0) if self.replies else f"reply {number}"
        if isinstance(reply, Exception):
            raise reply
        return reply if isinstance(reply, Generation) else self.generation(reply)

    async def health(self, url: str) -> None:
        """It works."""

    def generation(self, text: str, **changes: Any) -> Generation:
        ids = [*self.ids(text), self.renderer.stop_token_ids[0]]
        spans = (VersionSpan(self.version, len(ids)),)
        return Generation(ids, [-0.5] * len(ids), FinishReason.STOP, spans, **changes)

    def ids(self, text: str) -> list[int]:
        if self.spell is not None:
            return self.spell(text)
        encoded: list[int] = self.renderer._tokenizer.encode(text, add_special_tokens=False)
        return encoded


@dataclass
class Gateway:
    """A running gateway and what a test needs around it."""

    url: str
    app: Starlette
    engine: ScriptedEngine
    renderer: ModelRenderer
    client: ControlClient
    config: RunConfig
    slot: int = 0
    sent: list[int] = field(default_factory=list)

    async def kept_alive(self) -> None:
        """Return when callers that wait have had two signs of life."""
        before = sum(self.sent)
        await until(lambda: sum(self.sent) >= before + 2)

    async def counted(self, scope: Any, receive: Any, send: Any) -> None:
        """The application; `sent` says of each model call how many pieces of its answer have left."""
        if scope["type"] != "http" or "/v1" not in scope["path"]:
            await self.app(scope, receive, send)
            return
        number = len(self.sent)
        self.sent.append(0)

        async def counting(message: Any) -> None:
            await send(message)
            self.sent[number] += message["type"] == "http.response.body"

        await self.app(scope, receive, counting)

    async def start_rollout(self, kind: str = "train", **group: Any) -> tuple[str, str]:
        """A running rollout: its id and its agent key."""
        self.slot += 1
        spec = {"kind": kind, "step": 1, "slot": self.slot, "size": 1, "task": {"n": self.slot}, **group}
        (made,) = await self.client.create_groups([spec])
        claim = await self.client.claim(made.rollouts[0].rollout_id, "test")
        return claim.rollout.rollout_id, claim.agent_key

    async def turns(self, rollout_id: str) -> list[Any]:
        return await self.client.turns([rollout_id])


def make_config(tmp_path: Path, model: Path, /, **sections: Any) -> RunConfig:
    document: dict[str, Any] = {
        "run_dir": str(tmp_path / "run"),
        "model": {"path": str(model), "renderer": "qwen3", "context_tokens": 2000},
        "data": {"train": "train.jsonl"},
        "harness": {"command": ["true"]},
        "grader": {"command": ["true"]},
    }
    for name, section in sections.items():
        document[name] = document.get(name, {}) | section
    return run_file.absolute(run_file.parse(document), tmp_path)


class Server(uvicorn.Server):
    """uvicorn looks ten times a second for what it waits for, which hundreds of tests would pay; this one is told to
    end, and then looks more often.
    """

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.end = asyncio.Event()

    async def main_loop(self) -> None:
        await self.on_tick(0)
        await self.end.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        listeners: list[Any] = [*self.servers, *(sockets or [])]
        for listener in listeners:
            listener.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        try:
            async with asyncio.timeout(self.config.timeout_graceful_shutdown):
                while self.server_state.connections or self.server_state.tasks:  # noqa: ASYNC110
                    await asyncio.sleep(0.002)
        except TimeoutError:
            for task in self.server_state.tasks:
                task.cancel()
        await self.lifespan.shutdown()


@asynccontextmanager
async def serving(
    config: RunConfig,
    renderer: ModelRenderer,
    *,
    engine: ScriptedEngine | None = None,
    keep_alive_s: float = 10.0,
    port: int = 0,
    engine_key: str | None = None,
) -> AsyncIterator[Gateway]:
    """With `engine.urls` in `config` those are asked, else a scripted engine."""
    config.run_dir.mkdir(exist_ok=True)
    engine = engine or ScriptedEngine(renderer)
    asked = None if config.engine.urls else engine
    app = build(config, SECRET, renderer=renderer, engine=asked, engine_key=engine_key, keep_alive_s=keep_alive_s)
    listener = socket.create_server(("127.0.0.1", port))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    client = ControlClient(url, control_key(SECRET))
    gateway = Gateway(url, app, engine, renderer, client, config)
    options: Any = {
        "interface": "asgi3",
        "http": BoundedHttp,
        "log_config": None,
        "access_log": False,
        "timeout_graceful_shutdown": 1,
    }
    server = Server(uvicorn.Config(gateway.counted, **options))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        async with client:
            if asked is not None:
                await client.put_model("policy", engines=["scripted"], version=0, lineage="l", context_tokens=2000)
            yield gateway
    finally:
        server.end.set()
        await task


@pytest.fixture(scope="session")
def renderer(tokenizer_path: Path) -> ModelRenderer:
    return ModelRenderer(str(tokenizer_path), "qwen3", "template")


@pytest.fixture
async def gateway(tmp_path: Path, tokenizer_path: Path, renderer: ModelRenderer) -> AsyncIterator[Gateway]:
    async with serving(make_config(tmp_path, tokenizer_path), renderer) as running:
        yield running
