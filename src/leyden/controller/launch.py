"""What a harness or grader is started with: command, environment, folders. Pure; `workspace.py` does the writing."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from jinja2 import UndefinedError

from leyden.config import RunConfig
from leyden.controller.environment import inherited, reaching
from leyden.controller.jobs import Job, grader_job, harness_job
from leyden.controller.templates import render, render_strictly
from leyden.errors import LaunchError
from leyden.types import Json

MOST_TEXT_BYTES = 32 * 4096 - 1  # MAX_ARG_STRLEN of Linux, with its NUL
POINTER_BYTES = 8
TASK_FILE = "let the harness read the task from the file that LEYDEN_TASK names"
GRADE = Path(__file__).with_name("grade.py")
# What a harness is told to use; named in the warning about a harness that made no call.
BASE_URL_VARIABLES = ("OPENAI_BASE_URL", "OPENAI_API_BASE", "ANTHROPIC_BASE_URL", "GOOGLE_GEMINI_BASE_URL")


@dataclass(frozen=True, slots=True)
class AttemptPaths:
    """The files of one attempt, `run_dir/attempts/ROLLOUT/ATTEMPT`."""

    root: Path

    @property
    def settled(self) -> Path:
        """There once the attempt is cleaned up after; beside the attempts, where a harness does not write."""
        return self.root.parents[2] / "settled" / f"{self.root.parent.name}.{self.root.name}"

    @property
    def task(self) -> Path:
        return self.root / "task.json"

    @property
    def workspace(self) -> Path:
        return self.root / "workspace"

    @property
    def harness_log(self) -> Path:
        return self.root / "harness.log"

    @property
    def exit(self) -> Path:
        return self.root / "exit.json"

    @property
    def tmp(self) -> Path:
        """A sandboxed harness's /tmp; its grader's is `grade_tmp`."""
        return self.root / "tmp"

    @property
    def grade_tmp(self) -> Path:
        return self.grade / "tmp"

    @property
    def grade(self) -> Path:
        return self.root / "grade"

    @property
    def grade_log(self) -> Path:
        return self.grade / "grade.log"


def attempt_paths(run_dir: Path, rollout_id: str, attempt: int) -> AttemptPaths:
    """Raises LaunchError for an id that is not a plain file name."""
    if not is_plain_name(rollout_id):
        what = f"rollout id {rollout_id!r} has characters other than letters, digits, - and _"
        raise LaunchError(what, final=True)
    return AttemptPaths(run_dir / "attempts" / rollout_id / str(attempt))


def is_plain_name(rollout_id: str) -> bool:
    return bool(rollout_id) and all(c.isalnum() or c in "-_" for c in rollout_id)


def variables(config: RunConfig, rollout_id: str, task: Json, paths: AttemptPaths) -> dict[str, Any]:
    """What the templates of the run file may use."""
    return {
        "task": task,
        "workspace": str(paths.workspace),
        "rollout_id": rollout_id,
        **_static_variables(config),
    }


def harness(
    config: RunConfig,
    url: str,
    key: str,
    rollout_id: str,
    attempt: int,
    task: Json,
    parent: Mapping[str, str],
) -> Job:
    """The job of an attempt's harness. Raises LaunchError if a template cannot be rendered."""
    paths = attempt_paths(config.run_dir, rollout_id, attempt)
    known = variables(config, rollout_id, task, paths) | {"url": url}
    environment = inherited(parent, config.harness.pass_env) | endpoints(url) | model_keys(key)
    environment |= _own(config, rollout_id, attempt, paths) | {"LEYDEN_URL": url, "LEYDEN_KEY": key}
    if config.grader.harness:
        environment |= reward_address(url)
    environment = reaching(_host(url), environment, rendered_env(config, known))
    argv = rendered_command("harness.command", config.harness.command, known)
    check_size("harness.command", argv, environment)
    return Job(
        job_id=harness_job(rollout_id, attempt),
        directory=paths.root,
        argv=argv,
        cwd=paths.workspace,
        env=environment,
        log=paths.harness_log,
        log_bytes=config.harness.log_bytes,
        fork=bool(config.harness.preload),
        learn=bool(config.harness.preload),
        limits=config.harness.limits.model_dump(exclude_none=True),
        folders=(paths.workspace,),
        files=(paths.task,),
    )


def grader(
    config: RunConfig,
    url: str,
    key: str,
    rollout_id: str,
    attempt: int,
    task: Json,
    number: int,
    parent: Mapping[str, str],
    python: str,
) -> Job:
    """The job of an attempt's grader. A function runs under `python`, the controller's interpreter."""
    paths = attempt_paths(config.run_dir, rollout_id, attempt)
    known = variables(config, rollout_id, task, paths)
    environment = inherited(parent, config.grader.pass_env) | _own(config, rollout_id, attempt, paths)
    environment |= reward_address(url) | {
        "LEYDEN_KEY": key,
        "LEYDEN_HARNESS_LOG": str(paths.harness_log),
        "LEYDEN_EXIT": str(paths.exit),
    }
    if config.grader.function:
        argv: tuple[str, ...] = (python, str(GRADE), config.grader.function, str(config.config_dir))
    else:
        argv = rendered_command("grader.command", config.grader.command or [], known)
    return Job(
        job_id=grader_job(rollout_id, attempt, number),
        directory=paths.grade,
        argv=argv,
        cwd=paths.workspace,
        env=reaching(_host(url), environment, {}),
        log=paths.grade_log,
        log_bytes=config.harness.log_bytes,
        fork=config.grader.function is not None,
        limits=config.harness.limits.model_dump(exclude_none=True),
        folders=(paths.workspace,),
        counts_found=False,
        files=(paths.task, paths.harness_log, paths.exit),
    )


def launcher_environment(config: RunConfig, url: str, parent: Mapping[str, str]) -> dict[str, str]:
    """What modules see while they are preloaded: the harness's variables without keys and without what names a task."""
    environment = inherited(parent, config.harness.pass_env) | endpoints(url)
    given: dict[str, str] = {}
    for name, text in config.harness.env.items():
        try:
            given[name] = render_strictly(f"harness.env.{name}", text, _static_variables(config) | {"url": url})
        except UndefinedError:
            continue
    return reaching(_host(url), environment, given)


def _static_variables(config: RunConfig) -> dict[str, Any]:
    return {
        "run_dir": str(config.run_dir),
        "config_dir": str(config.config_dir),
        "model": config.model.name,
    }


def rendered_command(name: str, command: list[str], known: Mapping[str, Any]) -> tuple[str, ...]:
    """Raises LaunchError for what cannot be rendered, and for what no program can be started with."""
    return tuple(_startable(f"{name}[{i}]", render(f"{name}[{i}]", item, known)) for i, item in enumerate(command))


def rendered_env(config: RunConfig, known: Mapping[str, Any]) -> dict[str, str]:
    """`harness.env`. Raises LaunchError, as `rendered_command` does."""
    keys = {name: f"harness.env.{name}" for name in config.harness.env}
    return {n: _startable(keys[n], render(keys[n], v, known), len(n) + 1) for n, v in config.harness.env.items()}


def check_size(name: str, argv: Sequence[str], environment: Mapping[str, str]) -> None:
    """Raises LaunchError where command and environment together are more than the system starts a program with."""
    texts = [*argv, *(f"{n}={v}" for n, v in environment.items())]
    size, most = sum(len(os.fsencode(text)) + POINTER_BYTES + 1 for text in texts), os.sysconf("SC_ARG_MAX")
    if size > most:
        raise LaunchError(
            f"{name} and its environment have {size} bytes, the system takes {most}; {TASK_FILE}", final=True
        )


def _startable(key: str, text: str, more: int = 0) -> str:
    """The text, if it can be one argument or, with `more` bytes for its name, one variable; see execve(2)."""
    if "\0" in text:
        raise LaunchError(f"{key} has a NUL character, which no argument or variable can hold; {TASK_FILE}", final=True)
    try:
        size = len(os.fsencode(text)) + more
    except UnicodeEncodeError as error:
        what = f"{key} has half a surrogate pair (at character {error.start})"
        raise LaunchError(f"{what}, which no argument or variable can hold; {TASK_FILE}", final=True) from None
    if size > MOST_TEXT_BYTES:
        what = f"{key} has {size} bytes, the system takes {MOST_TEXT_BYTES} in one argument or variable"
        raise LaunchError(f"{what}; {TASK_FILE}", final=True)
    return text


def _host(url: str) -> str:
    return urlsplit(url).hostname or ""


def reward_address(url: str) -> dict[str, str]:
    return {"LEYDEN_REWARD_URL": f"{url}/api/reward"}


def endpoints(url: str) -> dict[str, str]:
    return {
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_BASE": f"{url}/v1",
        "ANTHROPIC_BASE_URL": url,
        "GOOGLE_GEMINI_BASE_URL": url,
    }


def model_keys(key: str) -> dict[str, str]:
    names = ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN", "GEMINI_API_KEY", "GOOGLE_API_KEY")
    return dict.fromkeys(names, key)


def _own(config: RunConfig, rollout_id: str, attempt: int, paths: AttemptPaths) -> dict[str, str]:
    return {
        "LEYDEN_ROLLOUT_ID": rollout_id,
        "LEYDEN_ATTEMPT": str(attempt),
        "LEYDEN_MODEL": config.model.name,
        "LEYDEN_TASK": os.fspath(paths.task),
        "LEYDEN_WORKSPACE": os.fspath(paths.workspace),
        "PWD": os.fspath(paths.workspace),
    }
