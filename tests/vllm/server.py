"""A vLLM server of the tests' own, and a relay in front of it that can lack routes or be closed."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
from aiohttp import web

from tests.set_up import EVERY_S, SetUpFailed, say
from tests.vllm.model import CONTEXT_TOKENS

T = TypeVar("T")
START_S = 600.0
KEY = "key-of-the-engine"
OPTIONS = (
    *("--dtype", "float32", "--max-model-len", str(CONTEXT_TOKENS), "--max-num-seqs", "64", "--enforce-eager"),
    *("--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--api-key", KEY),
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3"),
)
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


@contextmanager
def serving_vllm(python: Path, model: Path, log: Path) -> Iterator[str]:
    """The URL of a server that answers. `vllm serve` needs metadata that vllm-cpu lacks; the module does without."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port), *OPTIONS]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=os.environ | ENVIRONMENT, start_new_session=True
        )
    url = f"http://127.0.0.1:{port}"
    try:
        with _guard(process.pid):
            _wait_until_up(url, process, log)
            yield url
    finally:
        _end(process)


@contextmanager
def _guard(group: int) -> Iterator[None]:
    """Ends the server's processes also when this one is killed: then the guard's input ends."""
    command = f"cat > /dev/null; kill -s KILL -- -{group}"
    with subprocess.Popen(["sh", "-c", command], stdin=subprocess.PIPE, start_new_session=True) as guard:
        try:
            yield
        finally:
            guard.kill()


def _wait_until_up(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    began = shown = time.monotonic()
    while True:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except OSError:
            if process.poll() is not None or time.monotonic() > began + START_S:
                tail = log.read_text(errors="replace")[-3000:]
                after = f"{time.monotonic() - began:.0f} of {START_S:g} s"
                raise SetUpFailed(f"no answer after {after}; its log ends:\n{tail}") from None
            time.sleep(0.2)
            if time.monotonic() > shown + EVERY_S:
                shown = time.monotonic()
                say(f"vLLM: {shown - began:.0f} s")


def _end(process: subprocess.Popen[bytes]) -> None:
    """The server and the processes that it started."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(20)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class Vllm:
    """What the tests ask of a server beside the gateway."""

    def __init__(self, url: str) -> None:
        self.url = url

    async def post(self, path: str, body: Any = None) -> Any:
        headers = {"authorization": f"Bearer {KEY}"}
        async with (
            aiohttp.ClientSession(headers=headers) as session,
            session.post(self.url + path, json=body) as response,
        ):
            assert response.status == 200, await response.text()
            return await response.json() if response.content_type == "application/json" else None

    async def metric(self, name: str) -> float:
        async with aiohttp.ClientSession() as session, session.get(f"{self.url}/metrics") as response:
            text = await response.text()
        return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name))

    async def running(self) -> float:
        return await self.metric("vllm:num_requests_running{")

    async def at_work(self, start: Callable[[], Coroutine[Any, Any, T]]) -> asyncio.Task[T]:
        """A call that the server works on; one that a stop token ended at once is started again."""
        calling = asyncio.create_task(start())
        async with asyncio.timeout(60):
            while await self.running() == 0:
                if calling.done():
                    calling = asyncio.create_task(start())
                await asyncio.sleep(0.02)
        return calling

    async def load(self, folder: Path, version: int) -> None:
        """Other weights, which no token of the old ones' cache outlives."""
        await self.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})
        await self.post("/reset_prefix_cache")
        await self.post("/update_weight_version", {"new_version": str(version)})


@dataclass
class Relay:
    """Where a relay listens, and how many generations are open there or were answered."""

    port: int = 0
    open: int = 0
    answered: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@asynccontextmanager
async def relay(upstream: str, *, missing: frozenset[str] = frozenset(), port: int = 0) -> AsyncIterator[Relay]:
    """A second way to a server, without the routes of `missing`. Whoever hangs up here hangs up there."""
    state = Relay()
    limits = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=limits) as session:

        async def forward(request: web.Request) -> web.Response:
            if request.path in missing:
                return web.json_response({"detail": "Not Found"}, status=404)
            body = await request.read()
            headers = {"content-type": request.headers.get("content-type", "application/json")}
            headers |= {name: request.headers[name] for name in ("authorization",) if name in request.headers}
            generation = request.method == "POST"
            state.open += generation
            try:
                async with session.request(request.method, upstream + request.path, data=body, headers=headers) as got:
                    answer = web.Response(body=await got.read(), status=got.status, content_type=got.content_type)
            finally:
                state.open -= generation
            state.answered += generation
            return answer

        app = web.Application(client_max_size=2**26)
        app.router.add_route("*", "/{path:.*}", forward)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        state.port = runner.addresses[0][1]
        try:
            yield state
        finally:
            await runner.cleanup()
