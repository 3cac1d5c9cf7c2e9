"""JSON over HTTP to any number of engines. One call is one request: who tries again is decided above."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import orjson

from leyden.errors import EngineRejected, EngineUnavailable
from leyden.protocols.checks import loads
from leyden.types import Json

IDLE_S = 4.0
CONNECT_S = 10.0
WORTH_ANOTHER_TRY = frozenset({408, 409, 425, 429})


class EngineHttp:
    """No read time-out, since the rollout's deadline ends a call, and no limit on connections, since a wave of
    hundreds of calls is normal. Idle connections are dropped before engines do it.
    """

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    async def post(self, url: str, path: str, body: Json) -> Any:
        """The JSON of a 2xx answer. Raises EngineUnavailable or EngineRejected with the engine's own words."""
        return parsed(url, await self.post_raw(url, path, body))

    async def post_raw(self, url: str, path: str, body: Json) -> bytes:
        """As `post`, unparsed."""
        try:
            async with self._open().post(url + path, data=orjson.dumps(body)) as response:
                raw = await response.read()
                status, headers = response.status, response.headers
        except (aiohttp.ClientError, OSError) as error:
            raise EngineUnavailable(f"engine {url}: {error or type(error).__name__}") from error
        if status < 300:
            return raw
        text = f"engine {url} answered {status}: {_message(raw)}"
        if status in WORTH_ANOTHER_TRY or status >= 500:
            raise EngineUnavailable(text, status=status, retry_after_s=_seconds(headers.get("retry-after")))
        raise EngineRejected(text, status=status)

    async def get(self, url: str, path: str, timeout_s: float) -> tuple[int, bytes]:
        """Status and body. Raises EngineUnavailable if there is no answer within `timeout_s`."""
        limit = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._open().get(url + path, timeout=limit) as response:
                return response.status, await response.read()
        except TimeoutError as error:
            raise EngineUnavailable(f"engine {url} did not answer GET {path} within {timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise EngineUnavailable(f"engine {url}: {error or type(error).__name__}") from error

    async def alive(self, url: str, timeout_s: float) -> None:
        """GET /health. Anything but 5xx will do: not every engine has the route."""
        status, body = await self.get(url, "/health", timeout_s)
        if status >= 500:
            raise EngineUnavailable(f"engine {url} answered {status} to GET /health: {_message(body)}", status=status)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
                headers={"content-type": "application/json", "accept-encoding": "identity"},
                cookie_jar=aiohttp.DummyCookieJar(),
                trust_env=False,
            )
        return self._session


def parsed(url: str, raw: bytes) -> Any:
    """JSON, also with the NaN and Infinity that engines write for log-probs, or with half a surrogate pair.

    What is none is a broken answer.
    """
    for read in (orjson.loads, lambda text: loads(text)[0], json.loads):
        try:
            return read(raw)
        except (ValueError, RecursionError) as error:
            problem = error
    raise EngineUnavailable(f"engine {url} answered no JSON: {problem}", status=200) from problem


def _message(raw: bytes) -> str:
    """The engine's own words: `error.message`, `message`, `detail`, or the start of the text."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError:
        body = None
    error = body.get("error", body) if isinstance(body, dict) else None
    if isinstance(error, dict):
        error = error.get("message") or error.get("detail")
    return error if isinstance(error, str) else raw[:300].decode("utf-8", "replace")


def _seconds(retry_after: str | None) -> float:
    """A Retry-After header in seconds; 0 where there is none, or a date."""
    text = (retry_after or "").strip()
    return float(text) if text.replace(".", "", 1).isdecimal() else 0.0
