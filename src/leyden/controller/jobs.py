"""A job: one process tree of an attempt, its harness or one try of its grader, and how it ended."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from leyden.controller.backends.leyden_launcher.json_files import FAILED, LOST, read_json

TIMEOUT = "timeout"
CANCELLED = "cancelled"
OVER_LIMIT = "limit"
WATCHER_KILLED = "killed with what watched it, or told to end, by none of Leyden's programs"
OWN_ENDS = (None, TIMEOUT, OVER_LIMIT)


@dataclass(frozen=True, slots=True)
class Job:
    """What to run. With `fork`, a Python command runs in a fork of the launcher if that is possible.

    `directory` gets the job's exit.json; `log` is appended to, `log_bytes` at most. `limits` are those of the run file
    that are given; `folders` count for `workspace_bytes`, with `counts_found` also what lies there at the start.
    `files` are what it reads outside its folder; `forward` is the (host, port) that a sandboxed job reaches.
    """

    job_id: str
    directory: Path
    argv: tuple[str, ...]
    cwd: Path
    env: dict[str, str] = field(repr=False)
    log: Path
    log_bytes: int
    fork: bool
    learn: bool = False
    limits: dict[str, float] = field(default_factory=dict)
    folders: tuple[Path, ...] = ()
    counts_found: bool = True
    files: tuple[Path, ...] = ()
    forward: tuple[str, int] | None = None


@dataclass(frozen=True, slots=True)
class Exit:
    """How a job ended. Times are Unix seconds; `killed` says why it was killed, `error` why it never started, `note`
    which limit it ran into, also where it ended well all the same. `final`: it could not be started, and never could.
    """

    exit_code: int | None
    signal: int | None
    started: float
    ended: float
    killed: str | None = None
    error: str | None = None
    cpu_s: float | None = None
    max_rss_bytes: int | None = None
    log_dropped_bytes: int = 0
    note: str | None = None
    final: bool = False

    @classmethod
    def from_json(cls, data: Any) -> Self | None:
        """None for what is no exit: a harness without a sandbox can write where its own is looked for."""
        if not isinstance(data, dict) or not all(_fits(data.get(name), kinds) for name, kinds in _KINDS.items()):
            return None
        texts = {name: data[name][:MOST_CHARS] for name in ("killed", "error", "note") if data.get(name)}
        return cls(**{name: data[name] for name in _KINDS if data.get(name) is not None or name in _ALWAYS} | texts)

    @property
    def clean(self) -> bool:
        return self.exit_code == 0 and self.killed is None and self.error is None

    @property
    def timed_out(self) -> bool:
        return self.killed == TIMEOUT

    def describe(self) -> str:
        """For logs: `exit 1`, `killed by SIGSEGV`, `timeout after 12.0 s`, a limit with one of these."""
        return f"{self.note} ({self._describe()})" if self.note else self._describe()

    def _describe(self) -> str:
        if self.error:
            return self.error
        if self.timed_out:
            return f"timeout after {self.ended - self.started:.1f} s"
        if self.killed:
            return f"killed ({self.killed})"
        if self.signal is not None:
            return f"killed by {_signal_name(self.signal)}"
        return f"exit {self.exit_code}"


def lost(started: float, now: float) -> Exit:
    """The end of a job that nothing is known about any more."""
    return Exit(None, None, started, now, killed=LOST)


def as_ordered(exit_: Exit, ordered: str | None) -> Exit:
    """The end of a job that was seen to run: killed for the reason that was `ordered`, or by a limit, or by a signal.

    A harness without a sandbox can kill what watches it, send it SIGTERM and write its kill.json. That is a way to
    fail, as is killing itself, and no way out of being graded.
    """
    if exit_.killed in (None, OVER_LIMIT, FAILED):
        return exit_
    if ordered:
        return replace(exit_, killed=ordered)
    return replace(exit_, killed=None, exit_code=None, signal=signal.SIGKILL, note=WATCHER_KILLED)


def read_exit(directory: Path) -> Exit | None:
    """The job's end, if its exit.json is there and is one."""
    return Exit.from_json(read_json(str(directory / "exit.json")))


def harness_job(rollout_id: str, attempt: int) -> str:
    return f"{rollout_id}.{attempt}"


def grader_job(rollout_id: str, attempt: int, number: int) -> str:
    """`number` counts the tries of the grader from 1."""
    return f"{rollout_id}.{attempt}.grade{number}"


_NUMBER = (int, float)
_KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("started", "ended"), _NUMBER),
    **dict.fromkeys(("exit_code", "signal", "max_rss_bytes"), (int, type(None))),
    "log_dropped_bytes": (int, type(None)),
    "final": (bool, type(None)),
    "cpu_s": (*_NUMBER, type(None)),
    **dict.fromkeys(("killed", "error", "note"), (str, type(None))),
}
_ALWAYS = ("exit_code", "signal")
MOST_CHARS, MOST_NUMBER = 1000, 1 << 53


def _fits(value: object, kinds: tuple[type, ...]) -> bool:
    return isinstance(value, kinds) and (not isinstance(value, _NUMBER) or abs(value) < MOST_NUMBER)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
