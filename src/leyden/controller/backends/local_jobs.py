"""The jobs of a run's attempts on this machine. Pure; `workspace` makes the folders."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from leyden.config import HarnessConfig, RunConfig
from leyden.controller import grade
from leyden.controller.environment import inherited
from leyden.controller.jobs import Job, grader_job, harness_job
from leyden.controller.launch import Invocation, Invocations, RunFacts, check_size
from leyden.controller.paths import AttemptPaths, attempt_paths
from leyden.records import Rollout


@dataclass(frozen=True, slots=True)
class LocalJobs:
    """`parent` is the environment that Leyden runs in."""

    invocations: Invocations
    parent: Mapping[str, str]

    def harness(self, rollout: Rollout, key: str) -> Job:
        """Raises LaunchError if a template cannot be rendered, or for what no program can be started with."""
        paths, settings = self._paths(rollout), self._settings
        started = self.invocations.of_harness(rollout, key, paths.place)
        environment = self._environment(started, paths, settings.pass_env)
        check_size("harness.command", started.argv, environment)
        return Job(
            job_id=harness_job(rollout.rollout_id, rollout.attempt),
            directory=paths.root,
            argv=started.argv,
            cwd=paths.workspace,
            env=environment,
            log=paths.harness_log,
            log_bytes=settings.log_bytes,
            fork=bool(settings.preload),
            learn=bool(settings.preload),
            limits=settings.limits.model_dump(exclude_none=True),
            folders=(paths.workspace,),
            files=(paths.task,),
        )

    def grader(self, rollout: Rollout, key: str, number: int) -> Job:
        """The `number`-th try of the grader. Raises LaunchError, as `harness` does."""
        paths, grader = self._paths(rollout), self.invocations.grader
        started = self.invocations.of_grader(rollout, key, paths.place)
        return Job(
            job_id=grader_job(rollout.rollout_id, rollout.attempt, number),
            directory=paths.grade,
            argv=started.argv,
            cwd=paths.workspace,
            env=self._environment(started, paths, grader.pass_env),
            log=paths.grade_log,
            log_bytes=self._settings.log_bytes,
            fork=grader.function is not None,
            limits=self._settings.limits.model_dump(exclude_none=True),
            folders=(paths.workspace,),
            counts_found=False,
            files=(paths.task, paths.harness_log, paths.exit),
        )

    def preload_environment(self) -> dict[str, str]:
        return self.invocations.preload_environment(inherited(self.parent, self._settings.pass_env))

    @property
    def _settings(self) -> HarnessConfig:
        return self.invocations.harness

    def _paths(self, rollout: Rollout) -> AttemptPaths:
        return attempt_paths(self.invocations.run.run_dir, rollout.rollout_id, rollout.attempt)

    def _environment(self, started: Invocation, paths: AttemptPaths, pass_env: list[str]) -> dict[str, str]:
        base = inherited(self.parent, pass_env) | {"PWD": str(paths.workspace)}
        return started.environment(self.invocations.url, base)


def local_jobs(config: RunConfig, url: str, parent: Mapping[str, str]) -> LocalJobs:
    """`url` is the gateway's as the jobs reach it. A grader function runs under the controller's interpreter."""
    runner = (sys.executable, str(Path(grade.__file__)))
    return LocalJobs(Invocations(RunFacts.of(config), config.harness, config.grader, url, runner), parent)
