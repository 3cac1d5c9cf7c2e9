"""Gateway and controller as services: the gateway goes away with harnesses between calls, and comes back."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from leyden.client import control_key
from leyden.config import RunConfig
from leyden.gateway.render import ModelRenderer
from leyden.types import RolloutState
from tests.controller.conftest import controlling
from tests.controller.programs import kill9, start_controller, wait_until
from tests.controller.test_chaos import Address
from tests.gateway.conftest import SECRET, make_config, serving

pytestmark = pytest.mark.slow
Left = Callable[[], list[str]]
AGENT = """
import json, os, pathlib, sys, time, urllib.error, urllib.request
attempt, folder = os.environ["LEYDEN_ATTEMPT"], pathlib.Path(sys.argv[1])
kind = json.load(open(os.environ["LEYDEN_TASK"]))["kind"]
def call(messages, patience_s=0.0):
    body = json.dumps({"model": os.environ["LEYDEN_MODEL"], "messages": messages}).encode()
    headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
    until = time.monotonic() + patience_s
    while True:
        try:
            request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
            return json.load(urllib.request.urlopen(request))["choices"][0]["message"]
        except urllib.error.HTTPError:
            raise
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)
messages = [{"role": "user", "content": "hello"}]
messages += [call(messages), {"role": "user", "content": "more"}]
if attempt == "1":
    (folder / (kind + ".called")).touch()
    while not (folder / "away").exists():
        time.sleep(0.02)
try:
    call(messages, 300.0 if kind == "patient" else 0.0)
except OSError:
    (folder / (kind + ".refused")).touch()
    if kind == "fails":
        sys.exit(1)
    if kind == "hangs":
        time.sleep(1000)
"""
KINDS = ("fails", "exits 0", "hangs", "patient")


def make(tmp_path: Path, model: Path) -> RunConfig:
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "grading.py").write_text("def grade(task, workspace):\n    return 1.0\n")
    return make_config(
        tmp_path,
        model,
        harness={
            "command": [sys.executable, str(tmp_path / "agent.py"), str(tmp_path)],
            "timeout_s": 20.0,
            "max_attempts": 1,
        },
        grader={"command": None, "function": "grading:grade"},
    )


@contextlib.asynccontextmanager
async def controller(config: RunConfig, address: Address, away: asyncio.Event, *, killed: bool) -> AsyncIterator[None]:
    """One that lives on, or one that is killed while the gateway is away and is followed by another."""
    if not killed:
        async with controlling(config, address):
            yield
        return
    first = start_controller(config, address)  # type: ignore[arg-type]

    async def follow() -> None:
        try:
            await away.wait()
        finally:
            kill9(first)

    following = asyncio.create_task(follow())
    try:
        async with contextlib.AsyncExitStack() as second:
            waiting = asyncio.create_task(following_then(following, second, config, address))
            yield
            await waiting
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def following_then(
    first: asyncio.Task[None], second: contextlib.AsyncExitStack, config: RunConfig, address: Address
) -> None:
    await first
    await second.enter_async_context(controlling(config, address))


@pytest.mark.parametrize("killed", [False, True], ids=["the controller lives on", "the controller is killed too"])
async def test_no_agent_is_scored_for_a_gateway_that_was_away(
    tmp_path: Path, tokenizer_path: Path, gone: Left, killed: bool
) -> None:
    config = make(tmp_path, tokenizer_path)
    renderer = ModelRenderer(str(tokenizer_path), "qwen3", "template")
    away = asyncio.Event()
    async with contextlib.AsyncExitStack() as controllers, asyncio.timeout(500):
        async with serving(config, renderer) as gateway:
            specs = [
                {"kind": "train", "step": 0, "slot": i, "size": 1, "task": {"kind": k}} for i, k in enumerate(KINDS)
            ]
            groups = await gateway.client.create_groups(specs)
            address = Address(gateway.url, control_key(SECRET))
            await controllers.enter_async_context(controller(config, address, away, killed=killed))
            await wait_until(lambda: len(list(tmp_path.glob("*.called"))) == len(KINDS))
        away.set()
        (tmp_path / "away").touch()
        await wait_until(lambda: len(list(tmp_path.glob("*.refused"))) == len(KINDS) - 1)
        async with serving(config, renderer, port=urlsplit(address.url).port or 0) as gateway:
            ended, cursor = {}, 0
            while len(ended) < len(KINDS):
                states = [s for s in RolloutState if s.terminal]
                rollouts, cursor = await gateway.client.rollouts(after=cursor, states=states, wait_s=2)
                ended |= {r.rollout_id: r for r in rollouts}
            await controllers.aclose()
    results = [ended[group.rollouts[0].rollout_id] for group in groups]
    assert [(r.state, r.failure, r.reward, r.turns) for r in results] == [("succeeded", None, 1.0, 2)] * len(KINDS)
    assert [r.attempt for r in results] == [2, 2, 2, 1]
