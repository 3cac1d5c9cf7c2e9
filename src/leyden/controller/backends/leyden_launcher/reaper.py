"""One job's process: it starts the job, keeps its log, kills whatever is left, and says how it ended."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import socket
import time
from typing import Any, NoReturn

from .capped_log import READ_BYTES, CappedLog
from .files import log, read_json, write_json, write_plain
from .job import Job, start_job
from .processes import SIGNALS, children, descendants, drain, kill_all, start_ticks, subreaper, wake_pipe

KILL_LIMIT_S = 30.0


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
