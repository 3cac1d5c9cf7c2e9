"""Runs in the harness's and the grader's pod, from one file, with Python 3.8 or newer and nothing else.

    unpack   fill the workspace from the archive in the Secret
    fetch    fill it from the gateway, for a grader
    keep     wait until the harness is gone, pack the workspace, hand it to the gateway
    ready    the postStart hook of `keep`'s container: Kubernetes starts the harness's once it has ended

`keep` shares the pod's process namespace. `ready` holds the harness back until `keep` watches. A kubelet makes the
folder STARTED of the volume when it starts the harness's container, and mounts it there and nowhere else. So a process
that has it mounted is the harness's; a container's first process has no parent there, and the container is gone when
its first process is. Whether other containers come or go says nothing. A harness that nobody saw although ids of
processes were given away since was too quick to be seen, and is taken for gone after a while; where that is wrong, the
controller sees from the pod that the harness started after it was saved. On SIGTERM (the pod is being deleted) the
harness has half of the grace period; then it is killed, so that the other half is left to save what it wrote. What
`keep` holds, its key above all, is closed to a harness that runs as the same user there.

What the harness left is packed as it is, whatever it is: what cannot be read, or has a path too long to be used, is
left out and counted. Only too much of it is refused, by an exit code of its own: that is the harness's doing.

What was packed is not trusted when it is unpacked: files, folders, and links that stay inside; everything else is
left out and counted. The last line printed says what was done; it is the container's termination message on failure.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import os
import shutil
import signal
import stat
import sys
import tarfile
import time
import urllib.error
import urllib.request
from pathlib import PurePosixPath
from typing import IO, Callable, Iterator

VOLUME = "/leyden/volume"
INPUT = "/leyden/in/workspace.tar.gz"
MOST_BYTES = 256 * 2**20
MOST_ENTRIES = 200_000
MOST_PATH_BYTES = 3900
LATEST_S = 2**33
STARTED = "started"
STARTED_AT = "/leyden/started"
GONE = "the harness is gone"
POLL_S = 0.05
READY_S = 60.0
WATCHING, LAST_PID = "watching", "last-pid"
FAILED, TOO_LARGE = 1, 3
REQUEST_S = 60.0
UPLOAD_S = 100.0


class KeeperError(Exception):
    """What could not be done, for people."""


class TooLargeError(KeeperError):
    """The harness has left more than there is room for."""


def main(arguments: list[str]) -> int:
    what = arguments[0] if arguments else ""
    workspace = os.path.join(VOLUME, "workspace")
    limit = int(os.environ.get("LEYDEN_WORKSPACE_BYTES", MOST_BYTES))
    try:
        if what == "unpack":
            print(unpack(INPUT, workspace, limit))
        elif what == "fetch":
            with scratch() as archive:
                download(archive)
                print(unpack(archive, workspace, limit))
        elif what == "keep":
            with scratch() as archive:
                keep(workspace, archive, limit)
        elif what == "ready":
            ready(os.path.join(VOLUME, "out"), "/proc")
        else:
            raise KeeperError("usage: keeper.py unpack | fetch | keep | ready")
    except (KeeperError, OSError, tarfile.TarError, EOFError) as error:
        print(f"{what}: {error}", flush=True)
        return TOO_LARGE if isinstance(error, TooLargeError) else FAILED
    return 0


@contextlib.contextmanager
def scratch() -> Iterator[str]:
    """Room for an archive beside the workspace, where the harness does not see it."""
    folder = os.path.join(VOLUME, "out")
    os.makedirs(folder, mode=0o700, exist_ok=True)
    path = os.path.join(folder, "workspace.tar.gz")
    try:
        yield path
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


# ---- archives ----------------------------------------------------------------------------------------------------


def pack(workspace: str, archive: str, most_bytes: int) -> str:
    """The workspace as tar.gz: files, folders, links as links. Raises TooLargeError, before anything is written."""
    size = on_disk = entries = left_out = 0
    for _, status in _walk(workspace):
        entries += 1
        if status is not None:
            on_disk += max(status.st_size if stat.S_ISREG(status.st_mode) else 0, status.st_blocks * 512)
        if on_disk > most_bytes:
            raise TooLargeError(f"the workspace is larger than {most_bytes} bytes; see gateway.max_workspace_bytes")
        if entries > MOST_ENTRIES:
            raise TooLargeError(f"the workspace has more than {MOST_ENTRIES} entries")
    with tarfile.open(archive, "w:gz", compresslevel=1) as tar:
        for name, status in _walk(workspace):
            packed = status is not None and _pack_one(tar, os.path.join(workspace, name), name, status)
            size += status.st_size if packed and status and stat.S_ISREG(status.st_mode) else 0
            left_out += not packed
            tar.members.clear()  # type: ignore[attr-defined]  # a tarfile remembers all entries
    return f"packed {entries - left_out} entries, {size} bytes; left out {left_out}"


def _walk(workspace: str) -> Iterator[tuple[str, os.stat_result | None]]:
    """Paths in the workspace, a folder before what is in it; None for what cannot be used."""
    folders = [""]
    while folders:
        folder = folders.pop()
        found = []
        for name in _names(os.path.join(workspace, folder)):
            path = os.path.join(folder, name)
            status = None
            if len(os.fsencode(path)) <= MOST_PATH_BYTES:
                with contextlib.suppress(OSError):
                    status = os.lstat(os.path.join(workspace, path))
            yield path, status
            if status is not None and stat.S_ISDIR(status.st_mode):
                found.append(path)
        folders += reversed(found)


def _names(folder: str) -> list[str]:
    """What is in a folder, also where its owner, this user, took the right to read it away."""
    for last in (False, True):
        try:
            with os.scandir(folder) as found:
                return sorted(entry.name for entry in itertools.islice(found, MOST_ENTRIES + 1))
        except OSError:
            if last:
                break
            with contextlib.suppress(OSError):
                os.chmod(folder, 0o700)
    return []


def _pack_one(tar: tarfile.TarFile, path: str, name: str, status: os.stat_result) -> bool:
    entry = tarfile.TarInfo(name)
    entry.mode, entry.mtime = stat.S_IMODE(status.st_mode) & 0o777, min(max(0, int(status.st_mtime)), LATEST_S)
    if stat.S_ISDIR(status.st_mode):
        entry.type = tarfile.DIRTYPE
        tar.addfile(entry)
    elif stat.S_ISLNK(status.st_mode):
        entry.type, entry.linkname = tarfile.SYMTYPE, os.readlink(path)
        tar.addfile(entry)
    elif stat.S_ISREG(status.st_mode):
        file = _opened(path)
        if file is None:
            return False
        with file:
            entry.size = os.fstat(file.fileno()).st_size
            tar.addfile(entry, file)
    else:
        return False
    return True


def _opened(path: str) -> IO[bytes] | None:
    for last in (False, True):
        try:
            return open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb")
        except OSError:
            if last:
                break
            with contextlib.suppress(OSError):
                os.chmod(path, 0o600)
    return None


def unpack(archive: str, workspace: str, most_bytes: int) -> str:
    """Fill a new workspace. Raises KeeperError for more than `most_bytes` or MOST_ENTRIES."""
    os.makedirs(workspace, mode=0o777, exist_ok=True)
    os.chmod(workspace, 0o777)
    size = entries = left_out = 0
    folders = Folders(workspace)
    with tarfile.open(archive, "r:*") as tar:
        for entry in tar:
            entries += 1
            size += entry.size if entry.isreg() else 0
            if size > most_bytes or entries > MOST_ENTRIES:
                raise KeeperError(f"the archive holds more than {most_bytes} bytes or {MOST_ENTRIES} entries")
            left_out += not _unpack_one(tar, entry, folders)
            tar.members.clear()  # type: ignore[attr-defined]
    return f"unpacked {entries - left_out} entries, {size} bytes; left out {left_out}"


def _unpack_one(tar: tarfile.TarFile, entry: tarfile.TarInfo, folders: Folders) -> bool:
    """Whether the entry was one that may lie in a workspace. The harness's user need not be this one: all may write."""
    name = PurePosixPath(entry.name)
    parts = [p for p in name.parts if p != "."]
    if (
        name.is_absolute()
        or ".." in parts
        or "\0" in entry.name
        or len(os.fsencode(entry.name)) > MOST_PATH_BYTES + 100
    ):
        return False
    if not parts:
        return entry.isdir()
    parent = folders.make(parts[:-1])
    if parent is None:
        return False
    target = os.path.join(parent, parts[-1])
    if entry.isdir():
        return folders.make(parts) is not None
    if os.path.lexists(target):
        return False
    if entry.issym():
        if not _stays_inside(parts[:-1], entry.linkname):
            return False
        os.symlink(entry.linkname, target)
        return True
    source = tar.extractfile(entry) if entry.isreg() else None
    if source is None:
        return False
    mode = (entry.mode & 0o777) | 0o666
    with source, open(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb") as file:
        shutil.copyfileobj(source, file)
        os.fchmod(file.fileno(), mode)
    with contextlib.suppress(OSError, OverflowError, ValueError):
        os.utime(target, (entry.mtime, entry.mtime))
    return True


class Folders:
    """Makes the workspace's folders. Of the last path that was asked for, each part is known to be a folder: nothing
    that is there is ever replaced."""

    def __init__(self, workspace: str) -> None:
        self._workspace = workspace
        self._known: list[str] = []

    def make(self, parts: list[str]) -> str | None:
        """The folder, made where it is missing; None where a link or a file is in the way."""
        path = os.path.join(self._workspace, *parts)
        if parts == self._known[: len(parts)]:
            return path
        if parts[:-1] == self._known[: len(parts) - 1]:
            same = len(parts) - 1
        else:
            same = next(i for i, part in enumerate(parts) if self._known[i : i + 1] != [part])
        step = os.path.join(self._workspace, *parts[:same])
        for part in parts[same:]:
            step = os.path.join(step, part)
            try:
                mode = os.lstat(step).st_mode
            except FileNotFoundError:
                os.mkdir(step)
                os.chmod(step, 0o777)
                continue
            if not stat.S_ISDIR(mode):
                return None
        self._known = parts
        return path


def _stays_inside(folder: list[str], link: str) -> bool:
    """Whether a link in `folder` names something inside, step by step. A link that goes through another link may end
    elsewhere than it reads, but no link leads out, so that one cannot either."""
    if not link or link.startswith("/") or "\0" in link:
        return False
    depth = len(folder)
    climbs = True
    for part in link.split("/"):
        if part == "..":
            depth -= 1
            if depth < 0 or not climbs:
                return False
        elif part not in ("", "."):
            depth += 1
            climbs = False
    return True


# ---- waiting for the harness -------------------------------------------------------------------------------------


def keep(workspace: str, archive: str, most_bytes: int) -> None:
    close_to_others()
    asked_to_end: list[float] = []
    signal.signal(signal.SIGTERM, lambda *_: asked_to_end.append(time.monotonic()))
    save_s = float(os.environ.get("LEYDEN_SAVE_S", "30"))
    if os.getpid() == 1:
        raise KeeperError("the pod needs shareProcessNamespace: true")
    if not HarnessWatch("/proc", VOLUME, asked_to_end, save_s).until_gone():
        raise KeeperError("the pod was ended before the harness started")
    print(GONE, flush=True)
    try:
        packed = pack(workspace, archive, most_bytes)
    except (MemoryError, RecursionError, ValueError, tarfile.TarError) as error:
        raise TooLargeError(f"what the harness left cannot be packed: {error!r}") from error
    print(packed, flush=True)
    until = time.monotonic() + (save_s if asked_to_end else UPLOAD_S)
    upload(archive, until)
    print("handed in")


def close_to_others() -> None:
    """Nobody without CAP_SYS_PTRACE may read this process's environment, memory or files; see prctl(2)."""
    pr_set_dumpable = 4
    with contextlib.suppress(ImportError, OSError, AttributeError):
        import ctypes  # not in every Python

        ctypes.CDLL(None).prctl(pr_set_dumpable, 0, 0, 0, 0)


def ready(folder: str, proc: str, sleep: Callable[[float], None] = time.sleep) -> None:
    """Wait for `keep`, then note the last id of a process that was given away before the harness's."""
    for _ in range(int(READY_S / POLL_S)):
        if os.path.exists(os.path.join(folder, WATCHING)):
            break
        sleep(POLL_S)
    with open(os.path.join(folder, LAST_PID), "w", encoding="utf-8") as file:
        file.write(str(last_pid(proc)))


class HarnessWatch:
    """Sees the harness come and go. `proc` is /proc, `volume` the volume's folder; `asked_to_end` gets the time of a
    SIGTERM, after which the harness has `patience_s`."""

    def __init__(self, proc: str, volume: str, asked_to_end: list[float], patience_s: float) -> None:
        self._proc = proc
        self._volume = volume
        self._out = os.path.join(volume, "out")
        self._asked_to_end = asked_to_end
        self._patience_s = patience_s
        self._there: list[int] = []

    def until_gone(
        self, sleep: Callable[[float], None] = time.sleep, kill: Callable[[int, int], None] = os.kill
    ) -> bool:
        """False if the pod is ended before the harness has started."""
        with open(os.path.join(self._out, WATCHING), "w", encoding="utf-8"):
            pass
        started: float | None = None
        seen = False
        while True:
            if started is None and os.path.exists(os.path.join(self._volume, STARTED)):
                started = time.monotonic()
            if started is not None:
                there = self._is_there()
                if seen and not there:
                    return True
                seen = seen or there
                if not seen and time.monotonic() > started + self._patience_s and self._ids_were_given_away():
                    return True
            if self._asked_to_end:
                if started is None:
                    return False
                if time.monotonic() > self._asked_to_end[0] + self._patience_s:
                    self._kill_all(kill)
                if time.monotonic() > self._asked_to_end[0] + self._patience_s + 2:
                    return True
            sleep(POLL_S if seen or started is None else POLL_S / 10)

    def _is_there(self) -> bool:
        """Whether a first process of the harness's container runs. One that was seen counts whatever it does to its
        mounts, and as long as anything of it is there: its first thread may end before the others."""
        self._there = [pid for pid in self._there if is_first(self._proc, pid)] or [
            pid for pid in processes(self._proc) if is_first(self._proc, pid) and has_mounted(self._proc, pid)
        ]
        return bool(self._there)

    def _ids_were_given_away(self) -> bool:
        try:
            with open(os.path.join(self._out, LAST_PID), encoding="utf-8") as file:
                return last_pid(self._proc) != int(file.read())
        except (FileNotFoundError, ValueError):
            return False

    def _kill_all(self, kill: Callable[[int, int], None]) -> None:
        for pid in processes(self._proc):
            if pid not in (1, os.getpid()):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    kill(pid, signal.SIGKILL)


def processes(proc: str) -> list[int]:
    return sorted(int(name) for name in os.listdir(proc) if name.isdigit())


def is_first(proc: str, pid: int) -> bool:
    """Whether a process is there and has no parent in this namespace."""
    try:
        with open(os.path.join(proc, str(pid), "stat"), encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[1:2] == ["0"]
    except (FileNotFoundError, ProcessLookupError):
        return False


def has_mounted(proc: str, pid: int) -> bool:
    """Whether a process sees the folder that only the harness's container has; see proc(5), mountinfo."""
    try:
        with open(os.path.join(proc, str(pid), "mountinfo"), encoding="utf-8", errors="replace") as file:
            return any(line.split()[4:5] == [STARTED_AT] for line in file)
    except OSError:
        return False


def last_pid(proc: str) -> int:
    """The process id given away last in this namespace; see proc(5), loadavg."""
    try:
        with open(os.path.join(proc, "loadavg"), encoding="utf-8") as file:
            return int(file.read().split()[-1])
    except (OSError, ValueError, IndexError):
        return 0


# ---- gateway -----------------------------------------------------------------------------------------------------


def upload(archive: str, until: float, sleep: Callable[[float], None] = time.sleep) -> None:
    with open(archive, "rb") as file:
        _call("PUT", file, until, sleep, lambda _: None)


def download(archive: str, until: float | None = None, sleep: Callable[[float], None] = time.sleep) -> None:
    def save(answer: http.client.HTTPResponse) -> None:
        expected = answer.headers.get("Content-Length")
        with open(archive, "wb") as file:
            shutil.copyfileobj(answer, file)
            if expected is not None and file.tell() != int(expected):
                raise ConnectionError(f"{file.tell()} of {expected} bytes came")

    _call("GET", None, time.monotonic() + UPLOAD_S if until is None else until, sleep, save)


def _call(
    method: str,
    body: IO[bytes] | None,
    until: float,
    sleep: Callable[[float], None],
    use: Callable[[http.client.HTTPResponse], None],
) -> None:
    """One call of /api/workspace, tried until it succeeds, is refused, or `until` is past."""
    url = os.environ["LEYDEN_URL"].rstrip("/") + "/api/workspace"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    pause_s = 0.2
    while True:
        request = urllib.request.Request(url, method=method, data=body)  # noqa: S310  (the URL is ours)
        request.add_header("Authorization", "Bearer " + os.environ["LEYDEN_WORKSPACE_KEY"])
        if body is not None:
            body.seek(0)
            request.add_header("Content-Length", str(os.fstat(body.fileno()).st_size))
            request.add_header("Content-Type", "application/gzip")
        try:
            with opener.open(request, timeout=REQUEST_S) as answer:
                use(answer)
            return
        except urllib.error.HTTPError as error:
            problem = f"{method} {url}: {error.code} {error.read(500).decode('utf-8', 'replace')}"
            if error.code == 413:
                raise TooLargeError(problem) from error
            if error.code < 500 and error.code not in (408, 425, 429):
                raise KeeperError(problem) from error
        except (OSError, http.client.HTTPException) as error:
            problem = f"{method} {url}: {error}"
        if time.monotonic() + pause_s > until:
            raise KeeperError(problem)
        sleep(pause_s)
        pause_s = min(2 * pause_s, 5.0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
