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

from . import cgroups
from .capped_log import READ_BYTES, CappedLog
from .disk import DiskWatch
from .forward import forward
from .job import Job, start_job
from .json_files import log, publish, read_json, write_json, write_new
from .processes import SIGNALS, children, descendants, drain, kill_all, kill_tree, start_ticks, subreaper, wake_pipe
from .sandboxed import DIED, FINAL

KILL_LIMIT_S = 30.0
MOST_GRACE_S = 60.0
OVER_LIMIT = "limit"
NO_SANDBOX = "the sandbox could not be made; bwrap's reason is in the log"


class Reaper:
    """Runs one job, in a process of its own: starts it, keeps its log, kills what is left, writes exit.json.

    `groups` are the run's control groups; a reaper that outlives the launcher removes them if they are empty.
    """

    def __init__(
        self,
        job: Job,
        record_path: str,
        alive_fd: int,
        socket_path: str,
        orphan_grace_s: float,
        groups: cgroups.Cgroups,
    ) -> None:
        self.job = job
        self.record_path = record_path
        self.alive_fd = alive_fd
        self.socket_path = socket_path
        self.orphan_grace_s = orphan_grace_s
        self.groups = groups
        self.group = groups.group(job["id"], job["limits"])
        self.disk = DiskWatch(
            job["folders"], job["limits"].get("workspace_bytes"), counts_found=job.get("counts_found", True)
        )
        self.exit_path = os.path.join(job["dir"], "exit.json")
        self.status: int | None = None
        self.signal: int | None = None
        self.killed: str | None = None
        self.note: str | None = None
        self.error = b""
        self.sandboxed = not job["forward"]  # or its port must still be handed out
        self.kill_at: float | None = None
        self.term = False
        self.lost_launcher: float | None = None

    def run(self) -> NoReturn:
        os.setsid()
        subreaper()
        self.wake_r, wake_w = wake_pipe()
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self.on_term)
        self.started, self.began = time.time(), time.monotonic()
        if os.path.exists(self.exit_path) or not self.write_record():
            os._exit(0)
        log_r, log_w = os.pipe()
        self.log = CappedLog(self.job["log"], self.job["log_bytes"], log_r)
        self.channel, theirs = socket.socketpair()
        self.leader = os.fork()
        if self.leader == 0:
            signal.set_wakeup_fd(-1)
            for fd in (self.wake_r, wake_w, self.alive_fd, log_r, self.log.file, self.channel.detach()):
                os.close(fd)
            start_job(self.job, self.group, log_w, theirs.detach())
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        os.close(log_w)
        theirs.close()
        self.rewrite_record()
        self.watch()
        self.finish()
        os._exit(0)

    def finish(self) -> None:
        """Nothing of the job is alive any more: say how it ended, remove its group and its record."""
        while self.read_channel():
            pass
        if not self.sandboxed and not self.error and not self.killed:
            self.error = NO_SANDBOX.encode()
        self.log.close()
        notes = [text for text in (self.note, self.group.events()) if text]
        cgroups.remove(list(self.group.folders))
        record = exit_record(
            self.started,
            began=self.began,
            status=self.signal or self.status,  # the status of a death is its signal; see wait(2)
            killed=self.killed,
            error=self.error.lstrip(FINAL).decode(errors="replace") or None,
            final=self.error.startswith(FINAL),
            note="; ".join(notes) or None,
            usage=resource.getrusage(resource.RUSAGE_CHILDREN),
            dropped=self.log.dropped,
        )
        publish(self.exit_path, record)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.record_path)
        if self.lost_launcher is not None:
            self.groups.close()

    def write_record(self) -> bool:
        record = {
            "id": self.job["id"],
            "dir": self.job["dir"],
            "pid": os.getpid(),
            "ticks": start_ticks(os.getpid()),
            "groups": list(self.group.folders),
        }
        record["started"] = self.started
        self.record = record
        temporary = f"{self.record_path}.{os.urandom(8).hex()}"
        write_new(temporary, record)
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
        for fd in (self.wake_r, self.log.fd, self.alive_fd, self.channel.fileno()):
            poll.register(fd, select.POLLIN | select.POLLHUP)
        give_up = None
        while True:
            for fd, _ in poll.poll(self.timeout_ms()):
                if fd == self.wake_r:
                    drain(fd)
                elif fd == self.log.fd:
                    if not self.log.read():
                        poll.unregister(fd)
                elif fd == self.channel.fileno():
                    if not self.read_channel():
                        poll.unregister(fd)
                else:
                    poll.unregister(fd)
                    self.lost_launcher = time.monotonic()
            if not self.reap():
                return
            self.look_for_launcher()
            self.look_at_disk()
            self.kill_if_due()
            if self.status is not None:
                give_up = give_up or time.monotonic() + KILL_LIMIT_S
                cgroups.kill(list(self.group.folders))
                kill_tree(os.getpid())
                if time.monotonic() > give_up:
                    log(f"{self.job['id']}: processes {children(os.getpid())} cannot be killed")
                    return

    def timeout_ms(self) -> int | None:
        if self.status is not None:
            return 5
        times = [t for t in (self.kill_at, None if self.killed else self.disk.due) if t is not None]
        if self.lost_launcher is not None:
            times.append(time.monotonic() + 1)
        return max(5, int((min(times) - time.monotonic()) * 1000) + 1) if times else None

    def read_channel(self) -> bool:
        """What the job says before it becomes its command: why it cannot, or, from a sandbox, the port to serve; at the
        end, from there, the signal that the command died by. False when nothing is to come.
        """
        try:
            data, fds, _, _ = socket.recv_fds(self.channel, READ_BYTES, 1, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        if fds:
            self.sandboxed = True
            self.start_forwarder(socket.socket(fileno=fds[0]))
        elif data.startswith(DIED):
            self.signal = data[1]
        else:
            self.error += data
        return bool(data)

    def start_forwarder(self, listener: socket.socket) -> None:
        """A child that outlives SIGTERM: a harness that is told to end may still want to call the gateway."""
        if os.fork() == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            for fd in (self.wake_r, self.alive_fd, self.log.fd, self.channel.detach()):
                os.close(fd)
            try:
                forward(listener, *self.job["forward"])
            finally:
                os._exit(1)
        listener.close()

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

    def look_at_disk(self) -> None:
        if self.killed is None and self.status is None:
            self.note = self.disk.over(descendants(os.getpid()) if self.disk.is_due else ())
            if self.note:
                self.killed = OVER_LIMIT
                self.begin_kill(0.0)

    def kill_if_due(self) -> None:
        if self.term and self.killed is None:
            order = read_json(os.path.join(self.job["dir"], "kill.json"))
            self.killed, grace_s = kill_order(order)
            self.begin_kill(grace_s)
        if self.kill_at is not None and time.monotonic() >= self.kill_at:
            cgroups.kill(list(self.group.folders))
            kill_tree(os.getpid())
            self.kill_at = time.monotonic() + 0.01

    def begin_kill(self, grace_s: float) -> None:
        """SIGTERM, and SIGKILL after the grace. A sandbox's own process would end at once, and all in there with it."""
        own = {self.leader} if self.job["forward"] else set()
        kill_all((pid for pid in descendants(os.getpid()) if pid not in own), signal.SIGTERM)
        self.kill_at = time.monotonic() + grace_s


def kill_order(found: Any) -> tuple[str, float]:
    """Why, and the grace in seconds, from a kill.json; a job could have written there."""
    order = found if isinstance(found, dict) else {}
    reason, grace_s = order.get("reason"), order.get("grace_s")
    return (
        reason if isinstance(reason, str) else "stopped",
        float(min(max(grace_s, 0.0), MOST_GRACE_S)) if isinstance(grace_s, (int, float)) else 1.0,
    )


def exit_record(
    started: float,
    *,
    began: float | None = None,
    status: int | None = None,
    killed: str | None = None,
    error: str | None = None,
    final: bool = False,
    note: str | None = None,
    usage: resource.struct_rusage | None = None,
    dropped: int = 0,
) -> dict[str, Any]:
    """What exit.json holds. Times in Unix seconds; `error` says why the command could not be started,
    `note` which limit the job ran into.
    """
    code = None if status is None or os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
    return {
        "exit_code": code,
        "signal": os.WTERMSIG(status) if status is not None and os.WIFSIGNALED(status) else None,
        "started": started,
        "ended": started + max(0.0, time.monotonic() - began) if began is not None else time.time(),
        "cpu_s": round(usage.ru_utime + usage.ru_stime, 4) if usage else None,
        "max_rss_bytes": usage.ru_maxrss * 1024 if usage else None,
        "killed": killed,
        "error": error,
        "final": final,
        "note": note,
        "log_dropped_bytes": dropped,
    }
