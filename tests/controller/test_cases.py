"""Public bug reports about controllers that are not told elsewhere, with their right values, on the real gateway."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from leyden.client import control_key
from leyden.config import RunConfig
from leyden.controller.reconcile import run_controller
from leyden.errors import ConfigError, GatewayError
from leyden.gateway import serving as gateway_serving
from leyden.gateway.ports import owner
from leyden.gateway.render import ModelRenderer
from leyden.types import FailureClass, RolloutState
from tests.controller.conftest import controlling
from tests.controller.live_gateway import LiveGateway
from tests.controller.test_with_gateway import AGENT, run
from tests.gateway.conftest import SECRET, Gateway, make_config, serving, until

Config = Callable[..., RunConfig]
Left = Callable[[], list[str]]
POST = [sys.executable, "-c", "from leyden.client import post_reward; post_reward(1)"]


@pytest.fixture
def renderer(tokenizer_path: Path) -> ModelRenderer:
    return ModelRenderer(str(tokenizer_path), "qwen3", "template")


async def status(gateway: Gateway, path: str, key: str, body: dict[str, Any]) -> int:
    headers = {"authorization": f"Bearer {key}"}
    async with (
        aiohttp.ClientSession(gateway.url, headers=headers) as session,
        session.post(path, json=body) as response,
    ):
        return response.status


async def exported(gateway: Gateway, rollout_id: str) -> str:
    return repr((await gateway.client.rollout(rollout_id), await gateway.client.turns([rollout_id])))


async def test_what_comes_after_the_verdict_changes_nothing(
    tmp_path: Path, tokenizer_path: Path, renderer: ModelRenderer
) -> None:
    """A reward, a call and a report after FAILED are refused; two exports are equal."""
    async with serving(make_config(tmp_path, tokenizer_path), renderer) as gateway:
        spec = {"kind": "train", "step": 1, "slot": 1, "size": 1, "task": {}}
        (group,) = await gateway.client.create_groups([spec])
        rollout_id = group.rollouts[0].rollout_id
        claim = await gateway.client.claim(rollout_id, "c")
        call = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
        assert await status(gateway, "/v1/chat/completions", claim.agent_key, call) == 200
        receipt = await gateway.client.exit(rollout_id, 1, exit_code=1, timed_out=False, reason="exit 1")
        assert receipt.grader_key is not None
        assert await status(gateway, "/api/reward", receipt.grader_key, {"value": 0.5}) == 200
        await gateway.client.finish(rollout_id, 1)
        before = await exported(gateway, rollout_id)
        assert await status(gateway, "/api/reward", receipt.grader_key, {"value": 1.0}) in (401, 409)
        assert await status(gateway, "/v1/chat/completions", claim.agent_key, call) in (401, 403, 409)
        with pytest.raises(GatewayError) as late:
            await gateway.client.infrastructure(rollout_id, 1, "too late")
        assert late.value.status == 409
        after = await exported(gateway, rollout_id)
        rollout = await gateway.client.rollout(rollout_id)
    assert (rollout.state, rollout.reward, rollout.turns) == (RolloutState.FAILED, 0.5, 1)
    assert before == after


@pytest.mark.slow
async def test_exit_0_without_a_model_call(
    tmp_path: Path, tokenizer_path: Path, renderer: ModelRenderer, gone: Left, caplog: pytest.LogCaptureFixture
) -> None:
    """It succeeded, with 0 turns to tell by; the warning names the variables."""
    config = make_config(tmp_path, tokenizer_path, grader={"command": POST})
    async with serving(config, renderer) as gateway:
        (rollout,) = await run(gateway, config, 1, {})
    assert (rollout.state, rollout.turns, rollout.reward) == (RolloutState.SUCCEEDED, 0, 1.0)
    (warning,) = [r.message for r in caplog.records if "made no model call" in r.message]
    assert "OPENAI_BASE_URL, OPENAI_API_BASE, ANTHROPIC_BASE_URL, GOOGLE_GEMINI_BASE_URL" in warning


async def test_capacity_after_200_endings(config: Config, gone: Left) -> None:
    """Pool of 5, endings of every kind; all are final, never more than 5 alive, and 5 are free at the end."""
    kind = "case $((${LEYDEN_ROLLOUT_ID#r} % 4)) in 0) exit 0;; 1) exit 1;; 2) exec sleep 300;; 3) kill -9 $$;; esac"
    made = config(
        kind,
        harness={"timeout_s": 0.2, "max_attempts": 1, "command": ["{{ task.shell }}", "-c", kind]},
        controller={"concurrency": 5},
        grader={"harness": True},
    )
    async with LiveGateway(max_attempts=1) as gateway:
        for i in range(200):
            gateway.add(f"r{i}", {"shell": "no-such-shell" if i % 10 == 8 else "sh"})
        most = 0
        async with controlling(made, gateway):
            ended = asyncio.create_task(gateway.ended(limit_s=500))
            while not ended.done():
                alive = [r for r in gateway.rollouts if r.state in ("running", "grading")]
                most = max(most, len(alive))
                for rollout in alive:
                    if rollout.rollout_id.endswith("2"):
                        gateway.cancel(rollout.rollout_id)
                await asyncio.sleep(0.005)
            states = {r.state for r in gateway.rollouts}
            for i in range(5):  # the free slots, by taking them
                gateway.add(f"last{i}", {"shell": "sleep"})
            made_last = [f"last{i}" for i in range(5)]
            await asyncio.gather(*(gateway.reached(i, "running") for i in made_last))
            rollouts = await gateway.ended()
    assert most == 5 and states <= {"succeeded", "failed", "cancelled"}
    assert all(r.attempt == 1 for r in rollouts if r.state != "cancelled")


def test_eight_gateways_at_once_get_eight_ports(tmp_path: Path, tokenizer_path: Path) -> None:
    """All remember the same last port, and none of them loses the one that it found."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    listeners: list[socket.socket] = []
    ready = threading.Barrier(8)

    def start(number: int) -> None:
        config = make_config(tmp_path / str(number), tokenizer_path)
        config.run_dir.mkdir(parents=True)
        (config.run_dir / "gateway.json").write_text(json.dumps({"url": f"http://127.0.0.1:{port}"}))
        ready.wait()
        listeners.append(gateway_serving.listen(config.gateway, config.run_dir))

    threads = [threading.Thread(target=start, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ports = [listener.getsockname()[1] for listener in listeners]
    for listener in listeners:
        listener.close()
    assert len(set(ports)) == 8 and port in ports


def test_a_port_that_is_taken_is_told_with_its_owner(tmp_path: Path, tokenizer_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        config = make_config(tmp_path, tokenizer_path, gateway={"port": port})
        name = psutil.Process().name()
        with pytest.raises(ConfigError) as caught:
            gateway_serving.listen(config.gateway, config.run_dir)
        assert str(caught.value) == (
            f"gateway.port: cannot listen on 127.0.0.1:{port}: Address already in use by process {os.getpid()} "
            f"({name}); give another, or 0 for any"
        )
    assert owner(port) == "a process that this user may not look at"


CANARY_AGENT = AGENT + 'import sys; sys.exit(json.load(open(os.environ["LEYDEN_TASK"]))["code"])\n'


@pytest.mark.slow
async def test_no_key_is_written_anywhere(
    tmp_path: Path,
    tokenizer_path: Path,
    renderer: ModelRenderer,
    gone: Left,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Control secret, an engine's key, agents' and graders' keys; a success, a failure, a 401, a template
    that fails. Not in logs, the run folder (with the store and its events), process lists or the API's answers.
    """
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("LEYDEN_ENGINE_KEY", "CANARY-123")
    (tmp_path / "agent.py").write_text(CANARY_AGENT)
    config = make_config(
        tmp_path,
        tokenizer_path,
        harness={
            "command": [sys.executable, "{{ config_dir }}/agent.py", "{{ task.word }}"],
            "max_attempts": 1,
        },
        grader={"command": POST},
        workspace={"keep": "all"},
        gateway={"keep_wire": True},
    )
    seen: list[str] = []

    async def looked_at() -> None:
        before = len(seen)
        await until(lambda: len(seen) > before + 1)

    async with serving(config, renderer) as gateway:
        gateway.engine.before = looked_at
        stop = asyncio.Event()
        controller = asyncio.create_task(run_controller(config, gateway.url, control_key(SECRET), "c", stop=stop))
        tasks = [{"prompt": "a", "word": "x", "code": 0}, {"prompt": "b", "word": "x", "code": 7}, {"prompt": "c"}]
        specs = [{"kind": "train", "step": 0, "slot": i, "size": 1, "task": task} for i, task in enumerate(tasks)]
        groups = await gateway.client.create_groups(specs)
        ids = [group.rollouts[0].rollout_id for group in groups]
        assert await status(gateway, "/v1/chat/completions", "CANARY-123", {"messages": []}) == 401
        rollouts = []
        async with asyncio.timeout(500):
            while not all(r.state.terminal for r in rollouts) or not rollouts:
                seen.append("\n".join(" ".join(p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"])))
                rollouts = [await gateway.client.rollout(i) for i in ids]
                await asyncio.sleep(0.05)
        told = repr(rollouts) + repr(await gateway.client.turns(ids))
        stop.set()
        await controller
    assert [r.state for r in rollouts] == [RolloutState.SUCCEEDED, RolloutState.FAILED, RolloutState.FAILED]
    assert [r.failure for r in rollouts] == [None, FailureClass.AGENT, FailureClass.INFRASTRUCTURE]
    written = b"".join(p.read_bytes() for p in config.run_dir.rglob("*") if p.is_file())
    everything = [written, caplog.text.encode(), told.encode(), "\n".join(seen).encode()]
    for word in (b"lk-", b"CANARY-123", SECRET, SECRET.hex().encode()):
        assert [word in text for text in everything] == [False] * 4, word
