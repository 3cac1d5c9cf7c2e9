"""One run of one harness: real gateway, real controller, scripted engine, all on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import subprocess
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import uvicorn
import yaml
from starlette.applications import Starlette
from starlette.types import Message, Receive, Scope, Send
from tokenizers import Tokenizer

from leyden import config as run_file
from leyden.client import ControlClient, Rollout, control_key
from leyden.config import RunConfig
from leyden.controller.loop import run_controller
from leyden.gateway.app import build
from leyden.gateway.render import ModelRenderer
from leyden.trajectory.samples import build_samples
from leyden.types import RolloutState, Turn
from tests.harnesses import engine as engines
from tests.harnesses.cases import Case
from tests.harnesses.engine import Engine, Fault
from tests.harnesses.install import PACKAGES, Python, installed
from tests.harnesses.script import END

HERE = Path(__file__).parent
SECRET = b"s" * 32
CONTEXT_TOKENS = 262_144
PROMPT = "Run the shell command echo hi, then say done."
LIMIT_S = 300.0
PAUSE_S = 60.0
FAULTS: tuple[Fault, ...] = ("429", "503", "cut")
Mode = Literal["plain", "faults", "pause"]


@dataclass(frozen=True)
class Setup:
    """What all runs share. `scratch` is private and goes away, `logs` stays."""

    model: Path
    tokenizer: Tokenizer
    renderer: ModelRenderer
    scratch: Path
    logs: Path


@dataclass(frozen=True)
class Outcome:
    """What one run showed. `samples` and `forks` leave side calls out; `refused` are the gateway's answers from 400."""

    name: str
    mode: Mode
    finished: bool
    exit_code: int | None
    reward: float | None
    reason: str
    protocol: str
    streamed: bool
    turns: int
    side_calls: int
    samples: int
    forks: dict[str, int]
    counts_equal: bool
    refused: list[str]
    faults: int
    seconds: float


class Watch:
    """The gateway's application with the status of each answer to a harness kept."""

    def __init__(self, app: Starlette) -> None:
        self.app = app
        self.refused: list[str] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] >= 400:
                self.refused.append(f"{message['status']} {scope['method']} {scope['path']}")
            await send(message)

        ours = scope["type"] != "http" or scope["path"].startswith("/api/")
        await self.app(scope, receive, send if ours else sent)


async def run(case: Case, setup: Setup, mode: Mode, slots: asyncio.Semaphore) -> Outcome:
    """Run the case once, while holding one of `slots` except in a pause."""
    folder = setup.scratch / mode / case.name
    folder.mkdir(parents=True)
    config = _config(case, setup, folder)
    engine = Engine(setup.tokenizer, case.says, FAULTS if mode == "faults" else ())
    async with slots, engines.serving(engine) as engine_url, _gateway(config, setup, engine_url) as (watch, client):
        rollout = await _roll_out(config, case, client, _paused(client, engine, slots) if mode == "pause" else None)
        turns = await client.turns([rollout.rollout_id])
    log = _keep_log(config, rollout, setup.logs / f"{case.name}{'' if mode == 'plain' else '.' + mode}.log")
    return _outcome(case, mode, rollout, turns, log, watch.refused, engine.faults_given)


def make_repository(folder: Path) -> None:
    """The scratch git repository that each run gets a copy of."""
    folder.mkdir()
    (folder / "README.md").write_text("A scratch repository.\n")
    settings = ("user.name=test", "user.email=test@localhost", "gc.auto=0")
    subprocess.run(["git", "init", "--quiet", "--initial-branch=main"], cwd=folder, check=True)
    for name, _, value in (setting.partition("=") for setting in settings):
        subprocess.run(["git", "config", name, value], cwd=folder, check=True)
    subprocess.run(["git", "add", "."], cwd=folder, check=True)
    subprocess.run(["git", "commit", "--quiet", "--message=first"], cwd=folder, check=True)


def _config(case: Case, setup: Setup, folder: Path) -> RunConfig:
    """The launcher's section of a run file, in a run of its own."""
    harness = yaml.safe_load((HERE / "launchers" / case.file).read_text())["harness"]
    harness |= {"env": {**harness["env"], **case.env}, "timeout_s": LIMIT_S, "max_attempts": 1}
    if isinstance(PACKAGES[case.package], Python):
        harness["python"] = str(installed() / case.package / "bin" / "python")
    document: dict[str, Any] = {
        "run_dir": str(folder / "run"),
        "model": {"path": str(setup.model), "renderer": "qwen3", "context_tokens": CONTEXT_TOKENS},
        "data": {"train": "none.jsonl"},
        "workspace": {"template": str(setup.scratch / "repository"), "keep": "all"},
        "harness": harness,
        "grader": {"function": "grading:grade"},
    }
    return run_file.parse(document).model_copy(update={"config_dir": HERE})


@contextlib.asynccontextmanager
async def _gateway(config: RunConfig, setup: Setup, engine_url: str) -> AsyncIterator[tuple[Watch, ControlClient]]:
    config.run_dir.mkdir()
    watch = Watch(build(config, SECRET, renderer=setup.renderer))
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    settings = uvicorn.Config(watch, http="httptools", log_config=None, timeout_graceful_shutdown=1)
    server = uvicorn.Server(settings)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        async with ControlClient(url, control_key(SECRET)) as client:
            model = {"version": 0, "lineage": "scripted", "context_tokens": CONTEXT_TOKENS}
            await client.put_model(config.model.name, engines=[engine_url], **model)
            (config.run_dir / "url").write_text(url)
            yield watch, client
    finally:
        watch.app.state.feed.close()
        server.should_exit = True
        await serving


async def _roll_out(config: RunConfig, case: Case, client: ControlClient, pause: Any) -> Rollout:
    """One rollout from its creation to its end, by a controller of its own."""
    stop = asyncio.Event()
    url = (config.run_dir / "url").read_text()
    controller = asyncio.create_task(run_controller(config, url, control_key(SECRET), case.name, stop=stop))
    others = [asyncio.create_task(pause)] if pause else []
    task = {"prompt": PROMPT, "leaves": {name: list(lines) for name, lines in case.leaves.items()}}
    try:
        await client.create_groups([{"kind": "train", "step": 0, "slot": 0, "size": 1, "task": task}])
        return await _ended(client, controller)
    finally:
        for other in others:
            other.cancel()
        stop.set()
        await asyncio.gather(controller, *others, return_exceptions=True)


async def _ended(client: ControlClient, controller: asyncio.Task[None]) -> Rollout:
    terminal = [state for state in RolloutState if state.terminal]
    until = time.monotonic() + LIMIT_S + 60
    while time.monotonic() < until:
        rollouts, _ = await client.rollouts(states=terminal, wait_s=5)
        if rollouts:
            return rollouts[0]
        if controller.done():
            controller.result()
    raise TimeoutError("the rollout did not end")


async def _paused(client: ControlClient, engine: Engine, slots: asyncio.Semaphore) -> None:
    """Hold all model calls for PAUSE_S once the first was answered. Waiting takes no slot."""
    await engine.answered.wait()
    await client.pause()
    slots.release()
    try:
        await asyncio.sleep(PAUSE_S)
    finally:
        await slots.acquire()
        await client.resume()


def _keep_log(config: RunConfig, rollout: Rollout, kept: Path) -> str:
    log = config.run_dir / "attempts" / rollout.rollout_id / str(rollout.attempt) / "harness.log"
    kept.parent.mkdir(parents=True, exist_ok=True)
    if not log.exists():
        kept.write_text("")
        return ""
    shutil.copy(log, kept)
    return log.read_text(errors="replace")


def _outcome(
    case: Case, mode: Mode, rollout: Rollout, turns: Sequence[Turn], log: str, refused: list[str], faults: int
) -> Outcome:
    with_tools = any(turn.tools for turn in turns)
    side = {turn.turn_id for turn in turns if with_tools and not turn.tools}
    main = [turn for turn in turns if turn.turn_id not in side]
    samples = [s for s in build_samples(turns).samples if not side & {s.turn_ids[-1]}]
    said = END in log
    return Outcome(
        name=case.name,
        mode=mode,
        finished=rollout.exit_code == 0 and rollout.reward == 1.0 and said,
        exit_code=rollout.exit_code,
        reward=rollout.reward,
        reason=rollout.reason or ("" if said else f"did not say {END!r}"),
        protocol=", ".join(sorted({turn.protocol for turn in turns})),
        streamed=any(turn.streamed for turn in main),
        turns=len(turns),
        side_calls=len(side),
        samples=len(samples),
        forks=dict(Counter(turn.fork_cause for turn in main if turn.fork_cause)),
        counts_equal=all(_counts_equal(turn) for turn in turns),
        refused=refused,
        faults=faults,
        seconds=round((rollout.finished or 0) - (rollout.started or 0), 1),
    )


def _counts_equal(turn: Turn) -> bool:
    return turn.logprobs_T is not None and len(turn.logprobs_T) == len(turn.sampled_T) > 0
