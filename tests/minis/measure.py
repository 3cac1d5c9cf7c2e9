"""Rollouts of mini-swe-agent through a gateway, and what they come to as training samples."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
import sys
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from leyden.config import RunConfig
from leyden.gateway.engines import GenerateRequest
from leyden.gateway.render import ModelRenderer
from leyden.store.pack import unpack_json
from leyden.trajectory.kinds import fork_counts
from leyden.trajectory.samples import build_samples
from leyden.types import FinishReason, Generation, Turn, VersionSpan
from tests.gateway.conftest import Gateway, make_config, serving
from tests.harnesses.spelling import Speller
from tests.minis.script import Cell, answer, task_of, template_forks
from tests.qwen_tokenizers import qwen_tokenizer_folder

ROOT = Path(__file__).resolve().parents[2]
CONTEXT_TOKENS = 65536
AT_ONCE = 8

Json = dict[str, Any]
Recorded = dict[str, list[Turn]]


class Model:
    """An engine that says what the script says, in ids that a tokenizer would not choose."""

    def __init__(self, family: str, renderer: ModelRenderer) -> None:
        self._family = family
        self._renderer = renderer
        self._speller = Speller(renderer._tokenizer._backend)

    async def generate(self, url: str, request: GenerateRequest) -> Generation:
        text = answer(self._family, self._renderer.decode(request.prompt_ids))
        ids = [*self._speller.ids(text), self._renderer.stop_token_ids[0]]
        return Generation(ids, [-0.5] * len(ids), FinishReason.STOP, (VersionSpan(0, len(ids)),))

    async def health(self, url: str) -> None:
        """It works."""


class Minis:
    """Processes that run the harness, one rollout at a time each."""

    def __init__(self, processes: Sequence[asyncio.subprocess.Process]) -> None:
        self._free: asyncio.Queue[asyncio.subprocess.Process] = asyncio.Queue()
        for process in processes:
            self._free.put_nowait(process)

    async def run(self, asked: Json) -> Json:
        process = await self._free.get()
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(asked).encode() + b"\n")
        told: Json = json.loads(await process.stdout.readline())
        self._free.put_nowait(process)
        return told


@contextlib.asynccontextmanager
async def started(count: int) -> AsyncIterator[Minis]:
    pipe, nothing = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
    command = (sys.executable, "-m", "tests.minis.worker")
    processes = [
        await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=nothing, cwd=ROOT)
        for _ in range(count)
    ]
    try:
        yield Minis(processes)
    finally:
        for process in processes:
            assert process.stdin is not None
            process.stdin.close()
            await process.wait()


@dataclass
class Row:
    """What the rollouts of a cell came to. `rerendered` is `samples` for the same calls and replies under
    `continuity: off`; `template_forks` is counted from the requests by the template's rule; `respelled` counts turns
    whose ids are not the tokenizer's own.
    """

    cell: Cell
    rollouts: int
    turns: int = 0
    fewest_turns: int = 0
    samples: float = 0.0
    rerendered: float = 0.0
    forks: Json = field(default_factory=dict)
    template_forks: int = 0
    respelled: int = 0

    @property
    def expected(self) -> Json:
        """The forks that there should be."""
        own = self.template_forks if self.cell.history == "template" else 0
        return {"reasoning_dropped_by_template": own} if own else {}

    @property
    def right(self) -> bool:
        samples = round(self.samples * self.rollouts)
        return self.forks == self.expected and samples == self.rollouts + sum(self.expected.values())


async def measure(cells: Sequence[Cell], rollouts: int, folder: Path, minis: Minis) -> list[Row]:
    """Cells of one family and one `history`: all through one gateway, then their calls again through another."""
    family, history = cells[0].family, cells[0].history
    model = ModelRenderer(str(qwen_tokenizer_folder(family)), family, history)
    async with _gateway(folder / "on", model, family, history, "semantic") as gateway:
        ids = await _run_harness(gateway, cells, rollouts, minis)
        recorded = {cell: await _turns(gateway, ids[cell]) for cell in cells}
    calls = _calls(folder / "on" / "run")
    async with _gateway(folder / "off", model, family, history, "off") as gateway:
        again = {cell: await _turns(gateway, await _repeat(gateway, [calls[i] for i in ids[cell]])) for cell in cells}
    return [_row(cell, recorded[cell], again[cell], calls, model) for cell in cells]


def _row(cell: Cell, recorded: Recorded, again: Recorded, calls: dict[str, list[Json]], model: ModelRenderer) -> Row:
    turns = [turn for own in recorded.values() for turn in own]
    assert [len(own) for own in again.values()] == [len(own) for own in recorded.values()]
    canonical = [model.encode(model.decode(turn.sampled_T.tolist()), add_special_tokens=False) for turn in turns]
    return Row(
        cell=cell,
        rollouts=len(recorded),
        turns=len(turns),
        fewest_turns=min(map(len, recorded.values())),
        samples=_samples(recorded),
        rerendered=_samples(again),
        forks=dict(sum((Counter(fork_counts(own)) for own in recorded.values()), Counter())),
        template_forks=sum(template_forks([call["messages"] for call in calls[i]]) for i in recorded),
        respelled=sum(ids != turn.sampled_T.tolist() for ids, turn in zip(canonical, turns, strict=True)),
    )


def _samples(recorded: Recorded) -> float:
    return sum(len(build_samples(own).samples) for own in recorded.values()) / len(recorded)


@contextlib.asynccontextmanager
async def _gateway(
    folder: Path, renderer: ModelRenderer, family: str, history: str, continuity: str
) -> AsyncIterator[Gateway]:
    engine: Any = Model(family, renderer)
    async with serving(_config(folder, family, history, continuity), renderer, engine=engine) as gateway:
        await gateway.client.put_model(
            "policy", engines=["scripted"], version=0, lineage="l", context_tokens=CONTEXT_TOKENS
        )
        yield gateway


def _config(folder: Path, family: str, history: str, continuity: str) -> RunConfig:
    folder.mkdir(parents=True)
    model = {"renderer": family, "context_tokens": CONTEXT_TOKENS, "thinking_history": history}
    tokenizer = qwen_tokenizer_folder(family)
    return make_config(folder, tokenizer, model=model | {"continuity": continuity}, gateway={"keep_wire": True})


async def _turns(gateway: Gateway, rollout_ids: Sequence[str]) -> Recorded:
    turns: Recorded = {rollout_id: [] for rollout_id in rollout_ids}
    for turn in await gateway.client.turns(rollout_ids):
        turns[turn.rollout_id].append(turn)
    return turns


async def _run_harness(gateway: Gateway, cells: Sequence[Cell], rollouts: int, minis: Minis) -> dict[Cell, list[str]]:
    """The ids of each cell's rollouts, all of them finished."""
    ids: dict[Cell, list[str]] = {cell: [] for cell in cells}
    runs = []
    for number in range(rollouts):
        for cell in cells:
            rollout_id, key = await gateway.start_rollout()
            ids[cell].append(rollout_id)
            url = f"{gateway.url}/v1"
            runs.append(minis.run({"url": url, "key": key, "mode": cell.mode, "task": task_of(cell, number)}))
    for told in await asyncio.gather(*runs):
        assert told["status"] == "Submitted", told
    return ids


def _calls(run_dir: Path) -> dict[str, list[Json]]:
    """The bodies that each rollout sent, in order, from the gateway's own record."""
    calls: dict[str, list[Json]] = {}
    with contextlib.closing(sqlite3.connect(run_dir / "store.sqlite")) as database:
        for rollout_id, wire in database.execute("SELECT rollout_id, wire FROM turns ORDER BY turn_id"):
            calls.setdefault(rollout_id, []).append(unpack_json(wire))
    return calls


async def _repeat(gateway: Gateway, calls: Sequence[Sequence[Json]]) -> list[str]:
    """The same calls again, one rollout for each list: the ids."""
    slots = asyncio.Semaphore(AT_ONCE)

    async def one(session: aiohttp.ClientSession, bodies: Sequence[Json]) -> str:
        rollout_id, key = await gateway.start_rollout()
        async with slots:
            for body in bodies:
                headers = {"authorization": f"Bearer {key}"}
                async with session.post(f"{gateway.url}/v1/chat/completions", json=body, headers=headers) as response:
                    response.raise_for_status()
        return rollout_id

    async with aiohttp.ClientSession() as session:
        return list(await asyncio.gather(*(one(session, bodies) for bodies in calls)))
