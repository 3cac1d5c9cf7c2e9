"""`gateway.json` in the run folder: where the gateway of the run listens, and which process it is."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import orjson

FILE = "gateway.json"


@dataclass(frozen=True, slots=True)
class Announcement:
    """`pid` is None where the file does not say it."""

    url: str
    pid: int | None


def announce(run_dir: Path, url: str) -> None:
    """Write that this process listens at `url`. The file is complete or not there, and its owner's alone."""
    temporary = run_dir / f"{FILE}.new"
    temporary.unlink(missing_ok=True)
    temporary.touch(mode=0o600)
    temporary.write_bytes(orjson.dumps({"url": url, "pid": os.getpid()}))
    temporary.replace(run_dir / FILE)


def read_announcement(run_dir: Path) -> Announcement:
    """What the gateway that listened last said. Raises OSError without a file, ValueError for a damaged one."""
    found = orjson.loads((run_dir / FILE).read_bytes())
    if not isinstance(found, dict) or not isinstance(found.get("url"), str):
        raise ValueError(f"{run_dir / FILE} names no url")
    pid = found.get("pid")
    return Announcement(found["url"], pid if isinstance(pid, int) else None)
