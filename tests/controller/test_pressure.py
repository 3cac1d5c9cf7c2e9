"""Concurrency backs off under memory or processor pressure and comes back."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from leyden.config import RunConfig
from leyden.controller import pressure
from leyden.controller.pressure import Load, Pressure, allowed, read
from tests.controller.conftest import CALM, controlling
from tests.controller.live_gateway import LiveGateway
from tests.controller.programs import wait_until

Config = Callable[..., RunConfig]
Left = Callable[[], list[str]]


@pytest.mark.parametrize(
    ("changes", "before", "running", "expected"),
    [
        ({}, 50, 50, 50),
        ({}, 10, 10, 16),
        ({}, 47, 10, 50),
        ({"memory_free": 0.04}, 50, 30, 30),
        ({"memory_free": 0.04}, 20, 30, 20),
        ({"memory_free": 0.04}, 50, 0, 1),
        ({"memory_stall": 0.3}, 50, 30, 30),
        ({"memory_free": 0.07}, 20, 20, 20),
        ({"memory_stall": 0.1}, 20, 20, 20),
        ({"queue": 20.0}, 50, 40, 40),
        ({"queue": 20.0, "cpu_wait": 0.1}, 50, 40, 50),
        ({"queue": 20.0, "cpu_wait": None}, 50, 40, 40),
        ({"queue": 10.0}, 20, 20, 20),
    ],
)
def test_allowed(changes: dict[str, float | None], before: int, running: int, expected: int) -> None:
    assert allowed(before, running, 50, replace(CALM, **changes)) == expected  # type: ignore[arg-type]


def test_small_concurrency_grows_by_one() -> None:
    assert allowed(1, 1, 4, CALM) == 2


def test_reading_the_kernels_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    (tmp_path / "meminfo").write_text("MemTotal:  1000 kB\nMemFree: 10 kB\nMemAvailable:  250 kB\nHugePages_Total: 0\n")
    (tmp_path / "loadavg").write_text("6.00 5.00 4.00 3/400 12345\n")
    assert read(tmp_path) == Load(memory_free=0.25, memory_stall=None, cpu_wait=None, queue=1.5)
    (tmp_path / "pressure").mkdir()
    some, full = "some avg10={} avg60=0.00 avg300=0.00 total=1\n", "full avg10={} avg60=0.00 avg300=0.00 total=1\n"
    (tmp_path / "pressure" / "memory").write_text(some.format("30.00") + full.format("12.50"))
    (tmp_path / "pressure" / "cpu").write_text(some.format("80.00") + full.format("0.00"))
    assert read(tmp_path) == Load(memory_free=0.25, memory_stall=0.125, cpu_wait=0.8, queue=1.5)
    assert 0 < read().memory_free < 1


def test_changes_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    loads = [replace(CALM, memory_free=0.03), replace(CALM, memory_free=0.03), CALM, CALM]
    watched = Pressure(16, look=lambda: loads.pop(0))
    assert [watched.update(running) for running in (10, 4, 4, 6)] == [True, True, True, True]
    assert [r.message for r in caplog.records] == [
        "memory is short: 3% available, 0% stalled; at most 10 attempts at once instead of 16",
        "memory is short: 3% available, 0% stalled; at most 4 attempts at once instead of 10",
        "pressure is gone; at most 6 attempts at once (of 16)",
        "pressure is gone; at most 8 attempts at once (of 16)",
    ]


async def test_the_controller_starts_fewer(config: Config, gone: Left, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is killed for it: what runs goes on, what ends is not replaced but by the last one."""
    monkeypatch.setattr(pressure, "EVERY_S", 0.05)
    loads = [CALM]
    looked = 0

    def look() -> Load:
        nonlocal looked
        looked += 1
        return loads[-1]

    monkeypatch.setattr(Pressure.__init__, "__defaults__", (look,))
    made = config("while ! test -e ../../../../../go; do sleep 0.02; done", controller={"concurrency": 4})
    async with LiveGateway() as gateway:
        for i in range(2):
            gateway.add(f"r{i}")
        async with controlling(made, gateway):
            for i in range(2):
                await gateway.reached(f"r{i}", "running")
            loads.append(replace(CALM, memory_free=0.01))
            before = looked
            await wait_until(lambda: looked >= before + 2)
            for i in range(2, 8):
                gateway.add(f"r{i}")
            (made.config_dir / "go").touch()
            most = 0
            ended = asyncio.create_task(gateway.ended())
            while not ended.done():
                most = max(most, sum(r.state in ("running", "grading") for r in gateway.rollouts))
                await asyncio.sleep(0.005)
    assert most == 2
    assert [r.state for r in await ended] == ["succeeded"] * 8
