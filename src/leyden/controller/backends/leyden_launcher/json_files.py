"""Small files that are complete or not there, and the log of this program."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import sys
import time
from typing import Any

from .removal import open_up, remove

MOST_BYTES = 1 << 20
LOST, FAILED = "lost", "its reaper failed; see launcher.log"  # `killed` of an exit.json that no reaper wrote


def write_out(fd: int, data: bytes) -> None:
    """All of it, as far as the disk has room."""
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(fd, data) :]


def read_json(path: str) -> Any:
    """What a plain file of at most MOST_BYTES holds; None for anything else that may lie there."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW), "rb") as file:
            facts = os.fstat(file.fileno())
            whole = stat.S_ISREG(facts.st_mode) and facts.st_size <= MOST_BYTES
            return json.loads(file.read(MOST_BYTES)) if whole else None
    except (OSError, ValueError, RecursionError):
        return None


def write_new(path: str, value: object) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        json.dump(value, file)


def write_json(path: str, value: object) -> None:
    """Complete or not at all. Nobody can know the name that it has before."""
    temporary = f"{path}.{os.urandom(8).hex()}"
    write_new(temporary, value)
    os.replace(temporary, path)


def publish(path: str, value: object) -> None:
    """The same where strangers could write: what they put in the way goes, a folder that they took away or made a link
    is made. The file's folder and the one above are theirs.
    """
    folder = os.path.dirname(path)
    folders = (os.path.dirname(folder), folder)
    try:
        if any(map(os.path.islink, folders)):
            raise NotADirectoryError(path)
        write_json(path, value)
    except OSError:
        for each in folders:
            if os.path.islink(each) or not os.path.isdir(each):
                remove(each)
            os.makedirs(each, mode=0o700, exist_ok=True)
            open_up(each)
        remove(path)
        write_json(path, value)


def log(message: str) -> None:
    """One line, in which line ends and escape sequences are spelt out."""
    line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in message)
    print(time.strftime("%Y-%m-%d %H:%M:%S"), line, file=sys.stderr, flush=True)
