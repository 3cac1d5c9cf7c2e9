"""The launcher: one program, standard library only, run by the harness's own interpreter (3.9 or later).

    controller ──unix socket── launcher ──fork── reaper ──fork── harness (own session) ── its descendants

It imports the `preload` modules once and forks for each job, because interpreter start-up is most of a short
job's cost. It outlives the controller; each job's reaper outlives the launcher. What must survive lies in
files: `STATE/jobs/ID.json` exists while a reaper runs (linked into place, so that an id runs once whoever
asks), and `DIR/exit.json` appears, complete, when nothing of the job is alive any more.

Concurrency: the launcher and every reaper are single-threaded loops around poll(); no thread may exist when
the launcher forks. A child inherits nothing of the launcher's but the read end of the pipe that tells it that
the launcher died.

Left behind is nothing: a reaper is a child-subreaper, so that every descendant of the harness, also after
setsid or a double fork, ends as its child and is killed when the harness ends. The launcher kills everything
after `orphan_grace_s` without a controller, a reaper after as long without a launcher. The launcher is a
subreaper too, for a reaper that is killed.

Messages are JSON lines. In: {"op": "hello"}, {"op": "start", "id", "dir", "argv", "cwd", "env", "log",
"log_bytes", "fork"}, {"op": "kill", "id", "reason", "grace_s"}, {"op": "stop"}. Out: {"event": "hello",
"running": {id: {started, dir}}, ...}, {"event": "started" | "refused" | "ended", "id", ...}. The newest controller
replaces an older one.
"""

# ruff: noqa: PTH100, PTH103, PTH105, PTH108, PTH109, PTH110, PTH118, PTH119, PTH120, PTH123, PTH208
from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import resource
import select
import selectors
import signal
import socket
import sys
import time
import types
from collections.abc import Callable, Iterable
from typing import Any, Dict, NoReturn  # noqa: UP035  (evaluated, and Python 3.9 must do it)

Job = Dict[str, Any]  # noqa: UP006  (one start message)
PROTOCOL = 1
PR_SET_CHILD_SUBREAPER = 36
READ_BYTES = 1 << 16
LOG_TAIL_BYTES = 1 << 16
KILL_LIMIT_S = 30.0
PROBE_LIMIT_S = 60.0
SIGNALS = {signal.SIGCHLD, signal.SIGTERM}


def main() -> None:
    """Serve until told to stop; in a forked job, become that job."""
    spec = json.loads(sys.argv[1])
    if sys.path and os.path.realpath(sys.path[0]) == os.path.dirname(os.path.realpath(__file__)):
        del sys.path[0]
    os.umask(0o077)
    job = None
    try:
        launcher = Launcher(spec)
        launcher.open()
        launcher.serve()
    except Become as become:
        job = become.job
    if job is not None:
        run_here(job)


class Become(BaseException):
    """Raised in a forked child to leave all frames of the launcher before the harness starts."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.job = job


class Launcher:
    def __init__(self, spec: dict[str, Any]) -> None:
        self.state = spec["state"]
        self.socket_path = spec["socket"]
        self.preload = spec["preload"]
        self.orphan_grace_s = float(spec["orphan_grace_s"])
        self.ready_fd = spec.get("ready_fd")
        self.jobs: dict[str, dict[str, Any]] = {}  # id -> {"pid", "dir", "started", "pidfd" or None}
        self.scripts: dict[str, tuple[str, str]] = {}
        self.can_fork = True
        self.learn = "wanted" if self.preload else "off"
        self.controller: tuple[socket.socket, bytearray] | None = None
        self.alone_since = time.monotonic()
        self.stopping: str | None = None
        self.probe: dict[str, Any] | None = None

    # Opening

    def open(self) -> None:
        """Preload, take the lock of the state folder, listen, adopt what an earlier launcher left running."""
        os.makedirs(os.path.join(self.state, "jobs"), mode=0o700, exist_ok=True)
        self.lock = os.open(os.path.join(self.state, "lock"), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.give_up("another launcher serves this run folder")
        self.import_preloaded()
        subreaper()
        self.alive_r, self.alive_w = os.pipe()
        self.wake_r, self.wake_w = wake_pipe()
        for number in SIGNALS:
            signal.signal(number, self.on_signal)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.socket_path)
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(self.socket_path)
        self.listener.listen(64)
        self.listener.setblocking(False)
        self.poll = selectors.PollSelector()
        self.poll.register(self.listener, selectors.EVENT_READ, self.accept)
        self.poll.register(self.wake_r, selectors.EVENT_READ, self.on_wake)
        self.adopt()
        freeze()
        self.say_ready({"ready": True})

    def import_preloaded(self) -> None:
        for name in self.preload:
            try:
                importlib.import_module(name)
            except BaseException as error:
                self.give_up(f"harness.preload: {name} cannot be imported: {type(error).__name__}: {error}")
        if self.preload:
            self.scripts = console_scripts()
        alive = threads()
        if alive:
            self.give_up(
                f"harness.preload: {alive} alive after importing {self.preload}; a process with threads cannot "
                "be forked safely. Leave out the module that starts them, or stop it through harness.env "
                "(for example OPENBLAS_NUM_THREADS: '1')"
            )

    def give_up(self, message: str) -> NoReturn:
        self.say_ready({"error": message})
        log(message)
        os._exit(1)

    def say_ready(self, answer: dict[str, Any]) -> None:
        if self.ready_fd is not None:
            with contextlib.suppress(OSError):
                os.write(self.ready_fd, json.dumps(answer).encode())
            os.close(self.ready_fd)
            self.ready_fd = None

    def adopt(self) -> None:
        """Take over reapers of an earlier launcher: the same process by id and start time, watched by pidfd."""
        folder = os.path.join(self.state, "jobs")
        for name in sorted(os.listdir(folder)):
            if not name.endswith(".json"):
                os.unlink(os.path.join(folder, name))
                continue
            record = read_json(os.path.join(folder, name))
            if record is None:
                continue
            if not self.adopt_one(record):
                self.jobs[record["id"]] = dict(record, pidfd=None)
                self.ended(record["id"])

    def adopt_one(self, record: dict[str, Any]) -> bool:
        """Watch a reaper that is no child; False if it is gone."""
        pidfd = open_process(record["pid"], record["ticks"])
        if pidfd is None:
            return False
        self.jobs[record["id"]] = dict(record, pidfd=pidfd)
        self.poll.register(pidfd, selectors.EVENT_READ, self.on_adopted_exit(record["id"]))
        return True

    # The loop

    def serve(self) -> None:
        while not (self.stopping and not self.jobs):
            for key, mask in self.poll.select(self.next_timeout()):
                key.data(key.fileobj, mask)
            self.look_at_clock()
        with contextlib.suppress(OSError):
            os.unlink(self.socket_path)
        if self.probe:
            os.kill(self.probe["pid"], signal.SIGKILL)
        log(f"ends: {self.stopping}")

    def next_timeout(self) -> float | None:
        if self.controller is None and not self.stopping:
            return max(0.05, self.alone_since + self.orphan_grace_s - time.monotonic())
        return 1.0 if self.probe else None

    def look_at_clock(self) -> None:
        now = time.monotonic()
        if self.controller is None and not self.stopping and now > self.alone_since + self.orphan_grace_s:
            self.stop("orphaned")
        if self.probe and now > self.probe["until"]:
            os.kill(self.probe["pid"], signal.SIGKILL)

    def on_signal(self, number: int, frame: object) -> None:
        if number == signal.SIGTERM and not self.stopping:
            self.stop("stopped")

    def on_wake(self, fd: int, mask: int) -> None:
        drain(fd)
        while True:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            for job_id in [i for i, j in self.jobs.items() if j["pid"] == pid and j["pidfd"] is None]:
                self.ended(job_id)
            if self.probe and pid == self.probe["pid"]:
                self.take_probe()

    def kill_strays(self) -> None:
        """Children that are no reaper: what a killed reaper left."""
        known = {j["pid"] for j in self.jobs.values()} | {self.probe["pid"] if self.probe else 0}
        for pid in set(children(os.getpid())) - known:
            kill_all([pid, *descendants(pid)], signal.SIGKILL)

    def on_adopted_exit(self, job_id: str) -> Callable[[int, int], None]:
        def read(fd: int, mask: int) -> None:
            self.poll.unregister(fd)
            os.close(fd)
            self.ended(job_id)

        return read

    def ended(self, job_id: str) -> None:
        """The reaper is gone: its exit.json says how the job ended, or the job is lost with it."""
        job = self.jobs.pop(job_id)
        result = read_json(os.path.join(job["dir"], "exit.json"))
        if result is None:
            record = read_json(self.record_path(job_id))
            if record and record["pid"] != job["pid"] and self.adopt_one(record):
                return  # an earlier launcher's reaper had this id first
            kill_session(job.get("leader"))
            self.kill_strays()
            result = exit_record(job["started"], killed="lost")
            with contextlib.suppress(OSError):
                write_json(os.path.join(job["dir"], "exit.json"), result)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.record_path(job_id))
        if job.get("learns"):
            self.start_probe()
        self.send({"event": "ended", "id": job_id, "exit": result})

    # Controllers

    def accept(self, listener: socket.socket, mask: int) -> None:
        connection, _ = listener.accept()
        connection.setblocking(False)
        buffers = {"in": bytearray(), "out": bytearray()}
        self.poll.register(connection, selectors.EVENT_READ, lambda c, m: self.on_data(c, m, buffers))

    def on_data(self, connection: socket.socket, mask: int, buffers: dict[str, bytearray]) -> None:
        if mask & selectors.EVENT_WRITE:
            self.flush(connection, buffers["out"])
        if not mask & selectors.EVENT_READ:
            return
        try:
            data = connection.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.hang_up(connection)
            return
        buffers["in"] += data
        while b"\n" in buffers["in"]:
            line, _, rest = bytes(buffers["in"]).partition(b"\n")
            buffers["in"][:] = rest
            try:
                message = json.loads(line)
            except ValueError:
                self.hang_up(connection)
                return
            self.handle(message, connection, buffers)

    def hang_up(self, connection: socket.socket) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self.poll.unregister(connection)
        connection.close()
        if self.controller and self.controller[0] is connection:
            self.controller = None
            self.alone_since = time.monotonic()

    def send(self, message: dict[str, Any]) -> None:
        if self.controller:
            connection, out = self.controller
            out += json.dumps(message).encode() + b"\n"
            self.flush(connection, out)

    def flush(self, connection: socket.socket, out: bytearray) -> None:
        try:
            while out:
                del out[: connection.send(out)]
        except BlockingIOError:
            pass
        except OSError:
            self.hang_up(connection)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if out else 0)
        key = self.poll.get_key(connection)
        if key.events != events:
            self.poll.modify(connection, events, key.data)

    def handle(self, message: dict[str, Any], connection: socket.socket, buffers: dict[str, bytearray]) -> None:
        op = message["op"]
        if op == "hello":
            if self.controller and self.controller[0] is not connection:
                self.hang_up(self.controller[0])
            self.controller = (connection, buffers["out"])
            running = {i: {"started": j["started"], "dir": j["dir"]} for i, j in self.jobs.items()}
            facts = {"protocol": PROTOCOL, "pid": os.getpid(), "preload": self.preload, "python": sys.argv[2]}
            self.send({"event": "hello", **facts, "running": running})
        elif op == "start":
            self.start(message)
        elif op == "kill":
            self.kill(message["id"], message["reason"], message["grace_s"])
        elif op == "stop":
            self.stop("stopped")

    # Jobs

    def record_path(self, job_id: str) -> str:
        return os.path.join(self.state, "jobs", job_id + ".json")

    def start(self, job: Job) -> None:
        if self.stopping:
            self.send({"event": "refused", "id": job["id"], "error": "the launcher is stopping"})
            return
        if job["id"] not in self.jobs:
            job["entry"] = self.entry(job)
            job["learns"] = bool(job["entry"]) and job.get("learn", True) and self.learn == "wanted"
            if job["learns"]:
                self.learn = "running"
                job["late_imports"] = os.path.join(self.state, "late_imports.json")
            sys.stdout.flush()
            sys.stderr.flush()
            started = time.time()
            try:
                pid = self.fork_reaper(job)
            except OSError as error:
                self.send({"event": "refused", "id": job["id"], "error": f"fork: {error.strerror}"})
                return
            self.jobs[job["id"]] = {
                "pid": pid,
                "pidfd": None,
                "dir": job["dir"],
                "started": started,
                "learns": job["learns"],
            }
        self.send({"event": "started", "id": job["id"], "started": self.jobs[job["id"]]["started"]})

    def entry(self, job: Job) -> list[str] | None:
        """How a forked interpreter runs the command: a (module, attribute), a file, a module; None to exec
        it.
        """
        argv = job["argv"]
        if not job["fork"] or not self.can_fork:
            return None
        name = os.path.basename(argv[0])
        if name in self.scripts and os.path.dirname(argv[0]) in ("", os.path.dirname(sys.executable)):
            return ["script", *self.scripts[name]]
        if argv[0] in (sys.executable, "python", "python3") and len(argv) > 1:
            if argv[1] == "-m" and len(argv) > 2:
                return ["module", argv[2]]
            if not argv[1].startswith("-"):
                return ["file", argv[1]]
        return None

    def fork_reaper(self, job: Job) -> int:
        """Fork with signals blocked, so that none reaches a child which still has the launcher's handlers."""
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        pid = os.fork()
        if pid:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
            return pid
        try:
            self.leave()
            Reaper(job, self.record_path(job["id"]), self.alive_r, self.socket_path, self.orphan_grace_s).run()
        except Become:
            raise
        except BaseException as error:
            log(f"reaper of {job['id']}: {type(error).__name__}: {error}")
        os._exit(1)

    def leave(self) -> None:
        """In a child: close what belongs to the launcher."""
        signal.set_wakeup_fd(-1)
        keys = list(self.poll.get_map().values())
        for fd in {*(k.fd for k in keys), self.lock, self.alive_w, self.wake_w}:
            os.close(fd)
        for key in keys:
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.detach()

    def kill(self, job_id: str, reason: str, grace_s: float) -> None:
        job = self.jobs.get(job_id)
        if job is None:
            return
        with contextlib.suppress(OSError):
            write_json(os.path.join(job["dir"], "kill.json"), {"reason": reason, "grace_s": grace_s})
        with contextlib.suppress(ProcessLookupError):
            if job["pidfd"] is None:
                os.kill(job["pid"], signal.SIGTERM)
            else:
                signal.pidfd_send_signal(job["pidfd"], signal.SIGTERM)

    def stop(self, reason: str) -> None:
        self.stopping = reason
        for job_id in list(self.jobs):
            self.kill(job_id, reason, 1.0)

    # Modules that the harness imports late

    def start_probe(self) -> None:
        """Try the first job's late imports in a fork, so that one that starts a thread or hangs does no harm."""
        names = read_json(os.path.join(self.state, "late_imports.json"))
        if names is None:
            self.learn = "wanted"
            return
        self.learn = "probing"
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(BaseException):
                self.leave()
                os.setsid()
                safe = import_until_thread(names)
                write_json(os.path.join(self.state, "safe_imports.json"), safe)
            os._exit(0)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        self.probe = {"pid": pid, "until": time.monotonic() + PROBE_LIMIT_S}

    def take_probe(self) -> None:
        """Import what the probe found harmless. If a thread is alive all the same, nothing is forked any
        more.
        """
        self.probe = None
        self.learn = "off"
        names = read_json(os.path.join(self.state, "safe_imports.json")) or []
        count = len(import_until_thread(names))
        alive = threads()
        if alive:
            self.can_fork = False
            log(f"late imports left {alive} alive; jobs are started without preloading from now on")
        freeze()
        log(f"imported {count} modules that the first job imported late")


class Reaper:
    """Runs one job, in a process of its own: starts it, keeps its log, kills what is left, writes exit.json."""

    def __init__(self, job: Job, record_path: str, alive_fd: int, socket_path: str, orphan_grace_s: float) -> None:
        self.job = job
        self.record_path = record_path
        self.alive_fd = alive_fd
        self.socket_path = socket_path
        self.orphan_grace_s = orphan_grace_s
        self.exit_path = os.path.join(job["dir"], "exit.json")
        self.status: int | None = None
        self.killed: str | None = None
        self.kill_at: float | None = None
        self.term = False
        self.lost_launcher: float | None = None

    def run(self) -> NoReturn:
        os.setsid()
        subreaper()
        self.wake_r, wake_w = wake_pipe()
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self.on_term)
        self.started = time.time()
        if os.path.exists(self.exit_path) or not self.write_record():
            os._exit(0)
        log_r, log_w = os.pipe()
        error_r, error_w = os.pipe()
        self.leader = os.fork()
        if self.leader == 0:
            signal.set_wakeup_fd(-1)
            for fd in (self.wake_r, wake_w, self.alive_fd, log_r, error_r):
                os.close(fd)
            start_job(self.job, log_w, error_w)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        os.close(log_w)
        os.close(error_w)
        self.rewrite_record()
        error = b"".join(iter(lambda: os.read(error_r, READ_BYTES), b"")).decode(errors="replace") or None
        self.log = CappedLog(self.job["log"], self.job["log_bytes"], log_r)
        self.watch()
        self.log.close()
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        write_json(
            self.exit_path,
            exit_record(
                self.started, status=self.status, killed=self.killed, error=error, usage=usage, dropped=self.log.dropped
            ),
        )
        os.unlink(self.record_path)
        os._exit(0)

    def write_record(self) -> bool:
        record = {
            "id": self.job["id"],
            "dir": self.job["dir"],
            "pid": os.getpid(),
            "ticks": start_ticks(os.getpid()),
        }
        record["started"] = self.started
        self.record = record
        temporary = f"{self.record_path}.{os.getpid()}"
        write_plain(temporary, record)
        try:
            os.link(temporary, self.record_path)
        except FileExistsError:
            return False
        finally:
            os.unlink(temporary)
        return True

    def rewrite_record(self) -> None:
        self.record["leader"] = self.leader
        write_json(self.record_path, self.record)

    def on_term(self, number: int, frame: object) -> None:
        self.term = True

    def watch(self) -> None:
        """Until the harness and all its descendants are gone."""
        poll = select.poll()
        for fd in (self.wake_r, self.log.fd, self.alive_fd):
            poll.register(fd, select.POLLIN | select.POLLHUP)
        give_up = None
        while True:
            for fd, _ in poll.poll(self.timeout_ms()):
                if fd == self.wake_r:
                    drain(fd)
                elif fd == self.log.fd:
                    if not self.log.read():
                        poll.unregister(fd)
                else:
                    poll.unregister(fd)
                    self.lost_launcher = time.monotonic()
            if not self.reap():
                return
            self.look_for_launcher()
            self.kill_if_due()
            if self.status is not None:
                give_up = give_up or time.monotonic() + KILL_LIMIT_S
                kill_all(descendants(os.getpid()), signal.SIGKILL)
                if time.monotonic() > give_up:
                    log(f"{self.job['id']}: processes {children(os.getpid())} cannot be killed")
                    return

    def timeout_ms(self) -> int | None:
        if self.status is not None:
            return 5
        if self.kill_at is not None:
            return max(5, int((self.kill_at - time.monotonic()) * 1000))
        return 1000 if self.lost_launcher is not None else None

    def reap(self) -> bool:
        """Collect the dead; False when no child is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self.leader:
                self.status = status

    def look_for_launcher(self) -> None:
        """After the launcher died: has another one opened the socket? If none has for the grace, end."""
        if self.lost_launcher is None:
            return
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
            probe.connect(self.socket_path)
            self.lost_launcher = time.monotonic()
        if time.monotonic() > self.lost_launcher + self.orphan_grace_s and self.killed is None:
            self.killed = "orphaned"
            self.begin_kill(1.0)

    def kill_if_due(self) -> None:
        if self.term and self.killed is None:
            order = read_json(os.path.join(self.job["dir"], "kill.json")) or {}
            self.killed = order.get("reason", "stopped")
            self.begin_kill(order.get("grace_s", 1.0))
        if self.kill_at is not None and time.monotonic() >= self.kill_at:
            kill_all(descendants(os.getpid()), signal.SIGKILL)
            self.kill_at = time.monotonic() + 0.01

    def begin_kill(self, grace_s: float) -> None:
        kill_all(descendants(os.getpid()), signal.SIGTERM)
        self.kill_at = time.monotonic() + grace_s


class CappedLog:
    """Output of a job, appended to a file: the first bytes as they come, at the end the last 64 KiB.

    The reaper drains a pipe, so that no limit of the operating system reaches the harness and a flood costs
    neither disk nor memory; what is left out is counted.
    """

    def __init__(self, path: str, limit: int, fd: int) -> None:
        self.fd = fd
        os.set_blocking(fd, False)
        self.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self.tail_limit = min(LOG_TAIL_BYTES, limit // 2)
        self.room = limit - self.tail_limit
        self.tail = bytearray()
        self.dropped = 0

    def read(self) -> bool:
        """Take what is there, a few buffers at most; False at the end of the output."""
        for _ in range(16):
            try:
                data = os.read(self.fd, READ_BYTES)
            except BlockingIOError:
                return True
            if not data:
                return False
            self.add(data)
        return True

    def add(self, data: bytes) -> None:
        head = data[: self.room]
        self.room -= len(head)
        write_out(self.file, head)
        self.tail += data[len(head) :]
        over = len(self.tail) - self.tail_limit
        if over > 0:
            del self.tail[:over]
            self.dropped += over

    def close(self) -> None:
        while self.read():
            if not select.select([self.fd], [], [], 0)[0]:
                break
        if self.dropped:
            write_out(self.file, f"\n[leyden: {self.dropped} bytes left out, log_bytes]\n".encode())
        write_out(self.file, bytes(self.tail))
        os.close(self.file)


# In the job's own process


def start_job(job: Job, log_fd: int, error_fd: int) -> NoReturn:
    """Session, output, folder; then exec, or Become to run in this interpreter. A failure goes to `error_fd`."""
    try:
        os.setsid()
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (log_fd, 1), (log_fd, 2)):
            os.dup2(source, target)
        os.close(null)
        os.close(log_fd)
        os.umask(0o022)
        os.chdir(job["cwd"])
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        if job["entry"] is None:
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            os.execvpe(program(job["argv"][0]), job["argv"], job["env"])  # noqa: S606
        os.close(error_fd)
    except OSError as error:
        text = f"cannot start {job['argv'][0]!r} in {job['cwd']}: {error.strerror}"
        os.write(error_fd, text.encode())
        os._exit(127)
    raise Become(job)


def program(name: str) -> str:
    """A bare name means the command installed beside this interpreter, if there is one, else the one on PATH."""
    beside = os.path.join(os.path.dirname(sys.executable), name)
    return beside if os.sep not in name and os.access(beside, os.X_OK) else name


def run_here(job: Job) -> NoReturn:
    """Run the command in this forked interpreter as `python` would have run it afresh, then end the process."""
    import atexit
    import threading

    argv, env = job["argv"], job["env"]
    become_fresh(argv, env)
    before = set(sys.modules)
    code: Any = 0
    try:
        sys.exit(call_entry(job["entry"], argv))
    except SystemExit as end:
        code = end.code
        if code is not None and not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    if job["learns"]:
        report_late_imports(job, before)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit((code or 0) & 0xFF)


def become_fresh(argv: list[str], env: dict[str, str]) -> None:
    """What interpreter start-up would have read from the environment and a fork keeps from its parent."""
    os.environ.clear()
    os.environ.update(env)
    sys.dont_write_bytecode = bool(env.get("PYTHONDONTWRITEBYTECODE"))
    sys.path[:0] = [p for p in env.get("PYTHONPATH", "").split(os.pathsep) if p and p not in sys.path]
    if env.get("PYTHONUNBUFFERED"):
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(write_through=True)  # type: ignore[union-attr]
    time.tzset()
    tempfile: Any = sys.modules.get("tempfile")
    if tempfile:
        tempfile.tempdir = None
    numpy_random: Any = sys.modules.get("numpy.random")
    if numpy_random:
        numpy_random.seed()
    sys.argv = list(argv)
    gc.enable()


def call_entry(entry: list[str], argv: list[str]) -> Any:
    kind, *where = entry
    if kind == "script":
        path = os.path.join(os.path.dirname(sys.executable), os.path.basename(argv[0]))
        main_module = types.ModuleType("__main__")
        main_module.__file__ = sys.argv[0] = path
        setattr(main_module, "launcher", sys.modules["__main__"])  # keeps this file's names alive  # noqa: B010
        sys.modules["__main__"] = main_module
        target: Any = importlib.import_module(where[0])
        for name in where[1].split("."):
            target = getattr(target, name)
        return target()
    import runpy

    sys.argv = sys.argv[2:] if kind == "module" else sys.argv[1:]
    if kind == "module":
        sys.path.insert(0, os.getcwd())
        runpy.run_module(where[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(where[0])))
        runpy.run_path(where[0], run_name="__main__")
    return None


def report_late_imports(job: Job, before: set[str]) -> None:
    """Names imported since the fork, in order, without those that come from the job's own folder."""
    here = os.path.realpath(job["dir"]) + os.sep

    def foreign(name: str) -> bool:
        path = getattr(sys.modules.get(name), "__file__", None)
        return path is not None and not os.path.realpath(path).startswith(here)

    names = [n for n in list(sys.modules) if n not in before and n not in ("__main__", "__mp_main__") and foreign(n)]
    with contextlib.suppress(OSError):
        write_json(job["late_imports"], names)


def import_until_thread(names: list[str]) -> list[str]:
    """Import what can be imported; stop before the first module after which a thread is alive."""
    done = []
    for name in names:
        if name not in sys.modules:
            with contextlib.suppress(BaseException):
                importlib.import_module(name)
        if threads():
            break
        done.append(name)
    return done


# Processes and files


def subreaper() -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def threads() -> str:
    """A description of the threads besides the main one, or an empty string."""
    count = len(os.listdir("/proc/self/task")) - 1
    if count == 0:
        return ""
    threading = sys.modules.get("threading")
    names = [t.name for t in threading.enumerate()[1:]] if threading else []
    return f"{count} thread(s) ({', '.join(names) or 'native'})"


def freeze() -> None:
    """Keep the collector away from what is shared with forks, so that their pages stay shared."""
    gc.collect()
    gc.freeze()


def console_scripts() -> dict[str, tuple[str, str]]:
    """name -> (module, attribute) of this interpreter's installed commands."""
    from importlib.metadata import distributions

    entries = [e for d in distributions() for e in d.entry_points if e.group == "console_scripts"]
    split = {e.name: e.value.split("[")[0].strip().partition(":") for e in entries}
    return {name: (module.strip(), attribute.strip()) for name, (module, _, attribute) in split.items()}


def stat_fields(pid: int) -> list[bytes]:
    """Fields of /proc/PID/stat from the third on (state, ppid, pgrp, session, ...)."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()


def start_ticks(pid: int) -> int | None:
    try:
        return int(stat_fields(pid)[19])
    except (OSError, IndexError):
        return None


def open_process(pid: int, ticks: int | None) -> int | None:
    """A pidfd of the process, if it is the one that started then."""
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return None
    if start_ticks(pid) == ticks and stat_fields(pid)[0] != b"Z":
        return pidfd
    os.close(pidfd)
    return None


def children(pid: int) -> list[int]:
    """Ids of the direct children, or none if the process is gone."""
    found: list[int] = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children", "rb") as file:
                found += map(int, file.read().split())
    except FileNotFoundError:
        if os.path.exists(f"/proc/{pid}/task") and not os.path.exists(f"/proc/{pid}/task/{pid}/children"):
            return [p for p in processes() if ppid(p) == pid]  # a kernel without CONFIG_PROC_CHILDREN
    except OSError:
        pass
    return found


def processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def ppid(pid: int) -> int | None:
    try:
        return int(stat_fields(pid)[1])
    except (OSError, IndexError):
        return None


def descendants(pid: int) -> list[int]:
    found, front = [], [pid]
    while front:
        front = [c for p in front for c in children(p)]
        found += front
    return found


def kill_all(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def kill_session(leader: int | None) -> None:
    """The last resort for a job whose reaper was killed while the launcher was not its parent."""
    if not leader:
        return
    for pid in processes():
        with contextlib.suppress(OSError, IndexError):
            if int(stat_fields(pid)[3]) == leader:
                os.kill(pid, signal.SIGKILL)


def exit_record(
    started: float,
    *,
    status: int | None = None,
    killed: str | None = None,
    error: str | None = None,
    usage: resource.struct_rusage | None = None,
    dropped: int = 0,
) -> dict[str, Any]:
    """What exit.json holds. Times in Unix seconds; `error` says why the command could not be started."""
    code = None if status is None or os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
    return {
        "exit_code": code,
        "signal": os.WTERMSIG(status) if status is not None and os.WIFSIGNALED(status) else None,
        "started": started,
        "ended": time.time(),
        "cpu_s": round(usage.ru_utime + usage.ru_stime, 4) if usage else None,
        "max_rss_bytes": usage.ru_maxrss * 1024 if usage else None,
        "killed": killed,
        "error": error,
        "log_dropped_bytes": dropped,
    }


def wake_pipe() -> tuple[int, int]:
    """A pipe that becomes readable at every signal of this process."""
    r, w = os.pipe()
    os.set_blocking(r, False)
    os.set_blocking(w, False)
    signal.set_wakeup_fd(w, warn_on_full_buffer=False)
    return r, w


def drain(fd: int) -> None:
    with contextlib.suppress(BlockingIOError):
        while os.read(fd, 4096):
            pass


def write_out(fd: int, data: bytes) -> None:
    """All of it, as far as the disk has room."""
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(fd, data) :]


def read_json(path: str) -> Any:
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except (OSError, ValueError):
        return None


def write_plain(path: str, value: object) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        json.dump(value, file)


def write_json(path: str, value: object) -> None:
    """Complete or not at all."""
    temporary = f"{path}.tmp{os.getpid()}"
    write_plain(temporary, value)
    os.replace(temporary, path)


def log(message: str) -> None:
    print(time.strftime("%Y-%m-%d %H:%M:%S"), message, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
