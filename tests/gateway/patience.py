"""Callers that give up, at a moment of the test's choice instead of after some seconds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import httpx2

from tests.gateway.conftest import until


class _LosingPatience(httpx2.AsyncBaseTransport):
    def __init__(self, enough: Callable[[], bool]) -> None:
        self._enough: Callable[[], bool] | None = enough
        self._transport = httpx2.AsyncHTTPTransport()

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        enough, self._enough = self._enough, None
        if enough is None:
            return await self._transport.handle_async_request(request)
        asking = asyncio.create_task(self._transport.handle_async_request(request))
        await until(enough)
        asking.cancel()
        await asyncio.wait([asking])
        raise httpx2.ReadTimeout("no byte for too long", request=request)

    async def aclose(self) -> None:
        await self._transport.aclose()


def losing_patience(enough: Callable[[], bool]) -> httpx2.AsyncClient:
    """For an SDK: its first request meets a read time-out when `enough` comes true, the others are patient."""
    return httpx2.AsyncClient(transport=_LosingPatience(enough))
