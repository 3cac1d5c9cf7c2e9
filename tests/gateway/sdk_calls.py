"""Calls with the official SDKs."""

from __future__ import annotations

import sqlite3
from typing import Any

import aiohttp
import openai

from leyden.protocols import ROUTES
from leyden.types import FinishReason, Generation, VersionSpan
from tests.gateway.conftest import Gateway
from tests.protocols.bodies import url_of

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "what now?"}
BASH = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}
BODY = {"model": "m", "messages": [USER]}
SERVED = [(path, protocol) for path, protocol in ROUTES]
BY_NAME = {protocol.PROTOCOL: protocol for _, protocol in ROUTES}
IDS = [path for path, _ in SERVED]


def sdk(gateway: Gateway, key: str, **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=key, **options)


async def call(client: openai.AsyncOpenAI, messages: list[Any], **options: Any) -> Any:
    return await client.chat.completions.create(model="m", messages=messages, **options)


async def post(gateway: Gateway, key: str, path: str, body: Any, **headers: str) -> tuple[int, Any]:
    async with (
        aiohttp.ClientSession(headers={"authorization": f"Bearer {key}", **headers}) as session,
        session.post(gateway.url + url_of(path), json=body) as response,
    ):
        return response.status, await response.json()


def states(gateway: Gateway, rollout_id: str) -> list[tuple[int, str]]:
    """(attempt, state) of every turn that was ever opened."""
    with sqlite3.connect(gateway.config.run_dir / "store.sqlite") as connection:
        rows = connection.execute(
            "SELECT attempt, state FROM turns WHERE rollout_id = ? ORDER BY turn_id", (rollout_id,)
        )
        return rows.fetchall()


def sampled(ids: list[int]) -> Generation:
    return Generation(ids, [-0.5] * len(ids), FinishReason.STOP, (VersionSpan(0, len(ids)),))
