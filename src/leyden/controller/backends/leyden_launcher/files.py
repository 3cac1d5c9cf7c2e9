"""Small files that are complete or not there, and the log of this program."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from typing import Any


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
