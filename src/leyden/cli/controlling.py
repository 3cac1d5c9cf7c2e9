"""`leyden controller`."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from pathlib import Path

from leyden.client import control_key, read_or_create_secret
from leyden.client.announcement import FILE, read_announcement
from leyden.config import RunConfig
from leyden.controller.reconcile import run_controller
from leyden.errors import ConfigError, GatewayError


def run_until_stopped(config: RunConfig, secret: bytes | None, *, with_parent: bool) -> None:
    """Run until SIGINT, SIGTERM or, with a parent, the end of standard input."""
    url = config.gateway.url or _running_gateway(config.run_dir)
    key = control_key(secret or read_or_create_secret(config.run_dir))
    asyncio.run(_run(config, url, key, with_parent))


async def _run(config: RunConfig, url: str, key: str, with_parent: bool) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    if with_parent:

        def wait_for_end() -> None:
            os.read(sys.stdin.fileno(), 1)
            loop.call_soon_threadsafe(stop.set)

        threading.Thread(target=wait_for_end, daemon=True).start()
    await run_controller(config, url, key, config.controller.name, stop=stop)


def _running_gateway(run_dir: Path) -> str:
    try:
        return read_announcement(run_dir).url
    except OSError:
        raise GatewayError(f"no gateway has listened for {run_dir}; start `leyden gateway` first") from None
    except ValueError:
        what = f"{run_dir / FILE} is damaged; delete it and start `leyden gateway` again"
        raise ConfigError("run_dir", what) from None
