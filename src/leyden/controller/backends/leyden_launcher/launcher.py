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
subreaper too, for a reaper that is killed and for what a preloaded module started.

Messages are JSON lines. In: {"op": "hello"}, {"op": "start", "id", "dir", "argv", "cwd", "env", "log",
"log_bytes", "fork", "learn", "limits", "folders", "forward"}, {"op": "kill", "id", "reason", "grace_s"},
{"op": "stop"}. Out: {"event": "hello", "running": {id: {started, dir}}, ...}, {"event": "started" | "refused" |
"ended", "id", ...}. The newest controller replaces an older one.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

from . import removal
from .cgroups import Cgroups, remove
from .control_socket import ControlSocket
from .job import Become, Job
from .json_files import FAILED, LOST, log, publish, read_json
from .preload import Preload, freeze
from .processes import (
    SIGNALS,
    children,
    descendants,
    drain,
    fork,
    is_stopped,
    kill_all,
    kill_marked,
    kill_session,
    kill_tree,
    kill_until_none,
    open_process,
    subreaper,
    wake_pipe,
)
from .reaper import Reaper, exit_record

PROTOCOL = 2
STRAYS_LIMIT_S = 5.0
INSIST_S = 3.0


class Launcher:
    def __init__(self, spec: dict[str, Any]) -> None:
        self.state = spec["state"]
        self.orphan_grace_s = float(spec["orphan_grace_s"])
        self.ready_fd = spec.get("ready_fd")
        self.jobs: dict[str, dict[str, Any]] = {}  # id -> {"pid", "dir", "started", "pidfd" or None}
        self.stopping: str | None = None
        self.limits = spec["limits"]
        self.groups = Cgroups(self.state)
        self.preload = Preload(spec["preload"], self.state)
        self.poll = selectors.PollSelector()
        self.controllers = ControlSocket(self.poll, spec["socket"], self.handle)

    # Opening

    def open(self) -> None:
        """Preload, take the lock of the state folder, listen, adopt what an earlier launcher left running."""
        os.makedirs(os.path.join(self.state, "jobs"), mode=0o700, exist_ok=True)
        self.lock = os.open(os.path.join(self.state, "lock"), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.give_up("another launcher serves this run folder")
        subreaper()
        wrong = self.groups.open(self.limits) or self.preload.load()
        if wrong:
            self.give_up(wrong)
        self.alive_r, self.alive_w = os.pipe()
        self.wake_r, self.wake_w = wake_pipe()
        for number in SIGNALS:
            signal.signal(number, self.on_signal)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self.controllers.listen()
        self.poll.register(self.wake_r, selectors.EVENT_READ, self.on_wake)
        self.adopt()
        self.groups.sweep(set(self.jobs))
        freeze()
        self.say_ready({"ready": True})

    def give_up(self, message: str) -> NoReturn:
        kill_until_none(STRAYS_LIMIT_S)
        self.groups.close()
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
            record: Any = read_json(os.path.join(folder, name)) if name.endswith(".json") else None
            if not is_record(record, name):
                with contextlib.suppress(OSError):
                    removal.remove(os.path.join(folder, name))
                continue
            if not self.adopt_one(record):
                self.jobs[record["id"]] = dict(record, pidfd=None)
                self.ended(record["id"], signal.SIGKILL)  # or its record would be gone too

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
            self.controllers.unlink()
            os.rmdir(os.path.dirname(self.controllers.path))  # if it is one of the socket's own: else it is not empty
        kill_until_none(STRAYS_LIMIT_S)
        self.groups.close()
        log(f"ends: {self.stopping}")

    def next_timeout(self) -> float | None:
        if self.controllers.current is None and not self.stopping:
            return max(0.05, self.controllers.alone_since + self.orphan_grace_s - time.monotonic())
        return 1.0 if self.preload.probe or any("insist_at" in job for job in self.jobs.values()) else None

    def look_at_clock(self) -> None:
        alone = self.controllers.current is None and not self.stopping
        if alone and time.monotonic() > self.controllers.alone_since + self.orphan_grace_s:
            self.stop("orphaned")
        self.preload.end_slow_probe()
        self.insist()

    def on_signal(self, number: int, frame: object) -> None:
        """A controller stops its launcher by a message; while there is one, a job could have sent the signal."""
        if number == signal.SIGTERM and not self.stopping and self.controllers.current is None:
            self.stop("stopped")

    def on_wake(self, fd: int, mask: int) -> None:
        drain(fd)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            for job_id in [i for i, j in self.jobs.items() if j["pid"] == pid and j["pidfd"] is None]:
                self.ended(job_id, status)
            if pid == self.preload.probe:
                self.preload.take_probe()

    def kill_strays(self) -> None:
        """Children that are no reaper: what a killed reaper left."""
        known = {j["pid"] for j in self.jobs.values()} | {self.preload.probe}
        for pid in set(children(os.getpid())) - known:
            kill_all([pid, *descendants(pid)], signal.SIGKILL)

    def on_adopted_exit(self, job_id: str) -> Callable[[int, int], None]:
        def read(fd: int, mask: int) -> None:
            self.poll.unregister(fd)
            os.close(fd)
            self.ended(job_id)

        return read

    def ended(self, job_id: str, status: int | None = None) -> None:
        """The reaper is gone: its exit.json says how the job ended, or the job is lost with it. What a reaper that was
        killed seems to have written could be the job's. `status` is that of wait(2), None where it cannot be known.
        """
        job = self.jobs.pop(job_id)
        killed = status is not None and os.WIFSIGNALED(status)
        result = None if killed else read_json(os.path.join(job["dir"], "exit.json"))
        if result is None:
            record = read_json(self.record_path(job_id))
            if is_record(record, f"{job_id}.json") and record["pid"] != job["pid"] and self.adopt_one(record):
                return  # an earlier launcher's reaper had this id first
            remove((record if is_record(record, f"{job_id}.json") else job).get("groups", []))
            kill_session(job.get("leader"))
            self.kill_strays()
            kill_marked(os.path.dirname(job["dir"]) if ".grade" in job_id else job["dir"])
            why = LOST if killed or not status else FAILED
            result = exit_record(job["started"], killed=job.get("ordered") or why)
            with contextlib.suppress(OSError):
                publish(os.path.join(job["dir"], "exit.json"), result)
        with contextlib.suppress(OSError):
            removal.remove(self.record_path(job_id))
        if job.get("learns"):
            self.preload.start_probe(self.leave)
        self.controllers.send({"event": "ended", "id": job_id, "exit": result})

    # Messages

    def handle(self, message: dict[str, Any]) -> None:
        op = message["op"]
        if op == "hello":
            running = {i: {"started": started_by_now(j), "dir": j["dir"]} for i, j in self.jobs.items()}
            facts = {"protocol": PROTOCOL, "pid": os.getpid(), "preload": self.preload.names, "python": sys.argv[2]}
            facts["limits"] = sorted(self.limits)
            self.controllers.send({"event": "hello", **facts, "running": running})
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
            self.controllers.send({"event": "refused", "id": job["id"], "error": "the launcher is stopping"})
            return
        if job["id"] not in self.jobs:
            self.preload.prepare(job)
            sys.stdout.flush()
            sys.stderr.flush()
            started = time.time()
            try:
                pid = self.fork_reaper(job)
            except OSError as error:
                self.controllers.send({"event": "refused", "id": job["id"], "error": f"fork: {error.strerror}"})
                return
            self.jobs[job["id"]] = {
                "pid": pid,
                "pidfd": None,
                "dir": job["dir"],
                "started": started,
                "began": time.monotonic(),
                "learns": job["learns"],
            }
        self.controllers.send({"event": "started", "id": job["id"], "started": self.jobs[job["id"]]["started"]})

    def fork_reaper(self, job: Job) -> int:
        pid = fork()
        if pid:
            return pid
        try:
            self.leave()
            path, grace_s = self.record_path(job["id"]), self.orphan_grace_s
            Reaper(job, path, self.alive_r, self.controllers.path, grace_s, self.groups).run()
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
            publish(os.path.join(job["dir"], "kill.json"), {"reason": reason, "grace_s": grace_s})
        job["ordered"], job["insist_at"] = reason, time.monotonic() + grace_s + INSIST_S
        self.signal(job, signal.SIGTERM)
        self.signal(job, signal.SIGCONT)  # for a reaper that its job has stopped

    @staticmethod
    def signal(job: dict[str, Any], number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            if job["pidfd"] is None:
                os.kill(job["pid"], number)
            else:
                signal.pidfd_send_signal(job["pidfd"], number)

    def insist(self) -> None:
        """A reaper that is stopped again and again is killed with its job, which ends as it was told to."""
        now = time.monotonic()
        for job in [j for j in self.jobs.values() if j.get("insist_at", now) < now]:
            job["insist_at"] = now + INSIST_S
            if is_stopped(job["pid"]):
                kill_tree(job["pid"])
                self.signal(job, signal.SIGKILL)

    def stop(self, reason: str) -> None:
        self.stopping = reason
        for job_id in list(self.jobs):
            self.kill(job_id, reason, 1.0)


def started_by_now(job: dict[str, Any]) -> float:
    """When a job started by the clock as it stands now, whoever has set it meanwhile."""
    return time.time() - (time.monotonic() - job["began"]) if "began" in job else float(job["started"])


def is_record(value: Any, name: str) -> bool:
    """Whether this is what a reaper writes into a file of that name. A job can write into the folder too."""
    return (
        isinstance(value, dict)
        and f"{value.get('id')}.json" == name
        and all(isinstance(value.get(key), int) for key in ("pid", "ticks"))
        and isinstance(value.get("dir"), str)
        and isinstance(value.get("started"), (int, float))
        and isinstance(value.get("leader", 0), int)
        and isinstance(value.get("groups"), list)
        and all(isinstance(group, str) for group in value["groups"])
    )
