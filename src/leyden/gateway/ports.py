"""Who holds a port: for the error about one that is taken. Linux; what another user runs is not told."""

from __future__ import annotations

import contextlib
from pathlib import Path

LISTENS = "0A"


def owner(port: int, proc: Path = Path("/proc")) -> str:
    """`process 123 (nginx)`, or that it is not known."""
    sockets = {f"socket:[{inode}]" for inode in _listening(port, proc)}
    for folder in proc.glob("[0-9]*/fd"):
        with contextlib.suppress(OSError):
            if any(str(entry.readlink()) in sockets for entry in folder.iterdir()):
                return f"process {folder.parent.name} ({(folder.parent / 'comm').read_text().strip()})"
    return "a process that this user may not look at"


def _listening(port: int, proc: Path) -> list[str]:
    """Inodes of the sockets that listen on a TCP port."""
    found = []
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in (proc / "net" / table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == LISTENS and int(fields[1].rpartition(":")[2], 16) == port:
                    found.append(fields[9])
    return found
