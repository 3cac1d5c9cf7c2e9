"""The client of an engine that speaks Leyden's own contract over HTTP (the embedded one does)."""

from __future__ import annotations

import aiohttp
import orjson

from leyden.errors import CaptureError, EngineRejected, EngineUnavailable
from leyden.gateway.engines.base import GenerateRequest, generation
from leyden.types import Generation

IDLE_S = 4.0


class HttpEngine:
    """`generate` on any number of engines. One call is one request: who retries is decided above."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    async def generate(self, url: str, request: GenerateRequest) -> Generation:
        """Sample from the engine at base URL `url`. There is no read time-out: the rollout's deadline ends a call.

        Raises EngineUnavailable (connection, 429, 5xx), EngineRejected (other 4xx), CaptureError (contract broken).
        """
        session = self._session = self._session or _session()
        try:
            async with session.post(f"{url}/generate", data=orjson.dumps(request.to_json())) as response:
                body = await response.read()
                status = response.status
        except (aiohttp.ClientError, OSError) as error:
            raise EngineUnavailable(f"engine {url}: {error or type(error).__name__}") from error
        if status == 429 or status >= 500:
            raise EngineUnavailable(f"engine {url} answered {status}: {_excerpt(body)}")
        if status >= 400:
            raise EngineRejected(f"engine {url} answered {status}: {_excerpt(body)}")
        try:
            answer = orjson.loads(body)
        except orjson.JSONDecodeError as error:
            raise CaptureError(f"engine {url} answered no JSON: {error}") from error
        return generation(answer, request)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


def _session() -> aiohttp.ClientSession:
    """No limit on connections, since a held rollout wave is normal; idle ones are dropped before engines do it."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
        headers={"content-type": "application/json"},
        trust_env=False,
    )


def _excerpt(body: bytes) -> str:
    return body[:300].decode("utf-8", "replace")
