"""Controllers and launchers as processes of their own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from leyden.config import RunConfig
from leyden.controller.backends.launcher_client import LauncherClient, LauncherSettings
from leyden.controller.jobs import Exit, Job
from tests.controller.live_gateway import LiveGateway

Config = Callable[..., RunConfig]
Left = Callable[[], list[str]]


PROGRAM = """
import asyncio, logging, pathlib, sys
from leyden.config import RunConfig
from leyden.controller.reconcile import run_controller
logging.basicConfig(level="INFO")
config = RunConfig.model_validate_json(pathlib.Path(sys.argv[1]).read_text())
asyncio.run(run_controller(config, sys.argv[2], sys.stdin.readline().strip(), "c", stop=asyncio.Event()))
"""


def start_controller(config: RunConfig, gateway: LiveGateway) -> subprocess.Popen[bytes]:
    """A controller as a process of its own, in the test's folder."""
    path = config.config_dir / "config.json"
    path.write_text(config.model_dump_json())
    with (config.config_dir / "controller.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(path), gateway.url],
            stdin=subprocess.PIPE,
            stderr=log,
            cwd=config.config_dir,
        )
    assert process.stdin is not None
    with process.stdin as key:
        key.write(gateway.key.encode() + b"\n")
    return process


def kill9(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def starts(config: RunConfig) -> dict[str, int]:
    """How often each attempt's harness was started; the harness itself appends a line."""
    return {
        f"{p.parent.parent.name}/{p.parent.name}": len(p.read_text().splitlines())
        for p in config.run_dir.glob("attempts/*/*/starts")
    }


async def wait_until(condition: Callable[[], bool], limit_s: float = 100.0) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110  (processes and files send no event)
            await asyncio.sleep(0.02)


async def appears(path: Path) -> None:
    await wait_until(path.exists)


def grader_after(first: str) -> str:
    return f"{first}; exec {sys.executable} -c 'from leyden.client import post_reward; post_reward(1.0)'"


def launchers(config: RunConfig) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if str(config.run_dir) in " ".join(process.cmdline()) and "leyden_launcher" in process.cmdline()[1]:
                found.append(process)
    return [p for p in found if not any(q.pid == p.ppid() for q in found)]


class Runner:
    """A backend on a folder of its own that waits for the ends of jobs."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder = folder
        self.ends: dict[str, Exit] = {}
        self.changed = asyncio.Event()
        (folder / "state").mkdir(mode=0o700, parents=True, exist_ok=True)
        environment = dict(os.environ) | settings.pop("environment", {})
        known = {"python": sys.executable, "preload": (), "orphan_grace_s": 60.0} | settings
        self.backend = LauncherClient(
            LauncherSettings(folder / "state", folder / "launcher.log", environment=environment, **known), self.on_end
        )

    def on_end(self, job_id: str, exit_: Exit) -> None:
        assert job_id not in self.ends
        self.ends[job_id] = exit_
        self.changed.set()

    async def __aenter__(self) -> Runner:
        await self.backend.open()
        self.task = asyncio.create_task(self.backend.supervise())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.backend.stop()
        await self.task

    def job(self, name: str, *argv: str, fork: bool = False, learn: bool = False, **env: str) -> Job:
        directory = self.folder / name
        directory.mkdir(exist_ok=True)
        environment = dict(os.environ) | env
        return Job(name, directory, argv, directory, environment, directory / "log", 1 << 20, fork, learn)

    async def run(self, name: str, *argv: str, **options: Any) -> tuple[Exit, str]:
        job = self.job(name, *argv, **options)
        await self.backend.start(job)
        async with asyncio.timeout(100):
            while name not in self.ends:
                self.changed.clear()
                await self.changed.wait()
        return self.ends[name], job.log.read_text()


def targets(pid: int) -> list[str]:
    """What the descriptors of a process refer to."""
    found = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.append(str(path.readlink()))
    return found
