"""One run of one harness: real gateway, real controller, scripted engine, all on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import subprocess
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import uvicorn
import yaml
from starlette.applications import Starlette
from starlette.types import Message, Receive, Scope, Send
from tokenizers import Tokenizer

from leyden import run_file
from leyden.client import ControlClient, Rollout, control_key
from leyden.config import RunConfig
from leyden.controller.reconcile import run_controller
from leyden.gateway.app import build
from leyden.gateway.render import ModelRenderer
from leyden.trajectory.kinds import Kind, conversations, samples_without_side_calls
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
FAULTS: tuple[Fault, ...] = ("429", "503", "cut")
SET_FOR_HARNESSES = ("NODE_PATH", "TMUX_TMPDIR")  # where packages are found, where sockets may stay
Mode = Literal["plain", "faults", "pause"]


@dataclass(frozen=True)
class Setup:
    """What all runs share. `scratch` is private and goes away, `logs` stays; a pause lasts `pause_s`."""

    model: Path
    tokenizer: Tokenizer
    renderer: ModelRenderer
    scratch: Path
    logs: Path
    pause_s: float


@dataclass(frozen=True)
class Outcome:
    """What one run showed. `samples` and `forks` leave side calls out.

    `exact`: each turn holds the ids that the engine was asked with and those it answered. `refused` are the gateway's
    answers from 400 on. `faults` counts those that the engine gave, `held_s` is what a pause cost.
    """

    name: str
    mode: Mode
    finished: bool
    exit_code: int | None
    reward: float | None
    reason: str
    protocol: str = ""
    streamed: bool = False
    turns: int = 0
    side_calls: int = 0
    samples: int = 0
    forks: dict[str, int] = field(default_factory=dict)
    counts_equal: bool = False
    exact: bool = False
    refused: list[str] = field(default_factory=list)
    faults: int = 0
    held_s: float = 0.0
    seconds: float = 0.0

    @classmethod
    def broken(cls, name: str, mode: Mode, reason: str) -> Outcome:
        """A run that ended by an error of ours."""
        return cls(name, mode, finished=False, exit_code=None, reward=None, reason=reason)


class _Server(uvicorn.Server):
    """Leaves the signals to whoever runs this."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


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
    async with slots, engines.serving(engine) as engine_url, _serving(config, setup, engine_url) as gateway:
        pause = _pause(gateway.client, engine, slots, setup.pause_s) if mode == "pause" else None
        async with asyncio.timeout(LIMIT_S + setup.pause_s + 60):
            rollout = await _roll_out(config, case, gateway, pause)
        turns = await gateway.client.turns([rollout.rollout_id])
    log = _keep_log(config, rollout, setup.logs / f"{case.name}{'' if mode == 'plain' else '.' + mode}.log")
    shown = _shown(turns, engine) | {"refused": gateway.watch.refused, "faults": engine.faults_given}
    said = END in log
    return Outcome(
        name=case.name,
        mode=mode,
        finished=rollout.exit_code == 0 and rollout.reward == 1.0 and said,
        exit_code=rollout.exit_code,
        reward=rollout.reward,
        reason=rollout.reason or ("" if said else f"did not say {END!r}"),
        held_s=round(rollout.held_s, 1),
        seconds=round((rollout.finished or 0) - (rollout.started or 0), 1),
        **shown,
    )


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
    harness["pass_env"] = list(SET_FOR_HARNESSES)
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
    return run_file.absolute(run_file.parse(document), HERE)


@dataclass(frozen=True)
class _Gateway:
    url: str
    watch: Watch
    client: ControlClient


@contextlib.asynccontextmanager
async def _serving(config: RunConfig, setup: Setup, engine_url: str) -> AsyncIterator[_Gateway]:
    config.run_dir.mkdir()
    watch = Watch(build(config, SECRET, renderer=setup.renderer))
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    settings = uvicorn.Config(watch, http="httptools", log_config=None, timeout_graceful_shutdown=1)
    server = _Server(settings)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        async with ControlClient(url, control_key(SECRET)) as client:
            model = {"version": 0, "lineage": "scripted", "context_tokens": CONTEXT_TOKENS}
            await client.put_model(config.model.name, engines=[engine_url], **model)
            yield _Gateway(url, watch, client)
    finally:
        watch.app.state.feed.close()
        server.should_exit = True
        await serving


async def _roll_out(
    config: RunConfig, case: Case, gateway: _Gateway, pause: Coroutine[Any, Any, None] | None
) -> Rollout:
    """One rollout from its creation to its end, by a controller of its own."""
    stop = asyncio.Event()
    controller = asyncio.create_task(run_controller(config, gateway.url, control_key(SECRET), case.name, stop=stop))
    others = [asyncio.create_task(pause)] if pause else []
    task = {"prompt": PROMPT, "leaves": {name: list(lines) for name, lines in case.leaves.items()}}
    try:
        await gateway.client.create_groups([{"kind": "train", "step": 0, "slot": 0, "size": 1, "task": task}])
        return await _ended(gateway.client, controller)
    finally:
        for other in others:
            other.cancel()
        stop.set()
        await asyncio.gather(controller, *others, return_exceptions=True)


async def _ended(client: ControlClient, controller: asyncio.Task[None]) -> Rollout:
    terminal = [state for state in RolloutState if state.terminal]
    while True:
        rollouts, _ = await client.rollouts(states=terminal, wait_s=5)
        if rollouts:
            return rollouts[0]
        if controller.done():
            controller.result()


async def _pause(client: ControlClient, engine: Engine, slots: asyncio.Semaphore, pause_s: float) -> None:
    """Hold all model calls for a while once the first was answered. Waiting takes no slot."""
    await engine.answered.wait()
    await client.pause()
    slots.release()
    try:
        await asyncio.sleep(pause_s)
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


def _shown(turns: Sequence[Turn], engine: Engine) -> dict[str, Any]:
    """What the recorded turns show, as fields of the outcome."""
    found = conversations(turns)
    side = {turn_id for one in found if one.kind is Kind.SIDE_CALL for turn_id in one.turns}
    return {
        "protocol": ", ".join(sorted({turn.protocol for turn in turns})),
        "streamed": any(turn.streamed for turn in turns if turn.turn_id not in side),
        "turns": len(turns),
        "side_calls": len(side),
        "samples": len(samples_without_side_calls(turns)),
        "forks": dict(Counter(fork.cause for one in found for fork in one.forks)),
        "counts_equal": all(_counts_equal(turn) for turn in turns),
        "exact": all(engine.answered_with.get(prompt) == sampled for prompt, sampled in _calls(turns)),
    }


def _counts_equal(turn: Turn) -> bool:
    return turn.logprobs_T is not None and len(turn.logprobs_T) == len(turn.sampled_T) > 0


def _calls(turns: Sequence[Turn]) -> Iterator[tuple[tuple[int, ...], list[int]]]:
    """The whole prompt and the sampled ids of each turn."""
    ends: dict[int | None, list[int]] = {None: []}
    for turn in turns:
        prompt = ends[turn.parent_id] + turn.delta_P.tolist()
        ends[turn.turn_id] = prompt + turn.sampled_T.tolist()
        yield tuple(prompt), turn.sampled_T.tolist()
