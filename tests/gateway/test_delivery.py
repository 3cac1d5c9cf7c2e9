"""What reaches a harness, and what becomes of a call whose caller goes away, comes again, or comes late."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import subprocess
import sys
import time
import urllib.request
from typing import Any

import anthropic
import openai
import pytest

from leyden.errors import EngineRejected, GatewayError
from leyden.gateway.attempts import Attempt, Delivery
from leyden.protocols import ChatReply
from leyden.trajectory.nodes import Node
from tests.gateway.conftest import Gateway, at_once, forever, make_config, serving, until
from tests.gateway.sdk_calls import BASH, BODY, CHAT, IDS, SERVED, USER, call, post, sdk, states
from tests.protocols.bodies import VALID, is_error

# Retries


# What late and long calls meet


@pytest.mark.parametrize(("path", "protocol"), SERVED, ids=IDS)
async def test_overflow_in_a_late_turn(gateway: Gateway, path: str, protocol: Any) -> None:
    """No engine call for the fourth, a 400 that SDKs do not try again, three turns to train, one reward."""
    rollout_id, key = await gateway.start_rollout()
    for number in range(3):
        assert (await post(gateway, key, CHAT, {"model": "m", "messages": [USER] * (number + 1)}))[0] == 200
    status, answer = await post(gateway, key, path, _too_long(VALID[protocol.PROTOCOL]))
    assert (status, is_error(protocol.PROTOCOL, answer, 400)) == (400, True)
    assert "maximum context length is 2000 tokens" in answer["error"]["message"]
    assert answer["error"].get("code", 400) in (400, "context_length_exceeded")
    assert len(gateway.engine.requests) == 3
    assert 'leyden_refused_total{code="context_length_exceeded"} 1.0' in await gateway.client.metrics()
    await gateway.client.exit(rollout_id, 1, exit_code=0, timed_out=False, reason=None)
    await gateway.client.reward(rollout_id, 1, 0.5)
    done = await gateway.client.finish(rollout_id, 1)
    assert (done.state, done.reward, done.turns) == ("succeeded", 0.5, 3)
    assert len(await gateway.turns(rollout_id)) == 3


def _too_long(body: Any) -> Any:
    """`body` with its longest text made too long for 2000 tokens."""
    if isinstance(body, dict):
        return {key: _too_long(value) for key, value in body.items()}
    if isinstance(body, list):
        return [_too_long(item) for item in body]
    return "x y z " * 1000 if isinstance(body, str) and body.startswith(("fix it", "1, 2")) else body


async def test_late_writes_of_an_old_attempt(gateway: Gateway) -> None:
    """They are refused and leave nothing behind; the new attempt is not muted."""
    rollout_id, old_key = await gateway.start_rollout()
    client = gateway.client
    await post(gateway, old_key, CHAT, BODY)
    receipt = await client.exit(rollout_id, 1, exit_code=0, timed_out=False, reason=None)
    await client.infrastructure(rollout_id, 1, "evicted")
    new_key = (await client.claim(rollout_id, "test")).agent_key
    assert (await post(gateway, old_key, CHAT, BODY))[0] == 403
    assert (await post(gateway, old_key, "/api/events", {"kind": "late"}))[0] == 403
    assert (await post(gateway, receipt.grader_key or "", "/api/reward", {"value": 1}))[0] == 409
    with pytest.raises(GatewayError) as caught:
        await client.exit(rollout_id, 1, exit_code=0, timed_out=False, reason=None)
    assert caught.value.status == 409
    gateway.engine.replies = ["X"]
    assert (await post(gateway, new_key, CHAT, BODY))[0] == 200
    assert (await post(gateway, new_key, "/api/events", {"kind": "here"}))[0] == 200
    assert [(turn.attempt, turn.fork_cause) for turn in await gateway.turns(rollout_id)] == [(2, None)]
    assert [(event["attempt"], event["kind"]) for event in await client.events(rollout_id)] == [(2, "here")]
    assert states(gateway, rollout_id) == [(1, "committed"), (2, "committed")]
    assert (await client.rollout(rollout_id)).reward is None


async def test_a_call_that_outlives_its_attempt_is_refused(gateway: Gateway) -> None:
    """A call that is under way ends with its attempt, and the engine stops."""
    gateway.engine.before = forever
    rollout_id, key = await gateway.start_rollout()
    late = asyncio.create_task(post(gateway, key, CHAT, BODY))
    await until(lambda: len(gateway.engine.requests) == 1)
    await gateway.client.infrastructure(rollout_id, 1, "evicted")
    status, answer = await late
    assert (status, answer["error"]["code"]) == (400, "gone")
    assert gateway.engine.cancelled == 1
    assert states(gateway, rollout_id) == [(1, "abandoned")]


async def test_a_pause_longer_than_any_patience(tmp_path: Any, tokenizer_path: Any, renderer: Any) -> None:
    """Clients that never try again sit through a pause: however long it is, each hears something again
    and again."""
    config = make_config(tmp_path, tokenizer_path)
    async with serving(config, renderer, keep_alive_s=0.05) as gateway:
        rollout_id, key = await gateway.start_rollout()
        openai_client = sdk(gateway, key, max_retries=0)
        claude = anthropic.AsyncAnthropic(base_url=gateway.url, api_key=key, max_retries=0)
        await gateway.client.pause()
        answers = asyncio.gather(
            call(openai_client, [USER]),
            _streamed(openai_client),
            openai_client.responses.create(model="m", input="x"),
            claude.messages.create(model="m", max_tokens=9, messages=[USER]),  # type: ignore[list-item]
            _claude_streamed(claude),
        )
        await until(lambda: len(gateway.sent) == 5 and min(gateway.sent) >= 4)
        assert gateway.engine.requests == []
        await gateway.client.resume()
        plain, streamed, response, message, message_streamed = await answers
        texts = [plain.choices[0].message.content, streamed, response.output_text]
        texts += [message.content[0].text, message_streamed]
        assert sorted(texts) == [f"reply {n}" for n in range(1, 6)]
        assert len(await gateway.turns(rollout_id)) == 5


async def _streamed(client: openai.AsyncOpenAI) -> str:
    chunks = await call(client, [USER, USER], stream=True)
    return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks if chunk.choices])


async def _claude_streamed(client: anthropic.AsyncAnthropic) -> str:
    async with client.messages.stream(model="m", max_tokens=9, messages=[USER, USER]) as stream:  # type: ignore[list-item]
        return await stream.get_final_text()


@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_after_the_first_keep_alive(
    stream: bool, tmp_path: Any, tokenizer_path: Any, renderer: Any
) -> None:
    """In a stream it is an event that the SDK raises. A plain answer that has begun is cut, and the try that the SDK
    makes then gets the status."""
    config = make_config(tmp_path, tokenizer_path)
    async with serving(config, renderer, keep_alive_s=0.05) as gateway:

        async def kept_alive_once() -> None:
            gateway.engine.before = at_once
            await gateway.kept_alive()

        gateway.engine.before = kept_alive_once
        gateway.engine.replies = [EngineRejected("no such adapter", status=404)] * 9
        rollout_id, key = await gateway.start_rollout()
        with pytest.raises(openai.APIError, match="no such adapter") as caught:
            await _whole(sdk(gateway, key, max_retries=8), stream)
        assert caught.value.code == "engine_rejected"
        assert {state for _, state in states(gateway, rollout_id)} == {"failed"}
        assert len(gateway.engine.requests) == 1 if stream else len(gateway.engine.requests) >= 2


async def _whole(client: openai.AsyncOpenAI, stream: bool) -> None:
    answer = await call(client, [USER], stream=stream)
    if stream:
        async for _ in answer:
            pass


# What arrives


async def test_both_names_of_reasoning_continue_a_turn(gateway: Gateway) -> None:
    """Replies say `reasoning_content`; it comes back under that name, or as `reasoning`."""
    thought = '<think>\nplan\n</think>\n\n<tool_call>\n{"name": "bash", "arguments": {}}\n</tool_call>'
    for name in ("reasoning_content", "reasoning"):
        gateway.engine.replies = [thought, "done"]
        rollout_id, key = await gateway.start_rollout()
        body = {"model": "m", "messages": [USER], "tools": [BASH]}
        _, answer = await post(gateway, key, CHAT, body)
        message = answer["choices"][0]["message"]
        assert (message.pop("reasoning_content"), "reasoning" in message) == ("plan", False)
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "out"}
        await post(gateway, key, CHAT, body | {"messages": [USER, message | {name: "plan"}, result]})
        one, two = await gateway.turns(rollout_id)
        assert (two.parent_id, two.fork_cause) == (one.turn_id, None)


def test_the_address_handed_out_is_the_one_that_is_bound(tmp_path: Any, tokenizer_path: Any) -> None:
    """`localhost` may be ::1 for a client; what is bound and announced is the literal 127.0.0.1."""
    document = {
        "run_dir": str(tmp_path / "run"),
        "model": {"path": str(tokenizer_path), "renderer": "qwen3"},
        "data": {"train": "train.jsonl"},
        "harness": {"command": ["true"]},
        "grader": {"command": ["true"]},
        "gateway": {"host": "localhost"},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(document))
    command = [sys.executable, "-m", "leyden", "gateway", str(tmp_path / "run.yaml"), "--with-parent"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as gateway:
        announced = tmp_path / "run" / "gateway.json"
        while not announced.exists():
            assert gateway.poll() is None
            time.sleep(0.02)
        url = json.loads(announced.read_text())["url"]
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+", url)
        with urllib.request.urlopen(f"{url}/health") as response:
            assert response.status == 200
        gateway.communicate(b"")


# What is left


async def test_nothing_of_a_rollout_is_left_in_memory(gateway: Gateway) -> None:
    """However a rollout ends, also with calls under way and calls that come late."""
    client = gateway.client
    before = {id(o) for o in _of_rollouts()}
    gateway.slot = 700
    ids, keys = [], []
    for number in range(15):
        how = ENDS[number % len(ENDS)]
        gateway.engine.version = 1 if how == "recover" else 0
        rollout_id, key = await gateway.start_rollout()
        ids.append(rollout_id)
        keys.append(key)
        for turn in range(3):
            await post(gateway, key, CHAT, {"model": "m", "messages": [USER] * (turn + 1)})
        gateway.engine.before = forever
        asked = len(gateway.engine.requests)
        under_way = asyncio.create_task(post(gateway, key, "/v1/messages", VALID["anthropic-messages"]))
        await until(lambda asked=asked: len(gateway.engine.requests) > asked)  # type: ignore[misc]
        gateway.engine.before = at_once
        await _end(client, rollout_id, how)
        assert (await under_way)[0] == 400
    for key in keys:
        assert (await post(gateway, key, CHAT, BODY))[0] == 403
    assert len(gateway.app.state.turns.attempts) == 0
    gateway.engine.requests.clear()
    gc.collect()
    assert [o for o in _of_rollouts() if id(o) not in before] == []
    named = set(ids)
    maps = [o for o in gc.get_objects() if type(o) is dict and o]
    assert [list(o)[:3] for o in maps if any(_names(key, named) for key in list(o))] == []


ENDS = ("finish", "cancel", "infrastructure", "give_back", "recover")


async def _end(client: Any, rollout_id: str, how: str) -> None:
    if how == "finish":
        await client.exit(rollout_id, 1, exit_code=0, timed_out=False, reason=None)
        await client.reward(rollout_id, 1, 1.0)
        await client.finish(rollout_id, 1)
    elif how == "cancel":
        await client.cancel(rollout_id, "enough")
    elif how == "recover":
        recovery = await client.recover(step=0, version=0)
        assert recovery.discarded == (rollout_id[:-4],)
    else:
        await getattr(client, how)(rollout_id, 1, "evicted")


def _of_rollouts() -> list[Any]:
    return [o for o in gc.get_objects() if type(o) in (Attempt, Delivery, Node, ChatReply)]


def _names(key: Any, ids: set[str]) -> bool:
    return key in ids if isinstance(key, str) else isinstance(key, tuple) and bool(key) and key[0] in ids
