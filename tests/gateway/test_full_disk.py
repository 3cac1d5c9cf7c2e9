"""A disk without room under the store, then with room again: calls wait, and nobody is scored for it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from leyden.errors import GatewayError, Unwritable
from leyden.gateway.render import ModelRenderer
from leyden.store.controllers import LEASE_S
from leyden.store.database import connect, transaction
from tests.gateway.conftest import Gateway, make_config, serving, until
from tests.gateway.test_outage import MORE, USER, call, reply


class Disk:
    """A small file system that a test can fill."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._filler = folder / "filler"

    def fill(self) -> None:
        with contextlib.suppress(OSError), self._filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(65536))
        with contextlib.suppress(OSError), self._filler.open("ab", buffering=0) as file:
            while True:
                file.write(bytes(512))

    def clear(self) -> None:
        self._filler.unlink(missing_ok=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "none", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, check=False).returncode:
        pytest.skip("a small file system needs root and the right to mount")
    try:
        yield Disk(folder)
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


@pytest.fixture
async def gateway(disk: Disk, tokenizer_path: Path, renderer: ModelRenderer) -> AsyncIterator[Gateway]:
    config = make_config(disk.folder, tokenizer_path, harness={"max_attempts": 1})
    async with serving(config, renderer) as running:
        try:
            yield running
        finally:
            disk.clear()


def holds(gateway: Gateway) -> int:
    return sum(attempt.holds for attempt in gateway.app.state.turns.attempts._live.values())


async def test_a_call_is_held_until_there_is_room(gateway: Gateway, disk: Disk) -> None:
    rollout_id, key = await gateway.start_rollout()
    assert await call(gateway, key, USER) == 200
    disk.fill()
    waiting = asyncio.create_task(call(gateway, key, USER, reply(1), MORE))
    await until(lambda: holds(gateway) == 1)
    assert (await gateway.client.rollout(rollout_id)).held_s > 0
    disk.clear()
    assert await waiting == 200
    assert [t.parent_id is None for t in await gateway.turns(rollout_id)] == [True, False]
    receipt = await gateway.client.exit(rollout_id, 1, exit_code=0, timed_out=False, reason=None)
    assert receipt.rollout.state == "grading"
    assert receipt.rollout.held_s > 0


async def test_an_answer_is_held_that_cannot_be_written(gateway: Gateway, disk: Disk) -> None:
    rollout_id, key = await gateway.start_rollout()

    async def fill() -> None:
        disk.fill()

    gateway.engine.before = fill
    waiting = asyncio.create_task(call(gateway, key, USER))
    await until(lambda: holds(gateway) == 1)
    disk.clear()
    assert await waiting == 200
    assert len(gateway.engine.requests) == 1
    assert len(await gateway.turns(rollout_id)) == 1


async def test_a_harness_that_gives_up_waiting_is_run_again(gateway: Gateway, disk: Disk) -> None:
    """Its end cannot be written either: that is tried again until there is room."""
    rollout_id, key = await gateway.start_rollout()
    disk.fill()
    waiting = asyncio.create_task(call(gateway, key, USER))
    await until(lambda: holds(gateway) == 1)
    waiting.cancel()
    await until(lambda: holds(gateway) == 0)
    ending = asyncio.create_task(gateway.client.exit(rollout_id, 1, exit_code=1, timed_out=False, reason=None))
    assert not (await asyncio.wait([ending], timeout=0.5))[0]
    disk.clear()
    receipt = await ending
    assert (receipt.rollout.state, receipt.grader_key) == ("queued", None)
    assert "disk" in (receipt.rollout.reason or "")
    assert (await gateway.client.claim(rollout_id, "test")).rollout.attempt == 2  # of one: it used up none
    again = await gateway.client.infrastructure(rollout_id, 2, "evicted")
    assert again.failure == "infrastructure"


async def test_a_bug_while_nothing_can_be_written_is_not_held_against_the_agent(gateway: Gateway, disk: Disk) -> None:
    rollout_id, key = await gateway.start_rollout()

    async def fill() -> None:
        disk.fill()

    gateway.engine.before = fill
    gateway.engine.replies = [ZeroDivisionError("a bug")]
    assert await call(gateway, key, USER) == 500
    disk.clear()
    receipt = await gateway.client.exit(rollout_id, 1, exit_code=1, timed_out=False, reason=None)
    assert receipt.rollout.state == "queued"


async def test_a_grader_whose_reward_was_refused_costs_no_attempt(gateway: Gateway, disk: Disk) -> None:
    rollout_id, _ = await gateway.start_rollout()
    receipt = await gateway.client.exit(rollout_id, 1, exit_code=0, timed_out=False, reason=None)
    disk.fill()
    headers = {"authorization": f"Bearer {receipt.grader_key}"}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{gateway.url}/api/reward", json={"value": 1.0}, headers=headers) as response,
    ):
        document: Any = await response.json()
    assert (response.status, document["error"]["code"]) == (503, "store_unwritable")
    assert "disk is full" in document["error"]["message"]
    disk.clear()
    assert (await gateway.client.finish(rollout_id, 1)).state == "queued"


CONTROL: dict[str, Callable[[Gateway, str], Awaitable[Any]]] = {
    "groups": lambda g, _: g.client.create_groups([{"kind": "eval", "step": 1, "slot": 0, "size": 1, "task": {}}]),
    "reward": lambda g, rollout_id: g.client.reward(rollout_id, 1, 1.0),
    "infrastructure": lambda g, rollout_id: g.client.infrastructure(rollout_id, 1, "evicted"),
    "cancel": lambda g, rollout_id: g.client.cancel(rollout_id, "enough"),
    "model": lambda g, _: g.client.put_model("policy", engines=["x"], version=1, lineage="l", context_tokens=9),
}


@pytest.mark.parametrize("name", CONTROL)
async def test_the_control_api_waits_for_room(gateway: Gateway, disk: Disk, name: str) -> None:
    rollout_id, _ = await gateway.start_rollout()
    await gateway.client.exit(rollout_id, 1, exit_code=0, timed_out=False, reason=None)
    disk.fill()
    before = await gateway.client.rollout(rollout_id)
    asked = asyncio.create_task(CONTROL[name](gateway, rollout_id))
    assert not (await asyncio.wait([asked], timeout=0.5))[0]
    assert await gateway.client.rollout(rollout_id) == before
    await gateway.client.rollouts(controller="test")
    disk.clear()
    await asked


def test_a_transaction_that_finds_no_room_leaves_the_store_as_it_was(disk: Disk) -> None:
    db = connect(disk.folder / "store.sqlite")
    disk.fill()
    with pytest.raises(Unwritable, match="disk is full"), transaction(db):
        db.execute("INSERT INTO controllers VALUES ('c', 0)")
        db.execute("INSERT INTO controllers VALUES ('d', zeroblob(20000000))")
    assert not db.in_transaction
    disk.clear()
    with transaction(db):
        db.execute("INSERT INTO controllers VALUES ('c', 0)")
    assert db.execute("SELECT COUNT(*), MAX(controller) FROM controllers").fetchone()[:] == (1, "c")
    db.close()


async def test_no_lease_ends_while_nobody_can_renew(
    gateway: Gateway, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollout_id, _ = await gateway.start_rollout()
    disk.fill()
    await gateway.client.rollouts(controller="test")
    with contextlib.closing(sqlite3.connect(disk.folder / "run/store.sqlite")) as raw:
        seen = raw.execute("SELECT seen FROM controllers").fetchone()[0]
    disk.clear()
    monkeypatch.setattr("leyden.store.controllers.time.time", lambda: seen + LEASE_S + 1)
    monkeypatch.setattr("leyden.store.rollouts.time.time", lambda: seen + LEASE_S + 1)
    with pytest.raises(GatewayError, match="lease still holds"):
        await gateway.client.take_over(rollout_id, 1, "another")
