"""Control groups: a job's limits of memory, CPU time and processes. Linux, cgroup v1 and v2; see cgroups(7).

A job's group is `leyden-RUN/JOB` under the group that the launcher runs in: with v1 in each controller's hierarchy,
with v2 in the one. There a group that holds processes cannot have controllers for its children, so the processes of a
group that was delegated to this user are moved into `leyden-main` below it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import signal
import time
from typing import Any, Dict, List, Tuple  # noqa: UP035  (evaluated, and Python 3.9 must do it)

PERIOD_US = 100_000
SWAP = ("memory.memsw.limit_in_bytes", "memory.swap.max")
REMOVE_LIMIT_S = 2.0
MAIN = "leyden-main"
CONTROLLERS = {"memory_bytes": "memory", "cpus": "cpu", "pids": "pids"}
HELP = (
    "Leyden needs a cgroup of its own that it may write: start it with `systemd-run --user --scope -p Delegate=yes "
    "leyden ...`, as root, or in a container with a writable /sys/fs/cgroup; or leave harness.limits out"
)

Settings = List[Tuple[str, str]]  # noqa: UP006  ((file, value) in the order of writing)
Found = Dict[str, Tuple[int, str]]  # noqa: UP006  (controller -> (version, this process's folder))


def controllers(limits: dict[str, Any]) -> list[str]:
    """The controllers that these limits (keys of the run file's `harness.limits`) need."""
    return [c for name, c in CONTROLLERS.items() if limits.get(name) is not None]


def settings(limits: dict[str, Any], controller: str, version: int) -> Settings:
    """What to write into a new group's files."""
    if controller == "pids":
        return [("pids.max", str(limits["pids"]))]
    if controller == "cpu":
        quota = max(1000, int(limits["cpus"] * PERIOD_US))
        if version == 1:
            return [("cpu.cfs_period_us", str(PERIOD_US)), ("cpu.cfs_quota_us", str(quota))]
        return [("cpu.max", f"{quota} {PERIOD_US}")]
    size = str(limits["memory_bytes"])
    if version == 1:
        return [("memory.limit_in_bytes", size), ("memory.memsw.limit_in_bytes", size)]
    return [("memory.max", size), ("memory.swap.max", "0")]


def find(mountinfo: str, own: str) -> Found:
    """Where this process is in each hierarchy, from the texts of /proc/self/mountinfo and /proc/self/cgroup.

    A controller that is mounted as v1 is not in v2's `cgroup.controllers`.
    """
    paths = {}
    for line in own.splitlines():
        _, names, path = line.split(":", 2)
        paths.update(dict.fromkeys(names.split(","), path))
    found: Found = {}
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        root, point = (p.replace("\\040", " ") for p in left.split()[3:5])
        kind, _, options = right.split(" ", 2)
        if kind == "cgroup":
            for name in options.split(","):
                if name in paths and name in CONTROLLERS.values():
                    found[name] = (1, _folder(point, root, paths[name]))
        elif kind == "cgroup2":
            folder = _folder(point, root, paths.get("", "/"))
            for name in _read(folder, "cgroup.controllers").split():
                found.setdefault(name, (2, folder))
    return found


def _folder(point: str, root: str, path: str) -> str:
    """The folder of group `path` where the hierarchy's `root` is mounted at `point`."""
    below = path[len(root.rstrip("/")) :] if path.startswith(root.rstrip("/") + "/") else ""
    return point.rstrip("/") + below.rstrip("/")


class Cgroup:
    """One job's group: its folder in each hierarchy, each with its version and the settings of its limits."""

    def __init__(self, parents: Found, name: str, limits: dict[str, Any]) -> None:
        self.limits = limits
        self.folders: dict[str, Settings] = {}
        self.of = {c: os.path.join(parents[c][1], name) for c in controllers(limits)}
        for controller, folder in self.of.items():
            self.folders.setdefault(folder, []).extend(settings(limits, controller, parents[controller][0]))

    def make(self) -> None:
        """Raises OSError. Not every kernel counts swap."""
        for folder, values in self.folders.items():
            os.makedirs(folder, exist_ok=True)
            for file, value in values:
                if file not in SWAP or os.path.exists(os.path.join(folder, file)):
                    _write(folder, file, value)

    def join(self) -> None:
        """Put this process into the group; its children follow."""
        for folder in self.folders:
            _write(folder, "cgroup.procs", "0")

    def events(self) -> str | None:
        """Which limits the job ran into, as words for people: only what the kernel counted."""
        found = []
        memory, pids = self.of.get("memory"), self.of.get("pids")
        if memory and (_count(memory, "memory.oom_control", "oom_kill") or _count(memory, "memory.events", "oom_kill")):
            found.append(f"OOMKilled: over harness.limits.memory_bytes {self.limits['memory_bytes']}")
        if pids and _count(pids, "pids.events", "max"):
            found.append(f"forks were refused at harness.limits.pids {self.limits['pids']}")
        return "; ".join(found) or None


def kill(folders: list[str]) -> None:
    """SIGKILL to all that is in a group, once."""
    for folder in folders:
        with contextlib.suppress(OSError):
            if os.path.exists(os.path.join(folder, "cgroup.kill")):
                _write(folder, "cgroup.kill", "1")
                continue
            for path, _, _ in os.walk(folder):
                for pid in map(int, _read(path, "cgroup.procs").split()):
                    if pid:  # 0 stands for a process of another pid namespace
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGKILL)


def remove(folders: list[str]) -> bool:
    """Kill what is in a group until it can be removed, with the groups that the job made in it."""
    until = time.monotonic() + REMOVE_LIMIT_S
    left = list(folders)
    while left and time.monotonic() < until:
        kill(left)
        for folder in left:
            for path, _, _ in os.walk(folder, topdown=False):
                with contextlib.suppress(OSError):
                    os.rmdir(path)
        left = [f for f in left if os.path.isdir(f)]
        if left:
            time.sleep(0.005)
    return not left


class Cgroups:
    """The groups of a run's jobs. `state` is the run's folder of the launcher, which gives them their name."""

    def __init__(self, state: str, proc: str = "/proc/self") -> None:
        self.name = "leyden-" + hashlib.sha256(os.fsencode(state)).hexdigest()[:12]
        self.proc = proc
        self.parents: Found = {}

    def open(self, limits: dict[str, Any]) -> str | None:
        """Make the run's own group, and try one of a job with these limits; what is wrong, or None."""
        wanted = controllers(limits)
        found = find(_read(self.proc, "mountinfo"), _read(self.proc, "cgroup"))
        missing = [name for name in wanted if name not in found]
        if missing:
            has = ", ".join(sorted(found)) or "none"
            return f"harness.limits: no cgroup controller for {', '.join(missing)} here (there is {has}). {HELP}"
        try:
            for name in wanted:
                version, folder = found[name]
                self.parents[name] = (version, self.own_folder(folder, version, wanted))
            self.try_one(self.group("leyden-try", limits))
        except OSError as error:
            return f"harness.limits: {error.filename or 'cgroup'}: {error.strerror}. {HELP}"
        return None

    def try_one(self, group: Cgroup) -> None:
        """Make a group and put a process into it. Raises OSError."""
        try:
            group.make()
            pid = os.fork()
            if pid == 0:
                code = 1
                with contextlib.suppress(OSError):
                    group.join()
                    code = 0
                os._exit(code)
            status = os.waitpid(pid, 0)[1]
        finally:
            remove(list(group.folders))
        if status:
            raise PermissionError(errno.EPERM, "a process cannot be put into the group", next(iter(group.folders)))

    def sweep(self, jobs: set[str]) -> None:
        """Remove the groups of jobs that no reaper looks after any more."""
        for path in self.run_folders():
            with os.scandir(path) as entries:
                remove([e.path for e in entries if e.is_dir() and e.name not in jobs])

    def own_folder(self, folder: str, version: int, wanted: list[str]) -> str:
        if version == 2 and os.path.basename(folder) == MAIN:
            folder = os.path.dirname(folder)  # an earlier launcher of this cgroup moved its processes here
        path = os.path.join(folder, self.name)
        os.makedirs(path, exist_ok=True)
        if version == 2:
            try:
                _enable(folder, wanted)
            except OSError:
                if not _delegated(folder):
                    raise
                _move_all(folder, os.path.join(folder, MAIN))
                _enable(folder, wanted)
            _enable(path, wanted)
        return path

    def run_folders(self) -> list[str]:
        return sorted({path for _, path in self.parents.values()})

    def group(self, job: str, limits: dict[str, Any]) -> Cgroup:
        return Cgroup(self.parents, job, limits)

    def close(self) -> None:
        """Remove the run's own group; it is empty when no job runs."""
        for path in self.run_folders():
            with contextlib.suppress(OSError):
                os.rmdir(path)


def _enable(folder: str, wanted: list[str]) -> None:
    _write(folder, "cgroup.subtree_control", " ".join(f"+{name}" for name in wanted))


def _delegated(folder: str) -> bool:
    """Whether a v2 group is this user's to arrange: a container's root, or one that systemd delegated."""
    with contextlib.suppress(OSError):
        names = os.listxattr(folder)
        if "user.delegate" in names or "trusted.delegate" in names:
            return True
    owned = os.getuid() != 0 and os.stat(folder).st_uid == os.getuid()
    return owned or not os.path.exists(os.path.join(os.path.dirname(folder), "cgroup.procs"))


def _move_all(source: str, target: str) -> None:
    os.makedirs(target, exist_ok=True)
    for pid in _read(source, "cgroup.procs").split():
        with contextlib.suppress(ProcessLookupError):
            _write(target, "cgroup.procs", pid)


def _count(folder: str, file: str, name: str) -> int:
    for line in _read(folder, file).splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0


def _read(folder: str, file: str) -> str:
    try:
        with open(os.path.join(folder, file), encoding="utf-8") as opened:
            return opened.read()
    except OSError:
        return ""


def _write(folder: str, file: str, value: str) -> None:
    with open(os.path.join(folder, file), "w", encoding="utf-8") as opened:
        opened.write(value)
