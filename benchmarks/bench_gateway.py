"""CPU and latency of the gateway per model call, against an engine that answers at once.

    make bench-gateway        or: python benchmarks/bench_gateway.py [--seconds 5]

The scenarios are one call of about 200 prompt tokens, one of about 20,000, and conversations of 30 turns that grow to
about 20,000; each answer has 200 tokens. With `render: gateway` tokenising is part of the gateway's figures; with
`render: engine` the prompt's ids come from the engine.
"""

from __future__ import annotations

import argparse
import asyncio
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
from fake_engine import CHARS
from leyden.client import ControlClient, control_key, read_or_create_secret

WARM_UP = 20
MOST_PER_SECOND = 400  # calls; a scenario whose rollouts are used up ends early
HERE = Path(__file__).resolve().parent
WORDS = "fix the function in web.py so that its test passes, then run python3 web_test.py once more. "


def text(tokens: int, tokens_per_word_block: int) -> str:
    return WORDS * max(1, tokens // tokens_per_word_block)


class Rollouts:
    """Running rollouts with their keys."""

    def __init__(self, client: ControlClient) -> None:
        self._client = client
        self._slot = 0

    async def keys(self, count: int) -> list[str]:
        self._slot += 1
        spec = {"kind": "train", "step": 0, "slot": self._slot, "size": count, "task": {}}
        (group,) = await self._client.create_groups([spec])
        return [(await self._client.claim(rollout.rollout_id, "bench")).agent_key for rollout in group.rollouts]


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


async def single(session: aiohttp.ClientSession, url: str, keys: list[str], size: str) -> AsyncIterator[float]:
    """The first call of one rollout after another."""
    for number, key in enumerate(keys):
        seconds, _ = await call(session, url, key, [{"role": "user", "content": f"{number} {size}"}])
        yield seconds


async def conversation(session: aiohttp.ClientSession, url: str, keys: list[str], step: str) -> AsyncIterator[float]:
    for key in keys:
        messages: list[Any] = [{"role": "system", "content": "You are an agent."}, {"role": "user", "content": step}]
        for _ in range(30):
            seconds, reply = await call(session, url, key, messages)
            yield seconds
            messages += [{"role": "assistant", "content": reply["content"]}, {"role": "user", "content": step}]


async def measure(
    calls: AsyncIterator[float], process: psutil.Process, seconds: float
) -> tuple[int, float, list[float]]:
    """(calls, CPU seconds of the gateway, latencies) of `seconds`, after a warm-up of 20 calls."""
    for _ in range(WARM_UP):
        await anext(calls)
    before, start, latencies = process.cpu_times(), time.perf_counter(), []
    async for latency in calls:
        latencies.append(latency)
        if time.perf_counter() - start > seconds:
            break
    after = process.cpu_times()
    return len(latencies), after.user + after.system - before.user - before.system, latencies


async def run(url: str, render: str, pid: int, secret: bytes, seconds: float, per_block: int) -> list[list[Any]]:
    rows = []
    process = psutil.Process(pid)
    most = int(seconds * MOST_PER_SECOND) + WARM_UP
    async with ControlClient(url, control_key(secret)) as client, aiohttp.ClientSession() as session:
        rollouts = Rollouts(client)
        scenarios = {
            f"{render}: one call, 200 tokens": single(session, url, await rollouts.keys(most), text(200, per_block)),
            f"{render}: one call, 20k tokens": single(session, url, await rollouts.keys(most), text(20_000, per_block)),
        }
        if render == "gateway":
            keys = await rollouts.keys(most // 30 + 1)
            scenarios["gateway: 30 turns to 20k tokens"] = conversation(session, url, keys, text(450, per_block))
        for name, calls in scenarios.items():
            memory = process.memory_info().rss
            count, cpu_s, latencies = await measure(calls, process, seconds)
            latencies.sort()
            grown = (process.memory_info().rss - memory) / count / 1024
            p50, p99 = statistics.median(latencies), latencies[int(0.99 * (count - 1))]
            rows.append([name, count, 1e3 * cpu_s / count, 1e3 * p50, 1e3 * p99, grown])
    return rows


def tokens_per_block(model: Path) -> int:
    from tokenizers import Tokenizer

    return len(Tokenizer.from_file(str(model / "tokenizer.json")).encode(WORDS).ids)


def measured(folder: Path, render: str, seconds: float) -> list[list[Any]]:
    """The rows of one way to render, with a gateway and an engine of its own."""
    port = free_port()
    engine = f"http://127.0.0.1:{port}"
    kind = "vllm" if render == "engine" else "leyden"
    run_file = write_run_file(folder, engine={"kind": kind, "urls": [engine], "render": render})
    per_block = len(WORDS) // CHARS if render == "engine" else tokens_per_block(MODEL)
    with child([sys.executable, str(HERE / "fake_engine.py"), str(port)], folder / "engine.log"):
        wait_for(f"{engine}/stats")
        with child(leyden("gateway", str(run_file)), folder / "gateway.log") as gateway:
            url = gateway_url(folder / "run")
            secret = read_or_create_secret(folder / "run")
            return asyncio.run(run(url, render, gateway.pid, secret, seconds, per_block))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=5.0, help="per scenario")
    parser.add_argument("--render", choices=["gateway", "engine"], help="only this way")
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for render in [arguments.render] if arguments.render else ["gateway", "engine"]:
            rows += measured(Path(folder) / render, render, arguments.seconds)
    columns = ["scenario", "calls", "gateway CPU ms/call", "p50 ms", "p99 ms", "RSS KiB/call"]
    report("gateway", columns, rows)


if __name__ == "__main__":
    main()
