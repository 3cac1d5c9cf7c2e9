"""JSON over HTTP to any number of engines. One call is one request: who tries again is decided above."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import orjson

from leyden.errors import EngineRejected, EngineUnavailable
from leyden.gateway.engines.connections import Answer, Connections, NotSent
from leyden.protocols.checks import loads
from leyden.types import Json

IDLE_S = 4.0
WORTH_ANOTHER_TRY = frozenset({408, 409, 425, 429})


class EngineHttp:
    """No read time-out, since the rollout's deadline ends a call, and no limit on connections, since a wave of
    hundreds of calls is normal. Idle connections are dropped before engines do it. `period` numbers the periods between
    pauses, None is a pause: all that makes an engine work is a POST, and none leaves in a pause. `key` is what engines
    want as `Authorization: Bearer`; no error repeats it.
    """

    def __init__(self, period: Callable[[], int | None] = lambda: 0, key: str | None = None) -> None:
        self._connections = Connections(IDLE_S, key)
        self._period = period
        self._key = key

    async def post(self, url: str, path: str, body: Json) -> Any:
        """The JSON of a 2xx answer. Raises EngineUnavailable or EngineRejected with the engine's own words, NotSent
        where the period between two pauses in which it was called is over before there is a connection.
        """
        return parsed(url, await self.post_raw(url, path, body))

    async def post_raw(self, url: str, path: str, body: Json) -> bytes:
        """As `post`, unparsed."""
        if (period := self._period()) is None:
            raise NotSent
        answer = await self._request("POST", url, path, orjson.dumps(body), still=lambda: self._period() == period)
        if 200 <= answer.status < 300:
            return answer.body
        text = f"engine {url} answered {answer.status}: {self._words(answer.body)}"
        if answer.status in WORTH_ANOTHER_TRY or answer.status >= 500:
            raise EngineUnavailable(text, status=answer.status, retry_after_s=_seconds(answer.retry_after))
        raise _rejected(text, answer.status)

    async def get(self, url: str, path: str, timeout_s: float) -> tuple[int, bytes]:
        """Status and body. Raises EngineUnavailable if there is no answer within `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._request("GET", url, path)
        except TimeoutError as error:
            raise EngineUnavailable(f"engine {url} did not answer GET {path} within {timeout_s:g} s") from error
        return answer.status, answer.body

    async def alive(self, url: str, timeout_s: float) -> None:
        """Return if GET /health is answered by anything but 5xx, since not every engine has the route, and not by a
        refusal of the key. Raises EngineUnavailable or EngineRejected.
        """
        status, body = await self.get(url, "/health", timeout_s)
        said = f"engine {url} answered {status} to GET /health: {self._words(body)}"
        if status >= 500:
            raise EngineUnavailable(said)  # without the status: 503 is no sign of being busy here
        if status in (401, 403):
            raise _rejected(said, status)

    async def close(self) -> None:
        self._connections.close()

    def _words(self, raw: bytes) -> str:
        """The engine's own words, of which some repeat the key that they refuse."""
        words = _message(raw)
        return words.replace(self._key, "[key]") if self._key else words

    async def _request(
        self, method: str, url: str, path: str, body: bytes = b"", still: Callable[[], bool] = lambda: True
    ) -> Answer:
        try:
            return await self._connections.request(method, url, path, body, still=still)
        except (OSError, UnicodeError) as error:  # a host name that is none is a UnicodeError
            raise EngineUnavailable(f"engine {url}: {error or type(error).__name__}") from error


def _rejected(said: str, status: int) -> EngineRejected:
    """vLLM answers GET /health without a key, and refuses calls."""
    hint = "; engine.api_key_env names the variable that holds its key" if status in (401, 403) else ""
    return EngineRejected(said + hint, status=status)


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
