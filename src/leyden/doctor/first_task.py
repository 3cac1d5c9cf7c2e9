"""The tasks, and what the run file makes of the first one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from leyden.config import DataConfig, RunConfig, WorkspaceConfig
from leyden.controller import workspace
from leyden.controller.launch import RunFacts
from leyden.controller.paths import AttemptPaths
from leyden.doctor.findings import Finding, ok, problem
from leyden.doctor.manifests import ROLLOUT, claim_of
from leyden.doctor.preflight import check_launch
from leyden.errors import ConfigError, LaunchError
from leyden.trainer.tasks import TaskSet, read_tasks
from leyden.types import Json


def check_data(data: DataConfig) -> tuple[list[Finding], Json | None]:
    """The first training task comes with it, where there is one."""
    named = [("data.train", data.train), ("data.validation", data.validation)]
    findings: list[Finding] = []
    found: dict[str, TaskSet] = {}
    for key, path in named:
        if path is None:
            continue
        try:
            found[key] = read_tasks(path, key)
        except ConfigError as error:
            findings.append(problem("data", str(error), f"give {key} a file with one JSON object a line"))
    if findings:
        return findings, found["data.train"].tasks[0] if "data.train" in found else None
    counts = [f"{len(tasks)} tasks in {tasks.path.name}" for tasks in found.values()]
    return [ok("data", ", ".join(counts))], found["data.train"].tasks[0]


def check_templates(config: RunConfig, task: Json, folder: Path, parent: Mapping[str, str]) -> Finding:
    """Command, environment and workspace of the first task. `folder` gets an attempt; `parent` is the environment.

    Raises ConfigError for a program that is not there.
    """
    try:
        check_launch(config, task, parent)
        if config.controller.backend == "local":
            _prepare(config.workspace, replace(RunFacts.of(config), run_dir=folder), task)
    except LaunchError as error:
        advice = f"the first task has the fields {', '.join(sorted(task)) or 'none'}"
        return problem("templates", f"the first task cannot be launched: {error}", advice)
    return ok("templates", _rendered(config))


def _prepare(settings: WorkspaceConfig, run: RunFacts, task: Json) -> None:
    paths = AttemptPaths(run.run_dir / "attempts" / ROLLOUT / "1")
    try:
        workspace.prepare(settings, run, claim_of(ROLLOUT, task).rollout, paths)
    finally:
        workspace.remove(paths.root)


def _rendered(config: RunConfig) -> str:
    parts = ["command"]
    if config.harness.env:
        parts.append(f"{len(config.harness.env)} variables")
    if config.grader.command:
        parts.append("grader command")
    if config.controller.backend == "kubernetes":
        parts.append("Job")
    if config.workspace.template or config.workspace.files:
        parts.append("workspace")
    return f"{', '.join(parts)} of the first task"
