"""The launcher's client: starts jobs through the launcher of a run folder, starts a launcher when there is none.

Concurrency: all methods run in one event loop. `supervise` reads the launcher's messages; when the connection
ends it opens another one, to the same launcher or a new one, and sends again what was not answered: a job's
id runs once whoever asks. A job that runs no longer and whose end was not seen is settled from its exit.json,
else it is lost. What kills a job without an order of ours is taken for the job itself (`jobs.as_ordered`).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from leyden.controller.backends.leyden_launcher.processes import is_stopped, kill_marked
from leyden.controller.jobs import Exit, Job, as_ordered, lost, read_exit
from leyden.errors import LaunchError

PROGRAM = Path(__file__).with_name("leyden_launcher")
PROTOCOL = 2
SOCKET_PATH_BYTES = 100
START_LIMIT_S = 300.0
STOP_LIMIT_S = 45.0
MESSAGE_BYTES = 64 << 20
GRACE_S = 2.0
INSIST_S = 5.0


@dataclass(frozen=True, slots=True)
class LauncherSettings:
    """How to start the launcher. `environment` is what the preloaded modules see when they are imported; `limits` must
    be possible here.
    """

    state: Path
    log: Path
    python: str
    preload: tuple[str, ...]
    environment: dict[str, str] = field(repr=False)
    limits: dict[str, float] = field(default_factory=dict)
    orphan_grace_s: float = 60.0


class LauncherClient:
    """Jobs on this machine. `on_end(job_id, exit)` is called once for every job that ended."""

    def __init__(self, settings: LauncherSettings, on_end: Callable[[str, Exit], None]) -> None:
        self._settings = settings
        self._on_end = on_end
        self._jobs: dict[str, tuple[Path, float]] = {}
        self._kills: dict[str, dict[str, Any]] = {}
        self._starting: dict[str, tuple[Job, asyncio.Future[float]]] = {}
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._pid = 0
        self._closing = False

    @property
    def running(self) -> dict[str, float]:
        """Ids of the jobs that run, with their start (Unix seconds)."""
        return {job_id: started for job_id, (_, started) in self._jobs.items()}

    async def open(self) -> None:
        """Connect to the run folder's launcher, or start one. Raises LaunchError with the launcher's own words."""
        path = socket_path(self._settings.state)
        hello = await self._connect(path)
        if hello is not None and not self._matches(hello):
            await self._end_launcher()
            hello = None
        if hello is None:
            await self._spawn(path)
            hello = await self._connect(path)
        if hello is None:
            raise LaunchError(f"the launcher does not answer; see {self._settings.log}")
        self._pid = hello["pid"]
        self._settle({i: (Path(j["dir"]), j["started"]) for i, j in hello["running"].items()})
        for job, _ in self._starting.values():
            self._send(_start_message(job))
        for order in self._kills.values():
            self._send(order)

    async def supervise(self) -> None:
        """Handle the launcher's messages until `stop` or `close`. Raises LaunchError if none can be started."""
        while not self._closing:
            assert self._reader is not None
            line = await _line(self._reader)
            if line:
                self._handle(json.loads(line))
            elif not self._closing:
                await self._hang_up()
                await _process_end(self._pid, 5.0)
                await self.open()

    async def start(self, job: Job) -> float:
        """Start a job unless its id runs already; the time it started. Raises LaunchError if it cannot."""
        if job.job_id not in self._starting:
            self._starting[job.job_id] = (job, asyncio.get_running_loop().create_future())
            self._send(_start_message(job))
        return await asyncio.shield(self._starting[job.job_id][1])

    def kill(self, job_id: str, reason: str, grace_s: float = GRACE_S) -> None:
        """SIGTERM to the job's whole tree, SIGKILL after the grace. Its end is reported like any other."""
        if job_id in self._jobs:
            self._kills[job_id] = {"op": "kill", "id": job_id, "reason": reason, "grace_s": grace_s}
            self._send(self._kills[job_id])
            asyncio.get_running_loop().call_later(grace_s + INSIST_S, self._insist, job_id)

    def _insist(self, job_id: str, again: bool = False) -> None:
        """A launcher that a job has stopped goes on; one that is stopped again is killed, and another one started."""
        if job_id not in self._kills or self._closing:
            return
        stopped = is_stopped(self._pid)
        if stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL if again else signal.SIGCONT)
        asyncio.get_running_loop().call_later(INSIST_S, self._insist, job_id, stopped)

    async def stop(self) -> None:
        """Kill all jobs and end the launcher."""
        self._closing = True
        await self._end_launcher()

    async def close(self) -> None:
        """Hang up; the launcher goes on."""
        self._closing = True
        await self._hang_up()

    async def _end_launcher(self) -> None:
        self._send({"op": "stop"})
        if self._pid:
            await _process_end(self._pid, STOP_LIMIT_S)
        await self._hang_up()

    def _matches(self, hello: dict[str, Any]) -> bool:
        self._pid = hello["pid"]
        settings = self._settings
        wanted = (PROTOCOL, list(settings.preload), settings.python, sorted(settings.limits))
        return wanted == tuple(hello.get(name) for name in ("protocol", "preload", "python", "limits"))

    async def _connect(self, path: Path) -> dict[str, Any] | None:
        try:
            self._reader, self._writer = await asyncio.open_unix_connection(path, limit=MESSAGE_BYTES)
        except (FileNotFoundError, ConnectionRefusedError):
            return None
        self._send({"op": "hello"})
        line = await _line(self._reader)
        hello: dict[str, Any] | None = json.loads(line) if line else None
        return hello

    async def _spawn(self, path: Path) -> None:
        """Start the launcher in its own session and wait until it listens."""
        settings = self._settings
        ready_r, ready_w = os.pipe()
        os.set_inheritable(ready_w, True)
        spec = {
            "state": str(settings.state),
            "socket": str(path),
            "preload": list(settings.preload),
            "limits": settings.limits,
            "orphan_grace_s": settings.orphan_grace_s,
            "ready_fd": ready_w,
        }
        actions = [
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(settings.log), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600),
            (os.POSIX_SPAWN_DUP2, 1, 2),
            *((os.POSIX_SPAWN_CLOSE, fd) for fd in inheritable_descriptors() - {ready_w}),
        ]
        argv = [settings.python, str(PROGRAM), json.dumps(spec), settings.python]
        try:
            self._pid = os.posix_spawn(  # noqa: ASYNC221  (returns at once)
                settings.python, argv, settings.environment, file_actions=actions, setsid=True
            )
        except OSError as error:
            os.close(ready_r)
            raise LaunchError(f"harness.python: cannot start {settings.python!r}: {error.strerror}") from error
        finally:
            os.close(ready_w)
        try:
            answer = json.loads(await _read_all(ready_r) or b"{}")
        except BaseException:  # too slow, or cancelled: it has started no job yet
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.killpg(self._pid, signal.SIGKILL)
                os.waitpid(self._pid, 0)  # noqa: ASYNC222  (killed)
            raise
        if "error" in answer and "another launcher" not in answer["error"]:
            await _process_end(self._pid, 5.0)
            raise LaunchError(answer["error"])
        if not answer:
            await _process_end(self._pid, 5.0)
            raise LaunchError(f"the launcher ended while it started; see {settings.log}")

    def _settle(self, running: dict[str, tuple[Path, float]]) -> None:
        """Compare what ran before with what runs now; report the ends that were missed."""
        gone = {i: job for i, job in self._jobs.items() if i not in running}
        self._jobs = running
        for job_id, (directory, started) in gone.items():
            found = read_exit(directory)
            if found is None or found.error:  # no launcher has looked after it, and it could have written that itself
                kill_marked(str(directory.parent if ".grade" in job_id else directory))
                found = lost(started, time.time())
            self._end(job_id, found)

    def _end(self, job_id: str, exit_: Exit) -> None:
        self._jobs.pop(job_id, None)
        order = self._kills.pop(job_id, None)
        self._on_end(job_id, as_ordered(exit_, order["reason"] if order else None))

    def _handle(self, message: dict[str, Any]) -> None:
        job_id, event = message["id"], message["event"]
        if event == "started":
            job, future = self._starting.pop(job_id, (None, None))
            if job is not None and future is not None:
                self._jobs[job_id] = (job.directory, message["started"])
                future.set_result(message["started"])
        elif event == "refused":
            _, future = self._starting.pop(job_id, (None, None))
            if future is not None:
                future.set_exception(LaunchError(message["error"]))
        elif event == "ended":
            _, started = self._jobs.get(job_id, (None, time.time()))
            self._end(job_id, Exit.from_json(message["exit"]) or lost(started, time.time()))

    def _send(self, message: dict[str, Any]) -> None:
        if self._writer is not None:
            self._writer.write(json.dumps(message).encode() + b"\n")

    async def _hang_up(self) -> None:
        if self._writer is not None:
            self._writer.close()
            with contextlib.suppress(ConnectionError):
                await self._writer.wait_closed()
            self._writer = None


def socket_path(state: Path) -> Path:
    """Where the launcher of a state folder listens: in it, or, as a socket's path is limited to 107 bytes, in
    a private folder under the system's temporary one.

    Raises LaunchError if that folder exists and belongs to somebody else or is open to others.
    """
    path = state / "socket"
    if len(os.fsencode(path)) <= SOCKET_PATH_BYTES:
        return path
    name = hashlib.sha256(os.fsencode(state)).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"leyden-{os.getuid()}-{name}"
    folder.mkdir(mode=0o700, exist_ok=True)
    facts = folder.lstat()
    if folder.is_symlink() or not folder.is_dir() or facts.st_uid != os.getuid() or facts.st_mode & 0o077:
        raise LaunchError(f"{folder} is not a private folder of this user; remove it")
    return folder / "socket"


def inheritable_descriptors() -> set[int]:
    """What a program started by posix_spawn would get of this process, besides its standard streams.

    The launcher outlives this process and its jobs are strangers: a lock or a pipe must not reach them.
    """
    found = set()
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the descriptor of this listing is closed by now
            if int(path.name) > 2 and os.get_inheritable(int(path.name)):
                found.add(int(path.name))
    return found


def _start_message(job: Job) -> dict[str, Any]:
    return {
        "op": "start",
        "id": job.job_id,
        "dir": str(job.directory),
        "argv": list(job.argv),
        "cwd": str(job.cwd),
        "env": job.env,
        "log": str(job.log),
        "log_bytes": job.log_bytes,
        "fork": job.fork,
        "learn": job.learn,
        "limits": job.limits,
        "folders": [str(folder) for folder in job.folders],
        "counts_found": job.counts_found,
        "forward": job.forward,
    }


async def _line(reader: asyncio.StreamReader) -> bytes:
    """The next line; empty at the end of the connection."""
    try:
        return await reader.readline()
    except ConnectionError:
        return b""


async def _read_all(fd: int) -> bytes:
    """What a pipe delivers until its end, within START_LIMIT_S."""
    reader = asyncio.StreamReader()
    file = os.fdopen(fd, "rb", 0)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), file
    )
    try:
        async with asyncio.timeout(START_LIMIT_S):
            return await reader.read()
    except TimeoutError:
        raise LaunchError(f"the launcher was not ready after {START_LIMIT_S:.0f} s; see harness.preload") from None
    finally:
        transport.close()


async def _process_end(pid: int, limit_s: float) -> None:
    """Wait until a process is gone, `limit_s` at most, and collect it if it is a child."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    loop = asyncio.get_running_loop()
    gone = asyncio.Event()
    loop.add_reader(pidfd, gone.set)
    try:
        async with asyncio.timeout(limit_s):
            await gone.wait()
    except TimeoutError:
        return
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)
    try:
        os.waitpid(pid, os.WNOHANG)  # noqa: ASYNC222  (does not block)
    except ChildProcessError:
        return
