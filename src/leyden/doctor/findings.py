"""What a check says: one line, and where something is wrong, what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

MOST_CHARS = 1000


class Level(StrEnum):
    """A `warning` stops no run; a check is `skipped` where the problem of another one stands before it."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Finding:
    """`check` names what was looked at, `what` was found; `advice` says what to do. `detail` are lines of a log."""

    check: str
    level: Level
    what: str
    advice: str = ""
    detail: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        """All but the detail, on one line."""
        text = f"{self.what}; {self.advice}" if self.advice else self.what
        return f"{self.level:8} {self.check:12} {_one_line(text)}"


def ok(check: str, what: str) -> Finding:
    return Finding(check, Level.OK, what)


def warning(check: str, what: str, advice: str = "", detail: tuple[str, ...] = ()) -> Finding:
    return Finding(check, Level.WARNING, what, advice, detail)


def problem(check: str, what: str, advice: str = "", detail: tuple[str, ...] = ()) -> Finding:
    return Finding(check, Level.PROBLEM, what, advice, detail)


def skipped(check: str, why: str) -> Finding:
    return Finding(check, Level.SKIPPED, why)


def _one_line(text: str) -> str:
    joined = " ".join(text.split())
    return joined if len(joined) <= MOST_CHARS else f"{joined[: MOST_CHARS - 1]}…"
