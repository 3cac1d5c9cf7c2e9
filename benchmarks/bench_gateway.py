"""CPU and latency of the gateway per model call, against an engine that answers at once.

    make bench-gateway        or: python benchmarks/bench_gateway.py [--seconds 5]

The scenarios are one call of about 200 prompt tokens, one of about 20,000, and conversations of 30 turns that grow to
about 20,000; each answer has 200 tokens. With `render: gateway` tokenising is part of the gateway's figures; with
`render: engine` the prompt's ids come from the engine, as they do for Agent Lightning 1.0.2, which is measured beside
it if it can be installed. The ratio is its CPU per call to Leyden's: to that of `render: engine` for single calls, to
that of `render: gateway` for conversations.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import psutil

import reference
from common import MODEL, child, free_port, gateway_url, leyden, report, wait_for, write_run_file
from fake_engine import CHARS
from leyden.client import ControlClient, control_key, read_or_create_secret

WARM_UP = 20
MOST_PER_SECOND = 400  # calls; a scenario whose rollouts are used up ends early
HERE = Path(__file__).resolve().parent
SHORT, LONG, TURNS = "one call, 200 tokens", "one call, 20k tokens", "30 turns to 20k tokens"
Target = tuple[str, str]
WORDS = "fix the function in web.py so that its test passes, then run python3 web_test.py once more. "


def text(tokens: int, tokens_per_word_block: int) -> str:
    return WORDS * max(1, tokens // tokens_per_word_block)


async def targets(client: ControlClient, url: str, count: int, slot: int) -> list[Target]:
    """The chat URL and the key of each of `count` running rollouts."""
    spec = {"kind": "train", "step": 0, "slot": slot, "size": count, "task": {}}
    (group,) = await client.create_groups([spec])
    keys = [(await client.claim(rollout.rollout_id, "bench")).agent_key for rollout in group.rollouts]
    return [(f"{url}/v1/chat/completions", key) for key in keys]


async def call(session: aiohttp.ClientSession, target: Target, messages: list[Any]) -> tuple[float, Any]:
    """One call: its seconds and the assistant's message."""
    url, key = target
    start = time.perf_counter()
    async with session.post(
        url,
        data=json.dumps({"model": "bench", "messages": messages, "max_tokens": 200}),
        headers={"authorization": f"Bearer {key}", "content-type": "application/json"},
    ) as response:
        answer = await response.json()
        response.raise_for_status()
    return time.perf_counter() - start, answer["choices"][0]["message"]


async def single(session: aiohttp.ClientSession, rollouts: list[Target], size: str) -> AsyncIterator[float]:
    """The first call of one rollout after another."""
    for number, target in enumerate(rollouts):
        seconds, _ = await call(session, target, [{"role": "user", "content": f"{number} {size}"}])
        yield seconds


async def conversation(session: aiohttp.ClientSession, rollouts: list[Target], step: str) -> AsyncIterator[float]:
    for target in rollouts:
        messages: list[Any] = [{"role": "system", "content": "You are an agent."}, {"role": "user", "content": step}]
        for _ in range(30):
            seconds, reply = await call(session, target, messages)
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


async def row(name: str, calls: AsyncIterator[float], process: psutil.Process, seconds: float) -> list[Any]:
    memory = process.memory_info().rss
    count, cpu_s, latencies = await measure(calls, process, seconds)
    latencies.sort()
    grown = (process.memory_info().rss - memory) / count / 1024
    p50, p99 = statistics.median(latencies), latencies[int(0.99 * (count - 1))]
    return [name, count, 1e3 * cpu_s / count, 1e3 * p50, 1e3 * p99, grown]


async def leyden_rows(url: str, render: str, process: psutil.Process, secret: bytes, seconds: float) -> list[list[Any]]:
    most = int(seconds * MOST_PER_SECOND) + WARM_UP
    per_block = len(WORDS) // CHARS if render == "engine" else tokens_per_block(MODEL)
    async with ControlClient(url, control_key(secret)) as client, aiohttp.ClientSession() as session:
        scenarios = {
            SHORT: single(session, await targets(client, url, most, 0), text(200, per_block)),
            LONG: single(session, await targets(client, url, most, 1), text(20_000, per_block)),
        }
        if render == "gateway":
            rollouts = await targets(client, url, most // 30 + 1, 2)
            scenarios[TURNS] = conversation(session, rollouts, text(450, per_block))
        return [await row(f"{render}: {name}", calls, process, seconds) for name, calls in scenarios.items()]


async def reference_rows(server: reference.AgentLightning, seconds: float) -> list[list[Any]]:
    process, per_block = psutil.Process(server.pid), len(WORDS) // CHARS
    most = int(seconds * MOST_PER_SECOND) + WARM_UP
    async with aiohttp.ClientSession() as session:
        scenarios = {
            SHORT: single(session, server.targets(most), text(200, per_block)),
            LONG: single(session, server.targets(most), text(20_000, per_block)),
            TURNS: conversation(session, server.targets(most // 30 + 1), text(450, per_block)),
        }
        return [await row(f"Agent Lightning: {name}", calls, process, seconds) for name, calls in scenarios.items()]


def tokens_per_block(model: Path) -> int:
    from tokenizers import Tokenizer

    return len(Tokenizer.from_file(str(model / "tokenizer.json")).encode(WORDS).ids)


@contextlib.contextmanager
def fake_engine(folder: Path) -> Iterator[str]:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with child([sys.executable, str(HERE / "fake_engine.py"), str(port)], folder / "engine.log"):
        wait_for(f"{url}/stats")
        yield url


def measured(folder: Path, render: str, seconds: float) -> list[list[Any]]:
    """The rows of one way to render, with a gateway and an engine of its own."""
    kind = "vllm" if render == "engine" else "leyden"
    with fake_engine(folder) as engine:
        run_file = write_run_file(folder, engine={"kind": kind, "urls": [engine], "render": render})
        with child(leyden("gateway", str(run_file)), folder / "gateway.log") as gateway:
            url, process = gateway_url(folder / "run"), psutil.Process(gateway.pid)
            return asyncio.run(leyden_rows(url, render, process, read_or_create_secret(folder / "run"), seconds))


def reference_measured(folder: Path, seconds: float) -> list[list[Any]]:
    with fake_engine(folder) as engine, reference.serving(folder, engine) as server:
        return asyncio.run(reference_rows(server, seconds))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=5.0, help="per scenario")
    parser.add_argument("--render", choices=["gateway", "engine"], help="only this way")
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for render in [arguments.render] if arguments.render else ["gateway", "engine"]:
            rows += measured(Path(folder) / render, render, arguments.seconds)
        if reference.install():
            rows += reference_measured(Path(folder) / "reference", arguments.seconds)
        else:
            print("no Python 3.12 here: Agent Lightning is not measured")
    cpu_ms = {line[0]: line[2] for line in rows}
    for line in rows:
        way, _, name = line[0].partition(": ")
        ours = cpu_ms.get(f"engine: {name}") or cpu_ms.get(f"gateway: {name}")
        line.append(line[2] / ours if way == "Agent Lightning" and ours else "")
    report("gateway", ["scenario", "calls", "CPU ms/call", "p50 ms", "p99 ms", "RSS KiB/call", "ratio"], rows)


if __name__ == "__main__":
    main()
