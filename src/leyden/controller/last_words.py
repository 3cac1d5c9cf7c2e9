"""The end of what a harness or grader printed, for the reason that a user reads first."""

from __future__ import annotations

import os
import stat
from pathlib import Path

MOST_BYTES = 4000
MOST_CHARS = 300


def last_lines(log: Path, most: int) -> tuple[str, ...]:
    """The last lines that are not blank; none if there is no such file. The harness may have put anything there."""
    try:
        descriptor = os.open(log, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return ()
    try:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            return ()
        text = os.pread(descriptor, MOST_BYTES, max(0, facts.st_size - MOST_BYTES)).decode("utf-8", "replace")
    finally:
        os.close(descriptor)
    return tuple(line.rstrip() for line in text.split("\n") if line.strip())[-most:]


def last_words(log: Path) -> str:
    """The last line of a log, cut to a length; of a Python traceback that is the error. Empty without one."""
    lines = last_lines(log, 1)
    return lines[0].strip()[:MOST_CHARS] if lines else ""
