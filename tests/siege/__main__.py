"""python -m tests.siege [--small] [--seed N] [--only PART...]

Parts: mutants, bodies, train (kills), services (kills), leftovers. Everything is bounded; a fault is exit status 1.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from leyden.client import ControlClient, control_key
from leyden.run_file import load
from tests.qwen_tokenizers import qwen_tokenizer_folder
from tests.siege.bodies import beside, bodies
from tests.siege.kills import campaign
from tests.siege.leftovers import leftovers
from tests.siege.mutants import Outcome, mutants
from tests.siege.programs import SECRET, Asked, Program, free_port, gateway_url, until, watched
from tests.tiny_model import make_tiny_model

ROOT = Path(__file__).resolve().parents[2]
CONTEXT = 32_768
SHOWN_FAULTS = 20
SHOWN_WAITS = 20
FULL = {"mutants": 50_000, "bodies": None, "train": 50, "services": 50, "leftovers": None}
SMALL = {"mutants": 3_000, "bodies": 4, "train": 3, "services": 5, "leftovers": "small"}


def main() -> int:
    parser = argparse.ArgumentParser(description="A seeded campaign against Leyden's own programs.")
    parser.add_argument("--small", action="store_true", help="the one of the gate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=list(FULL), default=list(FULL), metavar="PART")
    parser.add_argument("--keep", action="store_true", help="leave the folders of the runs")
    given = parser.parse_args()
    sizes = SMALL if given.small else FULL
    root = Path(tempfile.mkdtemp(prefix="leyden-siege-"))
    faults: list[str] = []
    for part in given.only:
        start = time.monotonic()
        line, found = PARTS[part](root / part, sizes[part], given.seed)
        say(f"{part:10} {line}; {len(found)} faults, {time.monotonic() - start:.0f} s")
        for fault in found[:SHOWN_FAULTS]:
            say(f"  FAULT {fault}")
        faults += found
    if given.keep or faults:
        say(f"folders: {root}")
    else:
        shutil.rmtree(root, ignore_errors=True)
    say(f"{len(faults)} faults" if faults else "no fault")
    return 1 if faults else 0


def say(line: str) -> None:
    print(line, flush=True)


@contextmanager
def standing(folder: Path) -> Iterator[tuple[str, int]]:
    """A gateway with a real tokenizer and an engine that answers at once; its URL, and the most bytes of a body."""
    folder.mkdir(parents=True)
    (folder / "train.jsonl").write_text("{}\n")
    settings = {
        "run_dir": "run",
        "model": {"path": str(qwen_tokenizer_folder("qwen3")), "renderer": "qwen3", "context_tokens": CONTEXT},
        "data": {"train": "train.jsonl"},
        "harness": {"command": ["true"], "max_turns": 10**9},
        "grader": {"command": ["true"]},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(settings))
    port = free_port()
    engine = subprocess.Popen([sys.executable, str(ROOT / "benchmarks/fake_engine.py"), str(port)])
    gateway = Program(folder, "gateway", "gateway", "run.yaml")
    try:
        url = gateway_url(folder / "run", gateway)
        asyncio.run(_register(url, f"http://127.0.0.1:{port}"))
        yield url, load(folder / "run.yaml").max_body_bytes
        until(lambda: gateway.runs, "the gateway runs", 1)
    finally:
        gateway.end()
        engine.kill()
        engine.wait()


async def _register(url: str, engine: str) -> None:
    async with ControlClient(url, control_key(SECRET.encode())) as client:
        await client.put_model("policy", engines=[engine], version=0, lineage="siege", context_tokens=CONTEXT)


def _mutants(folder: Path, count: Any, seed: int) -> tuple[str, list[str]]:
    with standing(folder) as (url, _), watched(url) as asked:
        outcome = asyncio.run(_with_client(url, lambda client: mutants(client, url, count, seed)))
    return _told(outcome, asked), outcome.faults + _bugs(folder / "gateway.out")


def _bodies(folder: Path, kinds: Any, seed: int) -> tuple[str, list[str]]:
    with standing(folder) as (url, limit), watched(url) as asked:
        outcome, wait, opened = asyncio.run(_with_client(url, lambda client: bodies(client, url, limit, kinds)))
    for (kind, path), worst in list(beside(opened, asked).items())[:SHOWN_WAITS]:
        say(f"  /health {1e3 * worst:4.0f} ms at most beside {kind} to {path}")
    line = f"{_told(outcome, asked)}, bodies of {limit >> 20} MiB, an innocent agent waited {1e3 * wait:.0f} ms at most"
    return line, outcome.faults + _bugs(folder / "gateway.out")


async def _with_client(url: str, work: Any) -> Any:
    async with ControlClient(url, control_key(SECRET.encode())) as client:
        return await work(client)


def _told(outcome: Outcome, asked: list[Asked]) -> str:
    seconds = sorted(seconds for _, seconds in asked)
    answers = ", ".join(f"{status}: {n}" for status, n in sorted(outcome.statuses.items()))
    p99 = seconds[int(0.99 * (len(seconds) - 1))]
    return f"{outcome.sent} requests ({answers}), /health worst {1e3 * seconds[-1]:.0f} ms, p99 {1e3 * p99:.0f} ms"


def _bugs(log: Path) -> list[str]:
    return [line for line in log.read_text(errors="replace").splitlines() if "Traceback" in line or " ERROR " in line]


def _kills(mode: str) -> Any:
    def run(folder: Path, count: int, seed: int) -> tuple[str, list[str]]:
        folder.mkdir(parents=True)
        found = campaign(mode, count, seed, make_tiny_model(folder / "model"), folder, say)
        kills = ", ".join(f"{name} {n}" for name, n in sorted(found.kills.items()))
        return f"{found.kills.total()} kills ({kills}) in {found.runs} runs", found.faults

    return run


PARTS = {
    "mutants": _mutants,
    "bodies": _bodies,
    "train": _kills("train"),
    "services": _kills("services"),
    "leftovers": lambda folder, size, seed: leftovers(folder, small=size == "small"),
}

if __name__ == "__main__":
    sys.exit(main())
