"""Deadlines are kept by a clock that nobody sets."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from leyden.config import RunConfig
from leyden.controller.clock import Clock
from tests.controller.conftest import controlling
from tests.controller.live_gateway import LiveGateway
from tests.controller.programs import appears
from tests.controller.test_runs import attempt_dir

Config = Callable[..., RunConfig]
Left = Callable[[], list[str]]


@pytest.mark.parametrize("jump_s", [-3600.0, 3600.0])
def test_a_jump_of_the_machine_s_clock_moves_nothing(monkeypatch: pytest.MonkeyPatch, jump_s: float) -> None:
    clock, real = Clock(), time.time
    before = clock.now()
    monkeypatch.setattr(time, "time", lambda: real() + jump_s)
    assert 0 <= clock.now() - before < 60
    assert abs(clock.own(time.time() - 5.0) - (clock.now() - 5.0)) < 60


@pytest.mark.parametrize("jump_s", [-3600.0, 3600.0])
async def test_a_time_out_comes_although_the_clock_jumps(
    config: Config, gone: Left, monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    made = config("echo on; sleep 300", harness={"timeout_s": 1.5})
    async with LiveGateway() as gateway:
        gateway.add("r1")
        async with controlling(made, gateway):
            await appears(attempt_dir(made) / "harness.log")
            real = time.time
            monkeypatch.setattr(time, "time", lambda: real() + jump_s)
            (rollout,) = await gateway.ended(limit_s=60)
            monkeypatch.undo()
    assert (rollout.timed_out, rollout.reward) == (True, 1.0)
