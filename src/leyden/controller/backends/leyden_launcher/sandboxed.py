"""The first program in a sandbox, run by path: `sandboxed.py PORT COMMAND...`; it runs the command.

It opens the loopback port that stands for the gateway and hands the socket out through descriptor CHANNEL; there it
also tells why a command cannot be started, and the signal that one died by: an exit status cannot tell 137 from
SIGKILL. As the sandbox's process 1 nothing in there can end it, and as one that is not dumpable nothing can look into
it or speak for it. It ends with the command, and the sandbox with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import socket
import sys

CHANNEL = 3
DIED = b"\0"
FINAL = b"\1"  # before the text of an error that would come again
NEVER = (
    *(errno.ENOENT, errno.EACCES, errno.ENOEXEC, errno.E2BIG, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EINVAL),
    errno.ENAMETOOLONG,
)
MOST_NAME_CHARS = 200
PR_SET_DUMPABLE = 4


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    channel = socket.socket(fileno=CHANNEL)
    channel.set_inheritable(False)
    with socket.create_server(("127.0.0.1", int(sys.argv[1])), backlog=128) as listener:
        socket.send_fds(channel, [b"."], [listener.fileno()])
    leader = os.fork()
    if leader == 0:
        become(sys.argv[2:], channel)
    status = wait_for(leader)
    if os.WIFSIGNALED(status):
        with contextlib.suppress(OSError):  # nobody listens any more
            channel.sendall(DIED + bytes([os.WTERMSIG(status)]))
        os._exit(128 + os.WTERMSIG(status))
    os._exit(os.WEXITSTATUS(status))


def become(command: list[str], channel: socket.socket) -> None:
    """A bare name is that of a program beside the interpreter, if there is one, else one on PATH."""
    beside = os.path.join(os.path.dirname(sys.executable), command[0])
    found = beside if os.sep not in command[0] and os.access(beside, os.X_OK) else command[0]
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(found, [found, *command[1:]])  # noqa: S606
    except OSError as error:
        text = f"cannot start {command[0][:MOST_NAME_CHARS]!r} in the sandbox: {error.strerror}".encode(
            errors="replace"
        )
        channel.sendall((FINAL if error.errno in NEVER else b"") + text)
    os._exit(127)


def wait_for(leader: int) -> int:
    """Its wait status. Process 1 inherits the orphans of the others and collects them too."""
    while True:
        pid, status = os.wait()
        if pid == leader:
            return status


if __name__ == "__main__":
    main()
