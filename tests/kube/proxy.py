"""Between a controller and the API server: here watches end, and new ones wait, as long as the test wants."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import aiohttp
from aiohttp import web

from tests.kube.cluster import Cluster


class ApiProxy:
    """Passes every call on. Of the watches of `kinds`, `expired` counts those that the API server refused, their
    version being too old."""

    def __init__(self, session: aiohttp.ClientSession, target: str, kinds: Collection[str]) -> None:
        self.expired = 0
        self._kinds = kinds
        self._session = session
        self._target = target
        self._held = asyncio.Event()
        self._free = asyncio.Event()
        self._free.set()
        self._watches = 0

    async def hold(self) -> None:
        """End the watches in good order, and let new ones wait until `release`."""
        self._free.clear()
        self._held.set()
        async with asyncio.timeout(60):
            while self._watches:  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    def release(self) -> None:
        self._held.clear()
        self._free.set()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if "watch" not in request.query or request.path.rpartition("/")[2] not in self._kinds:
            return await self._pass(request, ends=False)
        await self._free.wait()
        self._watches += 1
        try:
            return await self._pass(request, ends=True)
        finally:
            self._watches -= 1

    async def _pass(self, request: web.Request, *, ends: bool) -> web.StreamResponse:
        headers = {"Content-Type": request.headers.get("Content-Type", "application/json")}
        url, body = self._target + request.raw_path, await request.read()
        try:
            async with self._session.request(request.method, url, data=body or None, headers=headers) as answer:
                response = web.StreamResponse(status=answer.status)
                response.content_type = answer.content_type
                await response.prepare(request)
                await self._copy(answer, response, ends=ends)
                await response.write_eof()
                return response
        except aiohttp.ClientError as error:
            return web.Response(status=502, text=str(error))

    async def _copy(self, answer: aiohttp.ClientResponse, response: web.StreamResponse, *, ends: bool) -> None:
        self.expired += ends and answer.status == 410
        held = asyncio.create_task(self._held.wait())
        try:
            while not (ends and held.done()):
                more = asyncio.create_task(answer.content.readany())
                await asyncio.wait({more, held} if ends else {more}, return_when=asyncio.FIRST_COMPLETED)
                if not more.done():
                    more.cancel()
                    continue
                data = more.result()
                if not data:
                    return
                self.expired += ends and b'"code":410' in data
                await response.write(data)
        finally:
            held.cancel()


@contextmanager
def kubectl_proxy(kube: Cluster) -> Iterator[str]:
    """Its URL. It does the encryption."""
    command = ["kubectl", "proxy", "--port=0", "--address=127.0.0.1"]
    with subprocess.Popen(command, env=kube.environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield "http://" + process.stdout.readline().split()[-1]
        finally:
            process.terminate()


@asynccontextmanager
async def api_proxy(target: str, *kinds: str) -> AsyncIterator[tuple[ApiProxy, dict[str, Any]]]:
    """A proxy before a server without encryption that can hold up watches of `kinds`, and its clients' kubeconfig."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
        proxy = ApiProxy(session, target, kinds)
        server = web.Server(proxy.answer)
        listener = await asyncio.get_running_loop().create_server(server, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        try:
            yield (
                proxy,
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "clusters": [{"name": "proxy", "cluster": {"server": url}}],
                    "users": [],
                    "contexts": [{"name": "proxy", "context": {"cluster": "proxy"}}],
                    "current-context": "proxy",
                },
            )
        finally:
            listener.close()
            await server.shutdown(1)
