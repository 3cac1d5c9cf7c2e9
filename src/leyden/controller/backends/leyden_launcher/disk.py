"""How much a job has written into its folders, looked at now and then."""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Iterable

from .removal import open_up

EVERY_S = 1.0
SHARE = 0.05
LONG_PATH = 2048


class DiskWatch:
    """`due` is when to look next (monotonic seconds): after EVERY_S, later where looking itself takes long.

    Without `counts_found`, what lies there at the start is no part of what counts against the limit.
    """

    def __init__(self, folders: list[str], limit: int | None, *, counts_found: bool = True) -> None:
        self.folders = folders
        self.limit = limit
        self.found = 0 if limit is None or counts_found else sum(map(used, folders))
        self.due = time.monotonic() + EVERY_S if limit is not None else None

    @property
    def is_due(self) -> bool:
        return self.due is not None and time.monotonic() >= self.due

    def over(self, pids: Iterable[int] = ()) -> str | None:
        """If it is time to look: what to say of too much, else None. `pids` are the job's processes."""
        now = time.monotonic()
        if self.limit is None or self.due is None or now < self.due:
            return None
        found = sum(map(used, self.folders)) + unlinked(pids, self.folders) - self.found
        took = time.monotonic() - now
        self.due = now + max(EVERY_S, took / SHARE)
        if found <= self.limit:
            return None
        return f"over harness.limits.workspace_bytes {self.limit} ({found} found)"


class _Folder:
    """An open folder that paths start from; it is closed when nothing below it is left to be looked at."""

    def __init__(self, path: str, above: _Folder | None) -> None:
        self.fd: int = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=above.fd if above else None)

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):
            os.close(self.fd)


def used(folder: str) -> int:
    """Bytes on the disk below a folder, however deep; what vanishes meanwhile counts nothing."""
    total = 0
    front: list[tuple[_Folder | None, str]] = [(None, folder)]
    while front:
        above, path = front.pop()
        with contextlib.suppress(OSError):
            here = _opened(path, above)
            with os.scandir(here.fd) as entries:
                for entry in entries:
                    with contextlib.suppress(OSError):
                        facts = os.stat(entry.name, dir_fd=here.fd, follow_symlinks=False)
                        total += facts.st_blocks * 512
                        if stat.S_ISDIR(facts.st_mode):
                            below = os.path.join(path, entry.name)
                            front.append((above, below) if len(below) < LONG_PATH else (here, entry.name))
    return total


def _opened(path: str, above: _Folder | None) -> _Folder:
    """A folder that its owner may not list is one to hide bytes in: its owner may again."""
    try:
        return _Folder(path, above)
    except PermissionError:
        open_up(path if above is None else f"/proc/self/fd/{above.fd}/{path}")
        return _Folder(path, above)


def unlinked(pids: Iterable[int], folders: Iterable[str]) -> int:
    """Bytes of files that have no name any more but are open in one of the processes, on the folders' file systems."""
    devices = set()
    for folder in folders:
        with contextlib.suppress(OSError):
            devices.add(os.stat(folder).st_dev)
    found: dict[tuple[int, int], int] = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            for name in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    facts = os.stat(f"/proc/{pid}/fd/{name}")
                    if stat.S_ISREG(facts.st_mode) and facts.st_nlink == 0 and facts.st_dev in devices:
                        found[facts.st_dev, facts.st_ino] = facts.st_blocks * 512
    return sum(found.values())
