"""`leyden rollout`: one rollout whose harness is a person at another terminal.

Everything runs as in training (gateway, engine, controller, grader), in a run folder of its own. Only the harness is
`handover.py`: it sends its environment through a pipe, and ends when the person says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import orjson
from rich.console import Console

from leyden.cli import handover
from leyden.cli.evaluating import choose_checkpoint, choose_tasks
from leyden.cli.record import record_of
from leyden.cli.show import show_rollout
from leyden.cli.signals import Stopped, run_until_signal
from leyden.config import RunConfig
from leyden.controller.environment import INHERITED
from leyden.doctor.preflight import before_rollouts
from leyden.errors import ConfigError, LeydenError
from leyden.run_file import load
from leyden.trainer.display import Display
from leyden.trainer.run import Command, evaluate_once
from leyden.trainer.tasks import TaskSet, parse_task

LOOK_EVERY_S = 1.0
LONGEST_S = 7 * 24 * 3600
FAMILIES = {
    "OpenAI SDK and what is built on it": ("OPENAI_BASE_URL", "OPENAI_API_BASE", "OPENAI_API_KEY"),
    "Anthropic SDK, Claude Code": ("ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN"),
    "Google SDK, Gemini CLI": ("GOOGLE_GEMINI_BASE_URL", "GEMINI_API_KEY", "GOOGLE_API_KEY"),
}


@dataclass(frozen=True, slots=True)
class Choice:
    """Which task: its JSON text, or the place of one in a split."""

    task: str | None
    index: int | None
    split: str

    def of(self, config: RunConfig) -> TaskSet:
        """Raises ConfigError that names the option."""
        if self.task is not None and self.index is not None:
            raise ConfigError("--task", "--index names a task too; give one of them")
        if self.task is not None:
            return TaskSet(Path("--task"), (parse_task(self.task, "--task", "the text"),), "")
        tasks, index = choose_tasks(config, self.split, None), self.index or 0
        if index >= len(tasks):
            raise ConfigError(
                "--index", f"{index} is past the last of {len(tasks)} tasks of {self.split}, counted from 0"
            )
        return TaskSet(tasks.path, (tasks.tasks[index],), tasks.sha256)


def run_by_hand(
    run_file: Path, overrides: tuple[str, ...], secret: bytes | None, *, choice: Choice, checkpoint: str
) -> None:
    """Raises ConfigError for what the run file or the options get wrong."""
    with tempfile.TemporaryDirectory(prefix="leyden-rollout-") as folder:
        for name in (handover.ENVIRONMENT, handover.DONE):
            os.mkfifo(Path(folder) / name, 0o600)
        configured = load(run_file, list(overrides))
        run_dir = configured.run_dir / "rollouts" / time.strftime("%Y%m%d-%H%M%S")
        all_overrides = (*overrides, *_by_hand(run_dir, folder))
        config = load(run_file, list(all_overrides))
        before_rollouts(config, secret, os.environ)
        tasks, chosen = choice.of(configured), choose_checkpoint(configured.run_dir, configured.engine.urls, checkpoint)
        display = Display()
        work = _rollout(config, tasks, Command(run_file, all_overrides, secret), display, chosen, Path(folder))
        try:
            run_until_signal(work, on_stop=lambda: display.line("stopping; nothing is graded"))
        except Stopped as stopped:
            sys.exit(stopped.exit_status)
        finally:
            display.clear()
    show_rollout(run_dir, "eval-", secret)
    display.line(f"leyden show {shlex.quote(str(run_dir))} shows it again")


def _by_hand(run_dir: Path, folder: str) -> list[str]:
    """What replaces the run file's own: a place for a person, on this machine, with a gateway of its own."""
    settings = {
        "run_dir": str(run_dir),
        "harness.command": [sys.executable, "-I", handover.__file__, folder],
        "harness.preload": [],
        "harness.sandbox": "none",
        "harness.readable": [],
        "harness.limits": {},
        "harness.timeout_s": LONGEST_S,
        "harness.max_attempts": 1,
        "gateway.url": None,
        "controller.start": True,
        "controller.backend": "local",
    }
    return [f"{key}={json.dumps(value)}" for key, value in settings.items()]


async def _rollout(
    config: RunConfig, tasks: TaskSet, command: Command, display: Display, checkpoint: Path | None, folder: Path
) -> None:
    display.live("starting the gateway and the engine")
    quiet = Display(Console(quiet=True))
    rollout = asyncio.create_task(evaluate_once(config, tasks, command, quiet, folder=checkpoint, samples=1, ks=[1]))
    person = asyncio.create_task(_attend(config, display, folder))
    try:
        await asyncio.wait({rollout, person}, return_when=asyncio.FIRST_COMPLETED)
        if person.done():
            person.result()
            display.live("grading")
        await rollout
    finally:
        for task in (person, rollout):
            task.cancel()
        await asyncio.wait({person, rollout})


async def _attend(config: RunConfig, display: Display, folder: Path) -> None:
    """Show what an agent needs, wait until the person is done, and tell the harness."""
    async with _pipe(folder / handover.ENVIRONMENT) as pipe:
        environment = orjson.loads(await pipe.read())
    exports, shown = folder / "env.sh", shell(environment, os.environ)
    exports.touch(mode=0o600)
    exports.write_text("\n".join(shown) + "\n", encoding="utf-8")
    for line in ["in another terminal:", "", f"source {exports}", "", "which says:", "", *shown, ""]:
        display.line(line)
    done = _end_of_line()
    while not done.is_set():
        calls = await _calls(config)
        display.live(f"waiting: {calls} model calls so far; press Enter when the agent is done, Ctrl-C to give up")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(done.wait(), LOOK_EVERY_S)
    display.clear()
    with contextlib.suppress(OSError):  # nobody reads: the harness's place has ended
        os.close(os.open(folder / handover.DONE, os.O_WRONLY | os.O_NONBLOCK))


def shell(environment: Mapping[str, str], own: Mapping[str, str]) -> list[str]:
    """Lines of a shell that give an agent what the harness would have been given, by family of SDK."""
    families = {name for names in FAMILIES.values() for name in names}
    others = sorted(
        name
        for name, value in environment.items()
        if name not in families | INHERITED | {"PWD", "OLDPWD", "SHLVL", "_"} and own.get(name) != value
    )
    lines = []
    for title, names in {**FAMILIES, "this rollout": tuple(others)}.items():
        lines.append(f"# {title}")
        lines += [f"export {name}={shlex.quote(environment[name])}" for name in names if name in environment]
    return [*lines, f"cd {shlex.quote(environment['LEYDEN_WORKSPACE'])}"]


async def _calls(config: RunConfig) -> int:
    try:
        async with record_of(config.run_dir, config, None) as record:
            rollouts, _ = await record.rollouts(tasks=False)
    except LeydenError:
        return 0
    return sum(rollout.turns for rollout in rollouts)


def _end_of_line() -> asyncio.Event:
    """Set when standard input gives a line, or ends."""
    done, loop = asyncio.Event(), asyncio.get_running_loop()

    def read() -> None:
        os.read(0, 1)
        with contextlib.suppress(RuntimeError):  # the loop is closed: somebody gave up
            loop.call_soon_threadsafe(done.set)

    threading.Thread(target=read, daemon=True).start()
    return done


@contextlib.asynccontextmanager
async def _pipe(path: Path) -> AsyncIterator[asyncio.StreamReader]:
    """The reading end of a named pipe, whose writer may come later."""
    reader = asyncio.StreamReader()
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), file
    )
    try:
        yield reader
    finally:
        transport.close()
