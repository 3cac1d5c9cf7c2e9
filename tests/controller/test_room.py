"""Rollouts wait while the disk has too little room, and start when there is some."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from leyden.config import RunConfig
from leyden.controller import act, reconcile, workspace
from tests.controller.conftest import controlling
from tests.controller.live_gateway import LiveGateway

Config = Callable[..., RunConfig]


async def test_nothing_is_started_without_room(
    config: Config, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, gone: Callable[[], list[str]]
) -> None:
    asked = asyncio.Event()
    short: list[str | None] = ["the disk is short"]

    def shortage(*_: object) -> str | None:
        asked.set()
        return short[0]

    monkeypatch.setattr(reconcile, "shortage", shortage)
    monkeypatch.setattr(reconcile, "RESYNC_S", 0.2)
    made = config()
    async with LiveGateway(max_attempts=1) as gateway:
        gateway.add("r1", None)
        async with controlling(made, gateway):
            for _ in range(5):
                asked.clear()
                await asked.wait()
            assert not (made.run_dir / "attempts" / "r1").exists()
            short[0] = None
            (rollout,) = await gateway.ended()
    assert rollout.state == "succeeded"
    assert [r.getMessage() for r in caplog.records if "disk" in r.getMessage()] == ["the disk is short"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EMFILE])
@pytest.mark.parametrize("of_a_template", [False, True])
async def test_a_workspace_without_room_uses_up_no_attempt(
    config: Config, monkeypatch: pytest.MonkeyPatch, gone: Callable[[], list[str]], code: int, of_a_template: bool
) -> None:
    monkeypatch.setattr(act, "NO_ROOM_PAUSE_S", 0.05)
    error = OSError(code, os.strerror(code), "task.json")
    failures = [shutil.Error([("a", "b", str(error))]) if of_a_template else error] * 3
    write = workspace._write_private

    def short(path: Path, text: str) -> None:
        if failures:
            raise failures.pop()
        write(path, text)

    monkeypatch.setattr(workspace, "_write_private", short)
    async with LiveGateway(max_attempts=1) as gateway:
        gateway.add("r1", None)
        async with controlling(config(), gateway):
            (rollout,) = await gateway.ended()
    assert (rollout.state, rollout.attempt, failures) == ("succeeded", 4, [])
