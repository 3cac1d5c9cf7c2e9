"""Memory of the gateway and size of its store per recorded call.

    make bench-memory        or: python benchmarks/bench_memory.py [--calls 600]

Two ways to make calls of 20,000 tokens, each with a gateway of its own: fresh prompts, and conversations of 30 turns
that grow to that length. Rollouts of 30 calls come one after the other.

    RAM          growth of the gateway's resident memory per call, after a warm-up: what a run of any length costs
    live RAM     growth per call of 10 rollouts that still run
    disk         growth of the store, its log included
    new tokens   what a call adds to what its parent holds
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from bench_gateway import Target, call, fake_engine, text, tokens_per_block
from common import MODEL, child, gateway_url, leyden, report, write_run_file
from leyden.client import ControlClient, control_key, read_or_create_secret

CALLS, LIVE = 30, 10
Talk = Callable[[aiohttp.ClientSession, Target, str], Awaitable[None]]


async def fresh(session: aiohttp.ClientSession, target: Target, size: str) -> None:
    for number in range(CALLS):
        await call(session, target, [{"role": "user", "content": f"{number} {size}"}])


async def conversation(session: aiohttp.ClientSession, target: Target, size: str) -> None:
    messages: list[Any] = [{"role": "user", "content": size}]
    for _ in range(CALLS):
        _, reply = await call(session, target, messages)
        messages += [{"role": "assistant", "content": reply["content"]}, {"role": "user", "content": size}]


class Run:
    """A gateway, asked by rollouts that this program starts and ends."""

    def __init__(
        self, client: ControlClient, session: aiohttp.ClientSession, url: str, run_dir: Path, pid: int
    ) -> None:
        self._client, self._session, self._url, self._run_dir = client, session, url, run_dir
        self._process = psutil.Process(pid)
        self._slot = 0

    def memory_kib(self) -> float:
        return float(self._process.memory_info().rss / 1024)

    def disk_kib(self) -> float:
        return sum(path.stat().st_size for path in self._run_dir.glob("store.sqlite*")) / 1024

    async def start(self) -> tuple[str, Target]:
        """A running rollout: its id and what it calls."""
        self._slot += 1
        spec = {"kind": "train", "step": 0, "slot": self._slot, "size": 1, "task": {}}
        (group,) = await self._client.create_groups([spec])
        claim = await self._client.claim(group.rollouts[0].rollout_id, "bench")
        return claim.rollout.rollout_id, (f"{self._url}/v1/chat/completions", claim.agent_key)

    async def end(self, rollout_id: str) -> None:
        await self._client.exit(rollout_id, 1, exit_code=0, timed_out=False, reason=None)
        await self._client.reward(rollout_id, 1, 0.0)
        await self._client.finish(rollout_id, 1)

    async def one_after_the_other(self, talk: Talk, size: str, rollouts: int) -> str:
        """Runs and ends rollouts; answers the id of the last."""
        for _ in range(rollouts):
            rollout_id, target = await self.start()
            await talk(self._session, target, size)
            await self.end(rollout_id)
        return rollout_id

    async def row(self, name: str, talk: Talk, size: str, rollouts: int) -> list[Any]:
        await self.one_after_the_other(talk, size, max(1, rollouts // 3))
        memory, disk = self.memory_kib(), self.disk_kib()
        last = await self.one_after_the_other(talk, size, rollouts)
        calls = rollouts * CALLS
        grown, written = self.memory_kib() - memory, self.disk_kib() - disk
        turns = await self._client.turns([last])
        new_tokens = sum(len(turn.delta_P) + len(turn.sampled_T) for turn in turns) / len(turns)
        live = [await self.start() for _ in range(LIVE)]
        memory = self.memory_kib()
        await asyncio.gather(*(talk(self._session, target, size) for _, target in live))
        living = (self.memory_kib() - memory) / (LIVE * CALLS)
        for rollout_id, _ in live:
            await self.end(rollout_id)
        return [name, calls, grown / calls, living, written / calls, round(new_tokens)]


async def measure(name: str, talk: Talk, size: int, rollouts: int) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        run_file = write_run_file(Path(folder))
        run_dir = Path(folder) / "run"
        with (
            fake_engine(Path(folder)) as engine,
            child(leyden("gateway", str(run_file)), Path(folder) / "gateway.log") as gateway,
        ):
            url = gateway_url(run_dir)
            key = control_key(read_or_create_secret(run_dir))
            async with ControlClient(url, key) as client, aiohttp.ClientSession() as session:
                await client.put_model("bench", engines=[engine], version=0, lineage="bench", context_tokens=65536)
                run = Run(client, session, url, run_dir, gateway.pid)
                return await run.row(name, talk, text(size, tokens_per_block(MODEL)), rollouts)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--calls", type=int, default=600, help="per scenario")
    rollouts = max(1, parser.parse_args().calls // CALLS)
    rows = [
        asyncio.run(measure("20k tokens, fresh", fresh, 20_000, rollouts)),
        asyncio.run(measure("30 turns to 20k tokens", conversation, 450, rollouts)),
    ]
    columns = ["scenario", "calls", "RAM KiB/call", "live RAM KiB/call", "disk KiB/call", "new tokens/call"]
    report("memory", columns, rows)


if __name__ == "__main__":
    main()
