"""Bubblewrap around a local job: what it sees, and the command that makes it so (bwrap(1)).

    /usr, /etc, the interpreter's environment, `harness.readable`    to read; of /etc what every user may read
    the workspace; /tmp, a folder of the attempt's own, in which      to write
    /dev/shm lies
    /proc, of its own processes                                       to write, but if root has started Leyden to read
    127.0.0.1:PORT                                                    the gateway, and no other address
    everything else, and every other process                          is not there

The command runs as the user who started Leyden, without capabilities, and dies with its reaper.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

import leyden
from leyden.config import HarnessConfig
from leyden.controller.backends.launcher_client import PROGRAM
from leyden.controller.jobs import Job
from leyden.errors import ConfigError

FIRST_PROGRAM = PROGRAM / "sandboxed.py"
SYSTEM = ("/usr", "/etc", "/nix/store")
LINKS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
ISOLATION = (
    *("--unshare-user", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"),
    *("--die-with-parent", "--as-pid-1", "--cap-drop", "ALL"),
)
TMP = "/tmp"  # noqa: S108  (the attempt's own)
SHM = ".shm"
LOWEST_PORT = 1024
OTHER_PORT = 8080
TRIAL_LIMIT_S = 30.0
INSTALL = "install it (apt-get install bubblewrap; dnf install bubblewrap), or set harness.sandbox: none"
PATHS = "import sys, json; print(json.dumps([sys.prefix, sys.base_prefix, *sys.path]))"


@dataclass(frozen=True, slots=True)
class View:
    """What is the same for all jobs of a run. `hidden` are files and folders of /etc that not every user may read.

    `root` has started Leyden, and is who the jobs are to files of the kernel's, without any capability as well.
    """

    bwrap: str
    python: str
    run_dir: Path
    gateway: tuple[str, int]
    readable: tuple[Path, ...]
    grader_readable: tuple[Path, ...]
    hidden: tuple[Path, ...]
    root: bool = False


def look(
    harness: HarnessConfig, run_dir: Path, python: str, leyden_python: str, gateway_url: str, grader_code: Path | None
) -> View:
    """Find out what a sandbox of this run has to show; `grader_code` is the folder of a grader function's module.

    Raises ConfigError if there can be no sandbox.
    """
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise ConfigError("harness.sandbox", f"bubblewrap is not installed: there is no `bwrap` on PATH; {INSTALL}")
    parts = urlsplit(gateway_url)
    if parts.scheme != "http" or parts.hostname is None or parts.path not in ("", "/"):
        raise ConfigError("harness.sandbox", f"the gateway's address must be http://host:port; it is {gateway_url!r}")
    _try(bwrap)
    missing = [str(path) for path in harness.readable if not path.exists()]
    if missing:
        raise ConfigError("harness.readable", f"{missing[0]} does not exist")
    mine = [Path(leyden.__file__).parent, *environment(leyden_python), *([grader_code] if grader_code else [])]
    theirs = [*environment(python), *harness.readable]
    return View(
        bwrap=bwrap,
        python=python,
        run_dir=run_dir,
        gateway=(parts.hostname, parts.port or 80),
        readable=outermost(theirs),
        grader_readable=outermost([*theirs, *mine]),
        hidden=tuple(private(Path("/etc"))) if os.getuid() == 0 else (),
        root=os.getuid() == 0,
    )


def inner_url(gateway_url: str) -> str:
    """The gateway's address as a sandboxed job sees it."""
    port = urlsplit(gateway_url).port or 80
    return f"http://127.0.0.1:{port if port >= LOWEST_PORT else OTHER_PORT}"


def wrap(job: Job, view: View, url: str, tmp: Path, *, readable: Sequence[Path], given: Iterable[str]) -> Job:
    """The job in the sandbox. `url` is what `inner_url` said, `readable` may be read besides the system; of the
    environment, the variables `given` by the run file stay as they are.
    """
    fits = {"HOME": TMP, "TMPDIR": TMP}
    kept = {n: v for n, v in job.env.items() if n in given or not (n in fits or n.startswith("XDG_"))}
    first = (view.python, "-I", "-S", str(FIRST_PROGRAM), str(urlsplit(url).port))
    return replace(
        job,
        argv=(view.bwrap, *ISOLATION, *mounts(job, view, tmp, readable), "--", *first, *job.argv),
        env=fits | kept,
        fork=False,
        learn=False,
        folders=(*job.folders, tmp),
        forward=view.gateway,
    )


def mounts(job: Job, view: View, tmp: Path, readable: Sequence[Path]) -> list[str]:
    """In the order in which they are made: a later one lies over an earlier one."""
    found = [*_system(view.hidden), "--proc", "/proc", "--dev", "/dev", "--bind", str(tmp), TMP, "--dir", "/run"]
    found += ["--bind", str(tmp / SHM), "/dev/shm", "--remount-ro", "/dev"]  # noqa: S108  (the attempt's own)
    if view.root:
        found += ["--remount-ro", "/proc"]
    for path in (FIRST_PROGRAM, *readable):
        found += ["--ro-bind", str(path), str(path)]
    covered = any(view.run_dir.is_relative_to(path) for path in readable)
    if covered:
        found += ["--tmpfs", str(view.run_dir)]
    found += ["--bind", str(job.cwd), str(job.cwd)]
    for path in job.files:
        found += ["--ro-bind", str(path), str(path)]
    if covered:
        found += ["--remount-ro", str(view.run_dir)]
    return [*found, "--remount-ro", "/", "--chdir", str(job.cwd)]


def _system(hidden: Iterable[Path]) -> list[str]:
    found = []
    for name in SYSTEM:
        found += ["--ro-bind-try", name, name]
    for name in LINKS:
        path = Path(name)
        found += ["--symlink", str(path.readlink()), name] if path.is_symlink() else ["--ro-bind-try", name, name]
    for path in hidden:
        if path.is_dir():
            found += ["--tmpfs", str(path), "--remount-ro", str(path)]
        else:
            found += ["--ro-bind", os.devnull, str(path)]
    return found


def private(folder: Path) -> list[Path]:
    """What lies below a folder and only some users may read: files, and folders as a whole."""
    found = []
    for entry in sorted(folder.iterdir()):
        if entry.is_symlink():
            continue
        bits = 0o005 if entry.is_dir() else 0o004
        if entry.stat().st_mode & bits != bits:
            found.append(entry)
        elif entry.is_dir():
            found += private(entry)
    return found


def environment(python: str) -> list[Path]:
    """The folders that an interpreter loads its programs and modules from. Raises ConfigError."""
    try:
        answer = subprocess.run([python, "-I", "-c", PATHS], capture_output=True, timeout=TRIAL_LIMIT_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError("harness.python", f"{python} does not run: {error}") from None
    paths = [Path(python).parent, *map(Path, json.loads(answer.stdout))]
    return [path for path in paths if path.is_absolute() and path.exists()]


def outermost(paths: Iterable[Path]) -> tuple[Path, ...]:
    """Without what lies in another one or in the system; real paths and the links to them."""
    every = sorted({p for path in paths for p in (path, path.resolve())}, key=lambda p: (len(p.parts), p))
    found: list[Path] = []
    for path in every:
        if not any(path.is_relative_to(other) for other in [*map(Path, SYSTEM), *found]):
            found.append(path)
    return tuple(found)


def _try(bwrap: str) -> None:
    everything = ("--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", "--", "/bin/true")
    try:
        answer = subprocess.run(
            [bwrap, *ISOLATION, *everything], capture_output=True, timeout=TRIAL_LIMIT_S, check=False
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError("harness.sandbox", f"{bwrap} does not run: {error}") from None
    if answer.returncode:
        said = answer.stderr.decode(errors="replace").strip()
        raise ConfigError(
            "harness.sandbox",
            f"bubblewrap cannot make a sandbox here: {said}; it needs user namespaces (in a container, ones that the "
            "container may make itself); or set harness.sandbox: none",
        )
