"""The gateway is away while harnesses run: none is scored for it, and none that missed nothing is thrown away."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from leyden.gateway.render import ModelRenderer
from leyden.store.outage import UNSEEN, last_write
from tests.gateway.conftest import Gateway, forever, make_config, serving, until

USER = {"role": "user", "content": "hi"}
MORE = {"role": "user", "content": "more"}
Restart = Callable[[Gateway], Awaitable[Gateway]]
AWAY_S = 5000.0


@pytest.fixture
async def gateways(tmp_path: Path, tokenizer_path: Path, renderer: ModelRenderer) -> AsyncIterator[Any]:
    """The first gateway, and a function that stops the current one, lets AWAY_S pass and starts the next."""
    config = make_config(tmp_path, tokenizer_path, harness={"max_attempts": 1})
    async with contextlib.AsyncExitStack() as current:
        slot = 0

        async def begin() -> Gateway:
            nonlocal slot
            gateway = await current.enter_async_context(serving(config, renderer))
            gateway.slot = slot
            return gateway

        async def restart(gateway: Gateway) -> Gateway:
            nonlocal slot
            slot = gateway.slot
            await current.aclose()
            with contextlib.closing(sqlite3.connect(config.run_dir / "store.sqlite")) as store, store:
                store.execute("UPDATE attempts SET started = started - ? WHERE exited IS NULL", (AWAY_S,))
            for path in config.run_dir.glob("store.sqlite*"):
                os.utime(path, (time.time() - AWAY_S,) * 2)
            return await begin()

        yield await begin(), restart


def reply(number: int) -> dict[str, str]:
    return {"role": "assistant", "content": f"reply {number}"}


async def call(gateway: Gateway, key: str, *messages: dict[str, str], **headers: str) -> int:
    body = {"model": "m", "messages": list(messages)}
    all_headers = {"authorization": f"Bearer {key}", **headers}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{gateway.url}/v1/chat/completions", json=body, headers=all_headers) as response,
    ):
        return response.status


async def end(gateway: Gateway, rollout_id: str, code: int | None = 0, *, timed_out: bool = False) -> tuple[str, Any]:
    """State and reason after the report of the exit."""
    receipt = await gateway.client.exit(rollout_id, 1, exit_code=code, timed_out=timed_out, reason=None)
    assert (receipt.grader_key is None) == (receipt.rollout.state != "grading")
    return receipt.rollout.state, receipt.rollout.reason


@pytest.mark.parametrize(("code", "timed_out"), [(0, False), (1, False), (-9, False), (None, True)])
async def test_a_harness_that_ends_without_another_call_is_run_again_however_it_ended(
    gateways: tuple[Gateway, Restart], code: int | None, timed_out: bool
) -> None:
    gateway, restart = gateways
    rollout_id, key = await gateway.start_rollout()
    assert await call(gateway, key, USER) == 200
    gateway = await restart(gateway)
    assert await end(gateway, rollout_id, code, timed_out=timed_out) == ("queued", UNSEEN)
    claim = await gateway.client.claim(rollout_id, "test")
    assert claim.rollout.attempt == 2  # of one: an attempt that is spared counts against no limit
    assert await call(gateway, key, USER, reply(1), MORE) == 403
    receipt = await gateway.client.exit(rollout_id, 2, exit_code=1, timed_out=False, reason=None)
    assert receipt.rollout.state == "grading"


async def test_a_harness_that_goes_on_is_graded(gateways: tuple[Gateway, Restart]) -> None:
    gateway, restart = gateways
    rollout_id, key = await gateway.start_rollout()
    await call(gateway, key, USER)
    gateway = await restart(gateway)
    assert await call(gateway, key, USER, reply(1), MORE) == 200
    assert await end(gateway, rollout_id, 3) == ("grading", None)
    assert (await gateway.client.rollout(rollout_id)).attempt == 1


async def test_a_retry_of_the_last_call_shows_that_its_answer_arrived(gateways: tuple[Gateway, Restart]) -> None:
    gateway, restart = gateways
    rollout_id, key = await gateway.start_rollout()
    await call(gateway, key, USER)
    gateway = await restart(gateway)
    assert await call(gateway, key, USER, **{"x-stainless-retry-count": "1"}) == 200
    assert len(await gateway.turns(rollout_id)) == 1
    assert await end(gateway, rollout_id) == ("grading", None)


async def test_a_call_that_begins_anew_shows_nothing(gateways: tuple[Gateway, Restart]) -> None:
    """So a main agent does that hears of its sub-agent's death only."""
    gateway, restart = gateways
    rollout_id, key = await gateway.start_rollout()
    await call(gateway, key, USER)
    gateway = await restart(gateway)
    assert await call(gateway, key, {"role": "user", "content": "something else"}) == 200
    assert await end(gateway, rollout_id) == ("queued", UNSEEN)


async def test_a_second_outage_asks_again(gateways: tuple[Gateway, Restart]) -> None:
    gateway, restart = gateways
    rollout_id, key = await gateway.start_rollout()
    await call(gateway, key, USER)
    gateway = await restart(gateway)
    gateway.engine.replies = ["reply 2"]
    await call(gateway, key, USER, reply(1), MORE)
    gateway = await restart(gateway)
    assert await end(gateway, rollout_id) == ("queued", UNSEEN)


async def test_two_outages_between_two_calls(gateways: tuple[Gateway, Restart]) -> None:
    gateway, restart = gateways
    rollout_id, key = await gateway.start_rollout()
    await call(gateway, key, USER)
    gateway = await restart(await restart(gateway))
    assert await call(gateway, key, USER, reply(1), MORE) == 200
    assert await end(gateway, rollout_id) == ("grading", None)
    assert (await gateway.client.rollout(rollout_id)).held_s >= 2 * AWAY_S


@pytest.mark.parametrize("before", ["nothing", "an open call", "two conversations"])
async def test_what_can_never_show_that_it_missed_nothing_is_run_again_at_once(
    gateways: tuple[Gateway, Restart], before: str
) -> None:
    gateway, restart = gateways
    rollout_id, key = await gateway.start_rollout()
    cut = None
    if before != "nothing":
        await call(gateway, key, USER)
    if before == "two conversations":
        await call(gateway, key, {"role": "user", "content": "a sub-agent's task"})
    if before == "an open call":
        gateway.app.state.turns.closing = True
        gateway.engine.before = forever
        cut = asyncio.create_task(call(gateway, key, USER, reply(1), MORE))
        await until(lambda: len(gateway.engine.requests) == 2)
    gateway = await restart(gateway)
    rollout = await gateway.client.rollout(rollout_id)
    assert (rollout.state, rollout.reason, rollout.retry_at) == ("queued", UNSEEN, 0.0)
    assert await call(gateway, key, USER) == 403
    if cut is not None:
        with contextlib.suppress(aiohttp.ClientError):
            await cut
    assert (await gateway.client.claim(rollout_id, "test")).rollout.attempt == 2


async def test_the_feed_tells_what_is_run_again(gateways: tuple[Gateway, Restart]) -> None:
    gateway, restart = gateways
    rollout_id, _ = await gateway.start_rollout()
    _, cursor = await gateway.client.rollouts()
    gateway = await restart(gateway)
    rows, _ = await gateway.client.rollouts(after=cursor)
    assert [(r.rollout_id, r.state) for r in rows] == [(rollout_id, "queued")]


async def test_the_outage_is_held_time(gateways: tuple[Gateway, Restart]) -> None:
    """It ends no attempt's time, and gives none more than it has had of it."""
    gateway, restart = gateways
    rollout_id, key = await gateway.start_rollout()
    await call(gateway, key, USER)
    assert (await gateway.client.rollout(rollout_id)).held_s == 0.0
    gateway = await restart(gateway)
    rollout = await gateway.client.rollout(rollout_id)
    assert rollout.started is not None
    assert AWAY_S <= rollout.held_s <= time.time() - rollout.started


async def test_a_void_report_after_an_outage_spares_the_attempt(gateways: tuple[Gateway, Restart]) -> None:
    """A machine that went down took the harnesses along."""
    gateway, restart = gateways
    rollout_id, key = await gateway.start_rollout()
    await call(gateway, key, USER)
    gateway = await restart(gateway)
    rollout = await gateway.client.infrastructure(rollout_id, 1, "nothing is known of it on this machine any more")
    assert (rollout.state, rollout.failure) == ("queued", None)


@pytest.mark.parametrize("how", ["no reward", "the grader failed"])
async def test_a_grader_whose_reward_may_have_been_refused_costs_no_attempt(
    gateways: tuple[Gateway, Restart], how: str
) -> None:
    gateway, restart = gateways
    rollout_id, key = await gateway.start_rollout()
    await call(gateway, key, USER)
    await end(gateway, rollout_id)
    gateway = await restart(gateway)
    assert await end(gateway, rollout_id) == ("grading", None)  # the report again, of a controller that starts again
    if how == "no reward":
        rollout = await gateway.client.finish(rollout_id, 1)
    else:
        rollout = await gateway.client.infrastructure(rollout_id, 1, "the grader failed 2 times")
    assert (rollout.state, rollout.failure) == ("queued", None)


async def test_a_grader_goes_on_after_an_outage(gateways: tuple[Gateway, Restart]) -> None:
    gateway, restart = gateways
    rollout_id, key = await gateway.start_rollout()
    await call(gateway, key, USER)
    await end(gateway, rollout_id)
    gateway = await restart(gateway)
    await gateway.client.reward(rollout_id, 1, 0.5)
    done = await gateway.client.finish(rollout_id, 1)
    assert (done.state, done.reward, done.attempt) == ("succeeded", 0.5, 1)


async def test_what_did_not_run_is_as_it_was(gateways: tuple[Gateway, Restart]) -> None:
    gateway, restart = gateways
    done, key = await gateway.start_rollout()
    await call(gateway, key, USER)
    await end(gateway, done)
    await gateway.client.reward(done, 1, 1.0)
    await gateway.client.finish(done, 1)
    spec = {"kind": "train", "step": 9, "slot": 0, "size": 1, "task": {}}
    await gateway.client.create_groups([spec])
    before, cursor = await gateway.client.rollouts()
    gateway = await restart(gateway)
    assert await gateway.client.rollouts() == (before, cursor)


def test_the_last_sign_of_life_is_the_last_write(tmp_path: Path) -> None:
    store = tmp_path / "store.sqlite"
    assert last_write(store) == float("inf")
    for name, when in (("store.sqlite", 100), ("store.sqlite-wal", 200), ("store.sqlite-shm", 300)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (when, when))
    assert last_write(store) == 200.0
