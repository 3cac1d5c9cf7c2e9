"""The launcher's socket: JSON lines from controllers; the one that said hello last is answered."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import time
from collections.abc import Callable
from typing import Any

from .capped_log import READ_BYTES


class ControlSocket:
    """`handle(message)` is called for each message, after a hello has made its sender the current controller."""

    def __init__(self, poll: selectors.PollSelector, path: str, handle: Callable[[dict[str, Any]], None]) -> None:
        self.poll = poll
        self.path = path
        self.handle = handle
        self.current: tuple[socket.socket, bytearray] | None = None  # with what is still to be sent
        self.alone_since = time.monotonic()

    def listen(self) -> None:
        self.unlink()
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(self.path)
        self.listener.listen(64)
        self.listener.setblocking(False)
        self.poll.register(self.listener, selectors.EVENT_READ, self.accept)
        self.alone_since = time.monotonic()  # preloading may have taken longer than the grace

    def unlink(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)

    def accept(self, listener: socket.socket, mask: int) -> None:
        connection, _ = listener.accept()
        connection.setblocking(False)
        buffers = {"in": bytearray(), "out": bytearray()}
        self.poll.register(connection, selectors.EVENT_READ, lambda c, m: self.on_data(c, m, buffers))

    def on_data(self, connection: socket.socket, mask: int, buffers: dict[str, bytearray]) -> None:
        if mask & selectors.EVENT_WRITE:
            self.flush(connection, buffers["out"])
        if not mask & selectors.EVENT_READ:
            return
        try:
            data = connection.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.hang_up(connection)
            return
        buffers["in"] += data
        while b"\n" in buffers["in"]:
            line, _, rest = bytes(buffers["in"]).partition(b"\n")
            buffers["in"][:] = rest
            try:
                message = json.loads(line)
            except ValueError:
                self.hang_up(connection)
                return
            if message["op"] == "hello":
                self.replace(connection, buffers["out"])
            self.handle(message)

    def replace(self, connection: socket.socket, out: bytearray) -> None:
        if self.current and self.current[0] is not connection:
            self.hang_up(self.current[0])
        self.current = (connection, out)

    def hang_up(self, connection: socket.socket) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self.poll.unregister(connection)
        connection.close()
        if self.current and self.current[0] is connection:
            self.current = None
            self.alone_since = time.monotonic()

    def send(self, message: dict[str, Any]) -> None:
        """To the current controller, if there is one; never blocks."""
        if self.current:
            connection, out = self.current
            out += json.dumps(message).encode() + b"\n"
            self.flush(connection, out)

    def flush(self, connection: socket.socket, out: bytearray) -> None:
        try:
            while out:
                del out[: connection.send(out)]
        except BlockingIOError:
            pass
        except OSError:
            self.hang_up(connection)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if out else 0)
        key = self.poll.get_key(connection)
        if key.events != events:
            self.poll.modify(connection, events, key.data)
