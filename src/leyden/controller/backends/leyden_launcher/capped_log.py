"""A job's output in a file that cannot grow without bound."""

from __future__ import annotations

import os
import select

from .json_files import write_out

READ_BYTES = 1 << 16
LOG_TAIL_BYTES = 1 << 16


class CappedLog:
    """Output of a job, appended to a file: the first bytes as they come, at the end the last 64 KiB.

    The reaper drains a pipe, so that no limit of the operating system reaches the harness and a flood costs
    neither disk nor memory; what is left out is counted.
    """

    def __init__(self, path: str, limit: int, fd: int) -> None:
        self.fd = fd
        os.set_blocking(fd, False)
        self.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self.tail_limit = min(LOG_TAIL_BYTES, limit // 2)
        self.room = limit - self.tail_limit
        self.tail = bytearray()
        self.dropped = 0

    def read(self) -> bool:
        """Take what is there, a few buffers at most; False at the end of the output."""
        for _ in range(16):
            try:
                data = os.read(self.fd, READ_BYTES)
            except BlockingIOError:
                return True
            if not data:
                return False
            self.add(data)
        return True

    def add(self, data: bytes) -> None:
        head = data[: self.room]
        self.room -= len(head)
        write_out(self.file, head)
        self.tail += data[len(head) :]
        over = len(self.tail) - self.tail_limit
        if over > 0:
            del self.tail[:over]
            self.dropped += over

    def close(self) -> None:
        while self.read():
            if not select.select([self.fd], [], [], 0)[0]:
                break
        if self.dropped:
            write_out(self.file, f"\n[leyden: {self.dropped} bytes left out, log_bytes]\n".encode())
        write_out(self.file, bytes(self.tail))
        os.close(self.file)
