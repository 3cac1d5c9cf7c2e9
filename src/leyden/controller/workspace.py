"""The folder of an attempt: made private and filled before the start, cleaned up afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from leyden.config import RunConfig
from leyden.controller.launch import AttemptPaths, variables
from leyden.controller.templates import render
from leyden.errors import LaunchError
from leyden.types import Json

SETTLED = "settled"


def prepare(config: RunConfig, rollout_id: str, task: Json, paths: AttemptPaths) -> None:
    """Make the attempt's folder: task.json, and the workspace from the template folder and the task's files.

    Raises LaunchError naming the offending path. What an interrupted start left in the folder is replaced.
    """
    try:
        paths.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write_private(paths.task, json.dumps(task, ensure_ascii=False))
        remove(paths.workspace)
        template = config.workspace.template
        if template is None:
            paths.workspace.mkdir(mode=0o700)
        else:
            known = variables(config, rollout_id, task, paths)
            _copy_template(config.config_dir / render("workspace.template", template, known), paths.workspace)
        if config.workspace.files is not None:
            write_files(paths.workspace, task_files(task, config.workspace.files))
    except OSError as error:
        raise LaunchError(f"the workspace {paths.workspace} cannot be made: {error}") from error


def settle(paths: AttemptPaths) -> None:
    """Note that the attempt is over and cleaned up after."""
    with contextlib.suppress(FileNotFoundError):
        (paths.root / SETTLED).touch(mode=0o600)


def unsettled(run_dir: Path) -> list[tuple[str, int]]:
    """(rollout id, attempt) of the folders that nobody cleaned up after, or not yet."""
    folders = (run_dir / "attempts").glob("*/*")
    return [
        (folder.parent.name, int(folder.name))
        for folder in folders
        if folder.name.isdecimal() and not (folder / SETTLED).exists()
    ]


def empty(folder: Path) -> None:
    """A private, empty folder, whatever was there."""
    remove(folder)
    folder.mkdir(mode=0o700)


def task_files(task: Json, name: str) -> dict[PurePosixPath, str]:
    """The task's field `name` as relative paths with their texts. Raises LaunchError for anything else."""
    files = task.get(name)
    if not isinstance(files, dict) or not all(isinstance(t, str) for t in files.values()):
        raise LaunchError(f"workspace.files: the task's field {name!r} must map relative paths to texts")
    return {_relative(path): text for path, text in files.items()}


def write_files(workspace: Path, files: Mapping[PurePosixPath, str]) -> None:
    """Write texts under the workspace. Raises LaunchError where a link of the template would lead out of it."""
    root = workspace.resolve()
    for path, text in files.items():
        target = root / path
        if not target.parent.resolve().is_relative_to(root) or target.is_symlink():
            raise LaunchError(f"workspace.files: {str(path)!r} leads out of the workspace through a link")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8", errors="replace")


def next_grade(paths: AttemptPaths, number: int) -> None:
    """Make room for the grader's `number`-th try: the exit.json of the one before gets its number."""
    paths.grade.mkdir(mode=0o700, exist_ok=True)
    before = paths.grade / "exit.json"
    if number > 1 and before.exists():
        before.replace(paths.grade / f"exit.{number - 1}.json")


def grade_tries(paths: AttemptPaths) -> int:
    """How many tries of the grader have ended before the current one."""
    return len(list(paths.grade.glob("exit.[0-9]*.json")))


def remove(folder: Path) -> None:
    """Delete a folder, also where the harness took write permission away."""
    if folder.is_symlink() or not folder.exists():
        folder.unlink(missing_ok=True)
        return
    shutil.rmtree(folder, onerror=_open_up)


def _open_up(function: Callable[..., Any], path: str, _: Any) -> None:
    parent = Path(path).parent
    parent.chmod(0o700)
    if Path(path).is_dir() and not Path(path).is_symlink():
        Path(path).chmod(0o700)
        shutil.rmtree(path, ignore_errors=True)
        return
    function(path)


def _relative(path: object) -> PurePosixPath:
    pure = PurePosixPath(str(path))
    if not pure.parts or pure.is_absolute() or ".." in pure.parts or "\0" in str(path):
        raise LaunchError(f"workspace.files: {path!r} is not a path inside the workspace")
    return pure


def _copy_template(template: Path, workspace: Path) -> None:
    if not template.is_dir():
        raise LaunchError(f"workspace.template: {template} is not a folder")
    root = template.resolve()
    for folder, folders, files in os.walk(root):
        for name in (*folders, *files):
            path = Path(folder, name)
            if path.is_symlink() and not path.resolve().is_relative_to(root):
                raise LaunchError(f"workspace.template: the link {path} leads out of the template")
    shutil.copytree(root, workspace, symlinks=True)
    workspace.chmod(0o700)


def _write_private(path: Path, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8", errors="replace") as file:
        file.write(text)
