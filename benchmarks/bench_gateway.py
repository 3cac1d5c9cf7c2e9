"""CPU and latency of the gateway per model call, against an engine that answers at once.

    make bench-gateway        or: python benchmarks/bench_gateway.py [--seconds 5]

`render: gateway`: tokenising is part of the gateway's figures. The scenarios are one call of about 200 prompt tokens,
one of about 20,000, and conversations of 30 turns that grow to about 20,000; each answer has 200 tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from common import MODEL, child, free_port, gateway_url, leyden, report, wait_for, write_run_file
from leyden.client import ControlClient, control_key, read_or_create_secret

HERE = Path(__file__).resolve().parent
WORDS = "fix the function in web.py so that its test passes, then run python3 web_test.py once more. "


def text(tokens: int, tokens_per_word_block: int) -> str:
    return WORDS * max(1, tokens // tokens_per_word_block)


class Rollouts:
    """Running rollouts with their keys, one after another."""

    def __init__(self, client: ControlClient) -> None:
        self._client = client
        self._slot = 0

    async def key(self) -> str:
        self._slot += 1
        spec = {"kind": "train", "step": 0, "slot": self._slot, "size": 1, "task": {}}
        (group,) = await self._client.create_groups([spec])
        return (await self._client.claim(group.rollouts[0].rollout_id, "bench")).agent_key


async def call(session: aiohttp.ClientSession, url: str, key: str, messages: list[Any]) -> tuple[float, Any]:
    """One call: its seconds and the assistant's message."""
    start = time.perf_counter()
    async with session.post(
        f"{url}/v1/chat/completions",
        data=json.dumps({"model": "bench", "messages": messages, "max_tokens": 200}),
        headers={"authorization": f"Bearer {key}", "content-type": "application/json"},
    ) as response:
        answer = await response.json()
        response.raise_for_status()
    return time.perf_counter() - start, answer["choices"][0]["message"]


async def single(rollouts: Rollouts, session: aiohttp.ClientSession, url: str, size: str) -> AsyncIterator[float]:
    for number in itertools.count():
        if number % 30 == 0:
            key = await rollouts.key()
        seconds, _ = await call(session, url, key, [{"role": "user", "content": f"{number} {size}"}])
        yield seconds


async def conversation(rollouts: Rollouts, session: aiohttp.ClientSession, url: str, step: str) -> AsyncIterator[float]:
    while True:
        key = await rollouts.key()
        messages: list[Any] = [{"role": "system", "content": "You are an agent."}, {"role": "user", "content": step}]
        for _ in range(30):
            seconds, reply = await call(session, url, key, messages)
            yield seconds
            messages += [{"role": "assistant", "content": reply["content"]}, {"role": "user", "content": step}]


async def measure(
    calls: AsyncIterator[float], process: psutil.Process, seconds: float, at_least: int
) -> tuple[int, float, list[float]]:
    """(calls, CPU seconds of the gateway, latencies): for `seconds`, and at least so many calls."""
    await anext(calls)
    before, start, latencies = process.cpu_times(), time.perf_counter(), []
    async for latency in calls:
        latencies.append(latency)
        if time.perf_counter() - start > seconds and len(latencies) >= at_least:
            break
    after = process.cpu_times()
    return len(latencies), after.user + after.system - before.user - before.system, latencies


async def run(url: str, engine: str, pid: int, secret: bytes, seconds: float, per_block: int) -> list[list[Any]]:
    rows = []
    process = psutil.Process(pid)
    async with ControlClient(url, control_key(secret)) as client, aiohttp.ClientSession() as session:
        await client.put_model("bench", engines=[engine], version=0, lineage="bench", context_tokens=65536)
        rollouts = Rollouts(client)
        scenarios = {
            "one call, 200 tokens": (single(rollouts, session, url, text(200, per_block)), 1),
            "one call, 20k tokens": (single(rollouts, session, url, text(20_000, per_block)), 1),
            "30 turns to 20k tokens": (conversation(rollouts, session, url, text(450, per_block)), 120),
        }
        for name, (calls, at_least) in scenarios.items():
            memory = process.memory_info().rss
            count, cpu_s, latencies = await measure(calls, process, seconds, at_least)
            latencies.sort()
            grown = (process.memory_info().rss - memory) / count / 1024
            p50, p99 = statistics.median(latencies), latencies[int(0.99 * (count - 1))]
            rows.append([name, count, 1e3 * cpu_s / count, 1e3 * p50, 1e3 * p99, grown])
    return rows


def tokens_per_block(model: Path) -> int:
    from tokenizers import Tokenizer

    return len(Tokenizer.from_file(str(model / "tokenizer.json")).encode(WORDS).ids)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=5.0, help="per scenario")
    seconds = parser.parse_args().seconds
    with tempfile.TemporaryDirectory() as folder:
        run_file = write_run_file(Path(folder))
        run_dir, port = Path(folder) / "run", free_port()
        engine = f"http://127.0.0.1:{port}"
        with (
            child([sys.executable, str(HERE / "fake_engine.py"), str(port)], Path(folder) / "engine.log"),
            child(leyden("gateway", str(run_file)), Path(folder) / "gateway.log") as gateway,
        ):
            wait_for(f"{engine}/stats")
            url = gateway_url(run_dir)
            secret = read_or_create_secret(run_dir)
            rows = asyncio.run(run(url, engine, gateway.pid, secret, seconds, tokens_per_block(MODEL)))
    columns = ["scenario", "calls", "gateway CPU ms/call", "p50 ms", "p99 ms", "RSS KiB/call"]
    report("gateway", columns, rows)


if __name__ == "__main__":
    main()
