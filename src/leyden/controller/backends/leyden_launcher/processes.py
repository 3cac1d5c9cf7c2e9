"""Processes through /proc, signals and the pipe that wakes a loop at a signal. Linux only."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterable

PR_SET_CHILD_SUBREAPER = 36
MOST_SWEEPS = 50
MOST_ENVIRON = 1 << 22
SIGNALS = {signal.SIGCHLD, signal.SIGTERM}


def subreaper() -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def fork() -> int:
    """Fork with signals blocked, so that none reaches a child which still has its parent's handlers; the
    child unblocks them.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    pid = -1
    try:
        pid = os.fork()
    finally:
        if pid:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    return pid


def threads() -> str:
    """A description of the threads besides the main one, or an empty string."""
    count = len(os.listdir("/proc/self/task")) - 1
    if count == 0:
        return ""
    threading = sys.modules.get("threading")
    names = [t.name for t in threading.enumerate()[1:]] if threading else []
    return f"{count} thread(s) ({', '.join(names) or 'native'})"


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


def kill_tree(root: int) -> None:
    """SIGKILL to all descendants. They are stopped first, until there is no new one: what forks faster than it can be
    killed forks no more."""
    seen: set[int] = set()
    for _ in range(MOST_SWEEPS):
        new = set(descendants(root)) - seen
        if not new:
            break
        kill_all(new, signal.SIGSTOP)
        seen |= new
    kill_all(seen, signal.SIGKILL)


def is_stopped(pid: int) -> bool:
    with contextlib.suppress(OSError, IndexError):
        return stat_fields(pid)[0] in (b"T", b"t")
    return False


def kill_marked(folder: str) -> None:
    """SIGKILL to every process that has the task of this attempt's folder in its environment: the last resort for what
    left its session and has no reaper any more. What hides from this too only a control group or a sandbox holds.
    """
    mark = b"LEYDEN_TASK=" + os.fsencode(folder) + b"/"
    for pid in set(processes()) - {os.getpid(), os.getppid()}:
        with contextlib.suppress(OSError):
            with open(f"/proc/{pid}/environ", "rb") as file:
                marked = mark in file.read(MOST_ENVIRON)
            if marked:
                os.kill(pid, signal.SIGKILL)


def kill_until_none(limit_s: float) -> None:
    """Kill and collect every descendant of this process, a subreaper, as long as there are any."""
    until = time.monotonic() + limit_s
    while time.monotonic() < until:
        kill_tree(os.getpid())
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.005)


def kill_session(leader: int | None) -> None:
    """The last resort for a job whose reaper was killed while the launcher was not its parent."""
    if not leader:
        return
    for pid in processes():
        with contextlib.suppress(OSError, IndexError):
            if int(stat_fields(pid)[3]) == leader:
                os.kill(pid, signal.SIGKILL)


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
