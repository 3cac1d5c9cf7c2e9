"""An ASGI app on a loopback port in the running event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import uvicorn

POLL_S = 0.01


@contextlib.asynccontextmanager
async def serve(app: Any, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[str]:
    """Serve `app` and give its URL. The port (0: a free one) is bound before anything is started, so it is ours."""
    import uvicorn

    with socket.create_server((host, port), backlog=2048) as listener:
        port = listener.getsockname()[1]
        server = _without_signals(uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=1))
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            while not server.started:
                if task.done():
                    await task
                await asyncio.sleep(POLL_S)
            yield f"http://{host}:{port}"
        finally:
            server.should_exit = True
            await task


def _without_signals(config: uvicorn.Config) -> uvicorn.Server:
    """A server that leaves the process's signals to its owner."""
    import uvicorn

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    return Server(config)
