"""From a sandbox without a network to the gateway: the sandbox's loopback port is listened to from outside.

A socket belongs to the network namespace that it was made in. So the program in the sandbox (`sandboxed`) opens the
port and hands the socket out; this process, outside, accepts from it and connects to the gateway.
"""

from __future__ import annotations

import contextlib
import ctypes
import signal
import socket
import threading
from typing import NoReturn

from .capped_log import READ_BYTES

MOST_CONNECTIONS = 256
CONNECT_LIMIT_S = 30.0
PR_SET_PDEATHSIG = 1


def forward(listener: socket.socket, host: str, port: int) -> NoReturn:
    """Carry bytes until killed; dies with its parent. Beyond MOST_CONNECTIONS the next one waits."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    free = threading.Semaphore(MOST_CONNECTIONS)
    while True:
        free.acquire()
        inner, _ = listener.accept()
        threading.Thread(target=_carry_both, args=(inner, host, port, free), daemon=True).start()


def _carry_both(inner: socket.socket, host: str, port: int, free: threading.Semaphore) -> None:
    with contextlib.suppress(OSError), inner, socket.create_connection((host, port), CONNECT_LIMIT_S) as outer:
        outer.settimeout(None)
        for end in (inner, outer):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        back = threading.Thread(target=_carry, args=(outer, inner), daemon=True)
        back.start()
        _carry(inner, outer)
        back.join()
    free.release()


def _carry(source: socket.socket, target: socket.socket) -> None:
    """Until the source ends; a failure of one side ends both directions."""
    try:
        while True:
            data = source.recv(READ_BYTES)
            if not data:
                break
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
