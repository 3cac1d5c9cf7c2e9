"""An ASGI app on a loopback port in the running event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

POLL_S = 0.01


@contextlib.asynccontextmanager
async def serve(app: Any, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[str]:
    """Serve `app` and give its URL. The port (0: a free one) is bound before anything is started, so it is ours."""
    import uvicorn

    with socket.create_server((host, port), backlog=2048) as listener:
        port = listener.getsockname()[1]
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=1))
        server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]  # they are the owner's
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
