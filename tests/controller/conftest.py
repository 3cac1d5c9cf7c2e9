from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from leyden.config import RunConfig
from leyden.controller.pressure import Load, Pressure
from leyden.controller.reconcile import run_controller
from leyden.run_file import absolute, parse

CALM = Load(memory_free=0.5, memory_stall=0.0, cpu_wait=0.9, queue=2.0)
GRADER = [sys.executable, "-c", "from leyden.client import post_reward; post_reward(1.0)"]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """`chaos` takes many minutes: it runs only where it is asked for."""
    if "chaos" in config.option.markexpr:
        return
    left_out = [item for item in items if item.get_closest_marker("chaos")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("chaos")]


@pytest.fixture(autouse=True)
def calm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Controllers of this process start as many attempts as they may, whatever else the machine does."""
    monkeypatch.setattr(Pressure.__init__, "__defaults__", (lambda: CALM,))


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., RunConfig]:
    """A run file for one shell command; keyword arguments are its sections."""

    def make(script: str = "true", **sections: Any) -> RunConfig:
        document: dict[str, Any] = {
            "run_dir": str(tmp_path / "run"),
            "model": {"path": "none"},
            "data": {"train": "none.jsonl"},
            "harness": {"command": ["sh", "-c", script]} | sections.pop("harness", {}),
            "grader": sections.pop("grader", {"command": GRADER}),
            **sections,
        }
        return absolute(parse(document), tmp_path)

    return make


@pytest.fixture
def gone(tmp_path: Path) -> Iterator[Callable[[], list[str]]]:
    """Command lines of processes that mention the test's folder; none may be left at the end."""

    def left() -> list[str]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                mentions = str(tmp_path) in " ".join(process.cmdline()) or str(tmp_path) in process.cwd()
                if mentions and process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(" ".join(process.cmdline()))
        return found

    yield left
    until = time.monotonic() + 60
    while left() and time.monotonic() < until:
        time.sleep(0.05)
    remaining = left()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if " ".join(process.cmdline()) in remaining:
                process.send_signal(signal.SIGKILL)
    assert remaining == []


@contextlib.asynccontextmanager
async def controlling(config: RunConfig, gateway: Any, controller_id: str = "c") -> AsyncIterator[None]:
    """A controller while the block runs; a clean stop afterwards."""
    stop = asyncio.Event()
    task = asyncio.create_task(run_controller(config, gateway.url, gateway.key, controller_id, stop=stop))
    try:
        yield
    finally:
        stop.set()
        await task
