"""The first program in a sandbox, run by path: `sandboxed.py PORT COMMAND...`; it becomes the command.

It opens the loopback port that stands for the gateway and hands the socket out through descriptor CHANNEL; a command
that cannot be started is told there too.
"""

import os
import signal
import socket
import sys

CHANNEL = 3


def main() -> None:
    channel = socket.socket(fileno=CHANNEL)
    channel.set_inheritable(False)
    with socket.create_server(("127.0.0.1", int(sys.argv[1])), backlog=128) as listener:
        socket.send_fds(channel, [b"."], [listener.fileno()])
    command = sys.argv[2:]
    beside = os.path.join(os.path.dirname(sys.executable), command[0])
    found = beside if os.sep not in command[0] and os.access(beside, os.X_OK) else command[0]
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(found, [found, *command[1:]])  # noqa: S606
    except OSError as error:
        channel.sendall(f"cannot start {command[0]!r} in the sandbox: {error.strerror}".encode())
    os._exit(127)


if __name__ == "__main__":
    main()
