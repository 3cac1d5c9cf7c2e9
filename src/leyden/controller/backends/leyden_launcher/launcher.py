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

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

from .capped_log import READ_BYTES
from .files import log, read_json, write_json
from .job import Become, Job, console_scripts, import_until_thread
from .processes import (
    SIGNALS,
    children,
    descendants,
    drain,
    kill_all,
    kill_session,
    open_process,
    subreaper,
    threads,
    wake_pipe,
)
from .reaper import Reaper, exit_record

PROTOCOL = 1
PROBE_LIMIT_S = 60.0


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


def freeze() -> None:
    """Keep the collector away from what is shared with forks, so that their pages stay shared."""
    gc.collect()
    gc.freeze()
