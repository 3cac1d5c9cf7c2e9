"""The gateway as a program: one per run folder, on the address of the run file."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import gc
import logging
import os
import resource
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import uvicorn
import uvloop
from starlette.applications import Starlette

from leyden.client import read_or_create_secret
from leyden.client.announcement import announce, read_announcement
from leyden.config import GatewayConfig, RunConfig
from leyden.errors import ConfigError, LeydenError
from leyden.gateway.app import build
from leyden.gateway.bounded_http import BoundedHttp
from leyden.gateway.ports import owner

log = logging.getLogger(__name__)
LOCK_WAIT_S = 20.0
IDLE_CONNECTION_S = 3600
BACKLOG = 2048
SWITCH_S = 0.0005  # how long a worker thread keeps the interpreter from the loop that wants it; 5 ms by default


def serve(
    config: RunConfig, *, with_parent: bool = False, secret: bytes | None = None, engine_key: str | None = None
) -> None:
    """Run the gateway until it is told to stop. Writes `gateway.json` in the run folder once it listens.

    `with_parent` ends it when standard input closes. Raises ConfigError for an open address without a secret.
    """
    check_address(config.gateway.host, secret)
    _allow_many_connections()
    config.run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _lock(config.run_dir / "gateway.lock"):
        app = build(config, secret or read_or_create_secret(config.run_dir), engine_key=engine_key)
        listener = listen(config.gateway, config.run_dir)
        host, port = listener.getsockname()[:2]
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        server = _Server(app)
        if with_parent:
            threading.Thread(target=_stop_with_parent, args=(server,), daemon=True).start()
        announce(config.run_dir, url)
        sys.setswitchinterval(SWITCH_S)
        gc.freeze()  # what is there now stays: collections need not look at it
        log.info("gateway listens on %s", url)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(server.serve(sockets=[listener]))
        if server.failure is not None:
            raise server.failure


class _Server(uvicorn.Server):
    """Calls cut off by a stop are lost, not abandoned: their attempts are run again."""

    def __init__(self, app: Starlette) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=BoundedHttp,
                ws="none",
                access_log=False,
                proxy_headers=False,
                log_config=None,
                timeout_keep_alive=IDLE_CONNECTION_S,
                timeout_graceful_shutdown=1,
                backlog=4096,
            )
        )
        self._app = app
        self.failure: BaseException | None = None
        app.state.unwatched = self._stop_without_engines

    def _stop_without_engines(self, watching: asyncio.Task[None]) -> None:
        """No engine can ever serve this run: better no gateway than a step without a turn."""
        if not watching.cancelled() and (error := watching.exception()):
            self.failure = error
            self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._app.state.turns.closing = True
        self._app.state.feed.close()
        await super().shutdown(sockets)


def _allow_many_connections() -> None:
    """A call in flight holds two descriptors; many systems allow 1,024 unless one asks for more."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def check_address(host: str, secret: bytes | None) -> None:
    """Raises ConfigError for an address that other machines reach, without a secret."""
    if host not in ("127.0.0.1", "::1", "localhost") and secret is None:
        raise ConfigError(
            "gateway.host",
            f"{host!r} can be reached from other machines; set LEYDEN_SECRET to a secret of at least 32 bytes, "
            "or listen on 127.0.0.1",
        )


def check_port(settings: GatewayConfig, run_dir: Path) -> None:
    """Raises ConfigError where the gateway could not listen. The run's own gateway, if it runs, is no obstacle."""
    with contextlib.suppress(OSError), (run_dir / "gateway.lock").open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
    listen(settings, run_dir).close()


def listen(settings: GatewayConfig, run_dir: Path) -> socket.socket:
    """Bind the configured port, else the port of the last start, else any free one."""
    host = "127.0.0.1" if settings.host == "localhost" else settings.host
    for port in [settings.port] if settings.port else [_last_port(run_dir), 0]:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            listener.listen(BACKLOG)  # until then another process may bind the same port
            return listener
        except OSError as error:
            listener.close()
            if port == settings.port:
                key = "gateway.port" if error.errno in (errno.EADDRINUSE, errno.EACCES) else "gateway.host"
                raise ConfigError(key, _taken(host, port, error)) from error
    raise AssertionError("port 0 always binds or raises")


def _taken(host: str, port: int, error: OSError) -> str:
    holder = f" by {owner(port)}; give another, or 0 for any" if error.errno == errno.EADDRINUSE else ""
    return f"cannot listen on {host}:{port}: {error.strerror}{holder}"


def _last_port(run_dir: Path) -> int:
    try:
        return urlsplit(read_announcement(run_dir).url).port or 0
    except (OSError, ValueError):
        return 0


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """One gateway per store. A predecessor that is still stopping is waited for."""
    with path.open("a+") as file:
        deadline = time.monotonic() + LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise LeydenError(f"another gateway holds {path}; stop it first") from None
                time.sleep(0.05)
        yield


def _stop_with_parent(server: uvicorn.Server) -> None:
    while os.read(0, 4096):  # not sys.stdin: its lock, held by this thread, would abort an exit that comes first
        pass
    server.should_exit = True
