"""The folder of an attempt: made private and filled before the start, cleaned up afterwards."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from leyden.config import WorkspaceConfig
from leyden.controller.backends.leyden_launcher import removal
from leyden.controller.backends.leyden_launcher.removal import open_up
from leyden.controller.launch import RunFacts
from leyden.controller.paths import AttemptPaths, attempt_paths, is_plain_name
from leyden.controller.templates import render
from leyden.errors import LaunchError, NoRoom
from leyden.records import Rollout
from leyden.types import Json

MOST_PARTS = 100
_BY_TASK = re.compile(r"\{[{%](?:(?!\{[{%]).)*?\btask\b", re.DOTALL)
_NUMBER = re.compile("[1-9][0-9]{0,8}")
_ERRNO = re.compile(r"\[Errno (\d+)\]")
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EMFILE, errno.ENFILE, errno.ENOMEM}


def prepare(settings: WorkspaceConfig, run: RunFacts, rollout: Rollout, paths: AttemptPaths) -> None:
    """Make the attempt's folder: task.json, and the workspace from the template folder and the task's files.

    What an interrupted start left in the folder is replaced. Raises LaunchError naming the offending path, NoRoom on
    a full disk.
    """
    try:
        own_folder(paths.root.parent)
        empty(paths.root)
        _write_private(paths.task, json.dumps(rollout.task, ensure_ascii=False))
        if settings.template is None:
            paths.workspace.mkdir(mode=0o700)
        else:
            known = run.attempt_variables(rollout, paths.workspace)
            _copy_template(template_folder(settings.template, run, known), paths.workspace, run.run_dir)
        if settings.files is not None:
            write_files(paths.workspace, task_files(rollout.task, settings.files))
    except OSError as error:
        raise _failed(f"the workspace {paths.workspace} cannot be made", error) from error


def _failed(what: str, error: OSError) -> LaunchError:
    kind = NoRoom if _numbers(error) & _NO_ROOM else LaunchError
    return kind(f"{what}: {error}")


def _numbers(error: OSError) -> set[int | None]:
    """The system's error numbers. A copied folder's error has (source, target, words) for each file."""
    if not isinstance(error, shutil.Error):
        return {error.errno}
    return {int(found[1]) for *_, words in error.args[0] if (found := _ERRNO.match(str(words)))}


def settle(paths: AttemptPaths) -> None:
    """Note that the attempt is over and cleaned up after. Raises OSError."""
    if paths.root.is_dir() and not (paths.root.is_symlink() or paths.root.parent.is_symlink()):
        open_up(str(paths.root))
    paths.settled.parent.mkdir(mode=0o700, exist_ok=True)
    paths.settled.touch(mode=0o600)


def unsettled(run_dir: Path) -> list[tuple[str, int]]:
    """(rollout id, attempt) of the folders that nobody cleaned up after, or not yet."""
    found = [
        (folder.parent.name, int(folder.name))
        for folder in (run_dir / "attempts").glob("*/*")
        if is_plain_name(folder.parent.name)
        and not (folder.is_symlink() or folder.parent.is_symlink())
        and _NUMBER.fullmatch(folder.name)
    ]
    return [one for one in found if not attempt_paths(run_dir, *one).settled.exists()]


def empty(folder: Path) -> None:
    """A private, empty folder, whatever was there."""
    remove(folder)
    folder.mkdir(mode=0o700)


def own_folder(folder: Path) -> None:
    """A folder that its owner may use: the one that is there, or an empty one for whatever else is there or nothing."""
    if folder.is_symlink() or not folder.is_dir():
        remove(folder)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    open_up(str(folder))


def ready_to_grade(task: Json, paths: AttemptPaths, number: int) -> None:
    """What a grader starts with: the task as the gateway has it, a place for its own files, and the workspace as the
    harness left it. Where that is no folder, or not even the attempt's own is there, the grader finds an empty one:
    an agent that wrecks what is to be graded is graded on the wreck. Raises LaunchError, NoRoom.
    """
    try:
        own_folder(paths.root.parent)
        own_folder(paths.root)
        remove(paths.task)
        _write_private(paths.task, json.dumps(task, ensure_ascii=False))
        if number == 1:
            empty(paths.grade)
        else:
            own_folder(paths.grade)
            before = paths.grade / "exit.json"
            if before.exists():
                before.replace(paths.grade / f"exit.{number - 1}.json")
        own_folder(paths.workspace)
    except OSError as error:
        raise _failed(f"the grader's folders in {paths.root} cannot be made", error) from error


def task_files(task: Json, name: str) -> dict[PurePosixPath, str]:
    """The task's field `name` as relative paths with their texts. Raises LaunchError for anything else."""
    files = task.get(name)
    if not isinstance(files, dict) or not all(isinstance(t, str) for t in files.values()):
        raise LaunchError(f"workspace.files: the task's field {name!r} must map relative paths to texts", final=True)
    return {_relative(path): text for path, text in files.items()}


def write_files(workspace: Path, files: Mapping[PurePosixPath, str]) -> None:
    """Write texts under the workspace. Raises LaunchError where a link of the template would lead out of it."""
    root = workspace.resolve()
    for path, text in files.items():
        target = root / path
        if not target.parent.resolve().is_relative_to(root) or target.is_symlink():
            raise LaunchError(f"workspace.files: {str(path)!r} leads out of the workspace through a link", final=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8", errors="replace")


def grade_tries(paths: AttemptPaths) -> int:
    """How many tries of the grader have ended before the current one."""
    return len(list(paths.grade.glob("exit.[0-9]*.json")))


def remove(path: Path) -> None:
    """Delete what a harness left at a path, whatever it made of it. Raises OSError."""
    removal.remove(str(path))


def _relative(path: object) -> PurePosixPath:
    pure = PurePosixPath(str(path))
    if not pure.parts or pure.is_absolute() or ".." in pure.parts or "\0" in str(path):
        raise LaunchError(f"workspace.files: {path!r} is not a path inside the workspace", final=True)
    if len(pure.parts) > MOST_PARTS:
        what = f"workspace.files: {str(path)[:60]!r}... has {len(pure.parts)} parts; at most {MOST_PARTS}"
        raise LaunchError(what, final=True)
    try:
        os.fsencode(pure)
    except UnicodeEncodeError as error:
        raise LaunchError(f"workspace.files: {path!r} is no file name: {error.reason}", final=True) from None
    return pure


def template_folder(template: str, run: RunFacts, known: Mapping[str, Any]) -> Path:
    """The folder to copy. What a task says chooses below the folder that the run file names before it, as
    `repos/{{ task.repo }}` does below repos; the run file's own folder where nothing stands before.

    Raises LaunchError for a folder that is elsewhere, also by a link, that is none, or that is in the run's own folder.
    """
    found = run.config_dir / render("workspace.template", template, known)
    by_task = _BY_TASK.search(template)
    if by_task:
        before = render("workspace.template", template[: by_task.start()], known)
        base = run.config_dir / before[: before.rfind("/") + 1]
        if not found.resolve().is_relative_to(base.resolve()):
            raise LaunchError(f"workspace.template: {str(found)!r} leads out of {base}", final=True)
    if not found.is_dir():
        raise LaunchError(f"workspace.template: {found} is not a folder", final=True)
    if found.resolve().is_relative_to(run.run_dir.resolve()):
        raise LaunchError(f"workspace.template: {found} is in the run's own folder, {run.run_dir}", final=True)
    return found.resolve()


def _copy_template(root: Path, workspace: Path, run_dir: Path) -> None:
    """Links are copied as links, to the copy where they name something in the template. `run_dir` is left out."""
    own = {run_dir.resolve(), workspace.resolve()}
    absolute: list[tuple[Path, str]] = []

    def left_out(folder: str, names: list[str]) -> list[str]:
        return [name for name in names if Path(folder, name) in own]

    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if Path(folder, name) not in own]
        for name in (*folders, *files):
            path = Path(folder, name)
            if not path.is_symlink():
                continue
            if not path.resolve().is_relative_to(root):
                raise LaunchError(f"workspace.template: the link {path} leads out of the template", final=True)
            if path.readlink().is_absolute():
                absolute.append((path.relative_to(root), os.path.relpath(path.resolve(), path.parent)))
    shutil.copytree(root, workspace, symlinks=True, ignore=left_out)
    workspace.chmod(0o700)
    for link, target in absolute:
        (workspace / link).unlink()
        (workspace / link).symlink_to(target)


def _write_private(path: Path, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8", errors="replace") as file:
        file.write(text)
