"""Attempts as processes of this machine: folders and commands for the launcher's client."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from leyden.config import GraderConfig, HarnessConfig, RunConfig
from leyden.controller import workspace
from leyden.controller.backends import sandbox
from leyden.controller.backends.interface import Events
from leyden.controller.backends.launcher_client import LauncherClient, LauncherSettings
from leyden.controller.backends.local_jobs import local_jobs
from leyden.controller.jobs import Job, grader_job, harness_job, read_exit
from leyden.controller.launch import RunFacts
from leyden.controller.paths import AttemptPaths, attempt_paths
from leyden.controller.plan import AttemptStatus, Phase
from leyden.errors import ConfigError
from leyden.records import Claim, Rollout
from leyden.types import RolloutState


class LocalBackend:
    """`url` is the gateway's, `parent` the environment that harnesses inherit."""

    def __init__(self, config: RunConfig, url: str, parent: Mapping[str, str], events: Events) -> None:
        self._run = RunFacts.of(config)
        self._workspace = config.workspace
        self._given = config.harness.env
        self._events = events
        for name in ("launcher", "logs", "attempts"):
            (config.run_dir / name).mkdir(mode=0o700, parents=True, exist_ok=True)
        python = interpreter(config.harness)
        check_passed(config.harness, config.grader, parent)
        self._view = sandbox_view(config, python, url)
        self._url = sandbox.inner_url(url) if self._view else url
        self._jobs = local_jobs(config, self._url, parent)
        settings = LauncherSettings(
            state=config.run_dir / "launcher",
            log=config.run_dir / "logs" / "launcher.log",
            python=python,
            preload=(*config.harness.preload, *_grader_modules(config.grader, python)),
            environment=self._jobs.preload_environment(),
            limits=config.harness.limits.model_dump(exclude_none=True),
        )
        self._launcher = LauncherClient(settings, events.ended)

    @property
    def running(self) -> dict[str, float]:
        """Ids of the jobs that run, with their start (Unix seconds)."""
        return self._launcher.running

    async def open(self) -> None:
        await self._launcher.open()

    async def supervise(self) -> None:
        await self._launcher.supervise()

    async def start_harness(self, claim: Claim) -> None:
        rollout = claim.rollout
        paths = self._paths(rollout.rollout_id, rollout.attempt)
        await asyncio.to_thread(workspace.prepare, self._workspace, self._run, rollout, paths)
        job = self._jobs.harness(rollout, claim.agent_key)
        if self._view:
            job = self._sandboxed(job, paths.tmp, self._view.readable)
        await self._launcher.start(job)
        self._events.started(job.job_id, time.time())

    async def start_grader(self, rollout: Rollout, key: str, number: int) -> None:
        paths = self._paths(rollout.rollout_id, rollout.attempt)
        await asyncio.to_thread(workspace.ready_to_grade, rollout.task, paths, number)
        job = self._jobs.grader(rollout, key, number)
        if self._view:
            job = self._sandboxed(job, paths.grade_tmp, self._view.grader_readable)
        await self._launcher.start(job)
        self._events.started(job.job_id, time.time())

    def _sandboxed(self, job: Job, tmp: Path, readable: tuple[Path, ...]) -> Job:
        assert self._view is not None
        workspace.empty(tmp)
        (tmp / sandbox.SHM).mkdir()
        return sandbox.wrap(job, self._view, self._url, tmp, readable=readable, given=self._given)

    def kill(self, job_id: str, reason: str) -> None:
        self._launcher.kill(job_id, reason)

    def find(self, rollout: Rollout) -> AttemptStatus:
        """From the jobs that run and the files that an attempt left.

        Without a job that runs or an exit.json it is lost, for instance because the controller was killed between
        its claim and the start.
        """
        rollout_id, number = rollout.rollout_id, rollout.attempt
        paths, running = self._paths(rollout_id, number), self.running
        job = harness_job(rollout_id, number)
        if job in running:
            return AttemptStatus(rollout_id, number, Phase.RUNNING, started=running[job])
        exit_ = read_exit(paths.root)
        if exit_ is None:
            return AttemptStatus(rollout_id, number, Phase.LOST)
        attempt = AttemptStatus(rollout_id, number, Phase.EXITED, started=exit_.started, exit=exit_)
        if rollout.state is not RolloutState.GRADING:
            return attempt
        tries = workspace.grade_tries(paths) + 1
        grader = grader_job(rollout_id, number, tries)
        if grader in running:
            return replace(attempt, phase=Phase.GRADING, tries=tries, started=running[grader])
        graded = read_exit(paths.grade)
        if graded is not None:
            return replace(attempt, phase=Phase.GRADED, tries=tries, grader_exit=graded)
        return attempt

    async def forget(self, attempt: AttemptStatus, *, keep: bool) -> None:
        paths = self._paths(attempt.rollout_id, attempt.attempt)
        if paths.root.parent.is_symlink():
            return  # nothing below is the attempt's
        private = [paths.tmp, paths.grade_tmp] if self._view else []
        for folder in [*private, *([] if keep else [paths.workspace])]:
            await asyncio.to_thread(workspace.remove, folder)

    def where(self, attempt: AttemptStatus) -> str:
        paths = self._paths(attempt.rollout_id, attempt.attempt)
        return f"log: {paths.grade_log if attempt.tries else paths.harness_log}"

    async def stop(self) -> None:
        await self._launcher.stop()

    async def close(self) -> None:
        await self._launcher.close()

    def _paths(self, rollout_id: str, attempt: int) -> AttemptPaths:
        return attempt_paths(self._run.run_dir, rollout_id, attempt)


def sandbox_view(config: RunConfig, python: str, url: str) -> sandbox.View | None:
    """What a sandboxed attempt sees; None without `harness.sandbox`. Raises ConfigError if there can be no sandbox."""
    if config.harness.sandbox == "none":
        return None
    code = config.config_dir if config.grader.function else None
    return sandbox.look(config.harness, config.run_dir, python, sys.executable, url, code)


def _grader_modules(grader: GraderConfig, python: str) -> tuple[str, ...]:
    """What a grader function's process needs besides the function, if it is forked from the launcher."""
    forked = grader.function is not None and python == sys.executable
    return ("leyden.client.reward",) if forked else ()


def check_passed(harness: HarnessConfig, grader: GraderConfig, parent: Mapping[str, str]) -> None:
    """Raises ConfigError for a variable to be passed on that is not set."""
    for key, names in (("harness.pass_env", harness.pass_env), ("grader.pass_env", grader.pass_env)):
        missing = [name for name in names if name not in parent]
        if missing:
            raise ConfigError(key, f"{missing[0]} is not set where Leyden was started; set it, or take it out")


def interpreter(harness: HarnessConfig) -> str:
    """The absolute path of `harness.python`, or of this interpreter."""
    named = harness.python
    if named is None:
        return sys.executable
    found = named if os.sep in named else shutil.which(named)
    if found is None or not os.access(found, os.X_OK):
        raise ConfigError("harness.python", f"{named!r} is not an executable; give the path of an interpreter")
    return str(Path(found).absolute())
