"""How much a job has written into its folders, looked at now and then."""

from __future__ import annotations

import contextlib
import os
import stat
import time

EVERY_S = 1.0
SHARE = 0.05


class DiskWatch:
    """`due` is when to look next (monotonic seconds): after EVERY_S, later where looking itself takes long."""

    def __init__(self, folders: list[str], limit: int | None) -> None:
        self.folders = folders
        self.limit = limit
        self.due = time.monotonic() + EVERY_S if limit is not None else None

    def over(self) -> str | None:
        """If it is time to look: what to say of too much, else None."""
        now = time.monotonic()
        if self.limit is None or self.due is None or now < self.due:
            return None
        found = sum(map(used, self.folders))
        took = time.monotonic() - now
        self.due = now + max(EVERY_S, took / SHARE)
        if found <= self.limit:
            return None
        return f"over harness.limits.workspace_bytes {self.limit} ({found} found)"


def used(folder: str) -> int:
    """Bytes on the disk below a folder; what vanishes meanwhile counts nothing."""
    total, front = 0, [folder]
    while front:
        with contextlib.suppress(OSError), os.scandir(front.pop()) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    facts = entry.stat(follow_symlinks=False)
                    total += facts.st_blocks * 512
                    if stat.S_ISDIR(facts.st_mode):
                        front.append(entry.path)
    return total
