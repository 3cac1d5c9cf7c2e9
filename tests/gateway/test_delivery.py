"""What reaches a harness, and what becomes of a call whose caller goes away, comes again, or comes late."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import sqlite3
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import aiohttp
import anthropic
import httpx2
import openai
import pytest
from openai.types.chat import ChatCompletion

from leyden.errors import EngineRejected, EngineUnavailable, GatewayError
from leyden.gateway.attempts import Attempt, Delivery
from leyden.protocols import ROUTES, ChatChoice, ChatReply, ChatRequest
from leyden.trajectory.nodes import Node
from leyden.types import FinishReason, Generation, Json, VersionSpan
from tests.gateway.conftest import Gateway, at_once, forever, make_config, serving, until
from tests.gateway.patience import losing_patience
from tests.protocols.bodies import VALID, is_error, url_of

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "what now?"}
BASH = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}
BODY = {"model": "m", "messages": [USER]}
SERVED = [(path, protocol) for path, protocol in ROUTES]
BY_NAME = {protocol.PROTOCOL: protocol for _, protocol in ROUTES}
IDS = [path for path, _ in SERVED]


def sdk(gateway: Gateway, key: str, **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=key, **options)


async def call(client: openai.AsyncOpenAI, messages: list[Any], **options: Any) -> Any:
    return await client.chat.completions.create(model="m", messages=messages, **options)


async def post(gateway: Gateway, key: str, path: str, body: Any, **headers: str) -> tuple[int, Any]:
    async with (
        aiohttp.ClientSession(headers={"authorization": f"Bearer {key}", **headers}) as session,
        session.post(gateway.url + url_of(path), json=body) as response,
    ):
        return response.status, await response.json()


def states(gateway: Gateway, rollout_id: str) -> list[tuple[int, str]]:
    """(attempt, state) of every turn that was ever opened."""
    with sqlite3.connect(gateway.config.run_dir / "store.sqlite") as connection:
        rows = connection.execute(
            "SELECT attempt, state FROM turns WHERE rollout_id = ? ORDER BY turn_id", (rollout_id,)
        )
        return rows.fetchall()


def sampled(ids: list[int]) -> Generation:
    return Generation(ids, [-0.5] * len(ids), FinishReason.STOP, (VersionSpan(0, len(ids)),))


# Retries


async def test_an_sdk_that_loses_patience_leaves_one_turn(gateway: Gateway) -> None:
    """The SDK tries again by itself; the first try is abandoned, the second is the turn."""
    gateway.engine.before = forever
    gateway.engine.replies = [sampled([20, 21])]
    rollout_id, key = await gateway.start_rollout()

    def asked() -> bool:
        if gateway.engine.requests:
            gateway.engine.before = at_once
        return bool(gateway.engine.requests)

    await call(sdk(gateway, key, http_client=losing_patience(asked), max_retries=1), [USER])
    (turn,) = await gateway.turns(rollout_id)
    assert turn.sampled_T.tolist() == [20, 21]
    assert states(gateway, rollout_id) == [(1, "abandoned"), (1, "committed")]
    assert (len(gateway.engine.requests), gateway.engine.cancelled) == (2, 1)


@pytest.mark.parametrize(("path", "protocol"), SERVED, ids=IDS)
@pytest.mark.parametrize("started", [False, True], ids=["silent", "kept alive"])
async def test_a_caller_that_hangs_up_cancels_its_call(
    path: str, protocol: Any, started: bool, tmp_path: Any, tokenizer_path: Any, renderer: Any
) -> None:
    """The engine stops, the turn is abandoned and never trained, and the next call is not disturbed."""
    config = make_config(tmp_path, tokenizer_path)
    async with serving(config, renderer, keep_alive_s=0.05 if started else 10.0) as gateway:
        gateway.engine.before = forever
        rollout_id, key = await gateway.start_rollout()
        body = VALID[protocol.PROTOCOL]
        async with aiohttp.ClientSession(headers={"authorization": f"Bearer {key}"}) as session:
            request = asyncio.create_task(session.post(gateway.url + url_of(path), json=body))
            await until(lambda: len(gateway.engine.requests) == 1)
            if started:
                response = await request
                assert await response.content.read(1)
                response.close()
            else:
                request.cancel()
            await until(lambda: gateway.engine.cancelled == 1)
        await until(lambda: states(gateway, rollout_id) == [(1, "abandoned")])
        assert await gateway.turns(rollout_id) == []
        gateway.engine.before = at_once
        assert (await post(gateway, key, path, body))[0] == 200
        assert states(gateway, rollout_id) == [(1, "abandoned"), (1, "committed")]


class Caller:
    """An ASGI caller whose connection closes when so many bytes of the body have been sent."""

    def __init__(self, gateway: Gateway, key: str, path: str, body: Any, *, closes_after: int | None = None) -> None:
        self._app, self._body, self._left = gateway.app, json.dumps(body).encode(), closes_after
        headers = [(b"authorization", f"Bearer {key}".encode())]
        self._scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "query_string": b""}
        self._closed = asyncio.Event()
        self._asked = False
        self.received = b""

    async def call(self) -> bytes:
        await self._app(self._scope, self._receive, self._send)  # type: ignore[arg-type]
        return self.received

    async def _receive(self) -> Any:
        if not self._asked:
            self._asked = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self._closed.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        """As a server's: a send after the connection closed, or while it is full, gives way to others."""
        await asyncio.sleep(0)
        self.received += message.get("body", b"")
        if self._left is not None and len(self.received) > self._left:
            self._closed.set()


@pytest.mark.parametrize("streams_again", [False, True])
async def test_the_retry_of_a_cut_stream_is_replayed(gateway: Gateway, streams_again: bool) -> None:
    """Claude Code asks again without `stream`; the answer is the one that was cut, ids and all."""
    rollout_id, key = await gateway.start_rollout()
    cut = await Caller(gateway, key, CHAT, BODY | {"stream": True}, closes_after=10).call()
    again = await Caller(gateway, key, CHAT, BODY | {"stream": streams_again}).call()
    assert again == cut if streams_again else json.loads(again)["choices"][0]["message"]["content"] == "reply 1"
    assert len(gateway.engine.requests) == 1
    assert states(gateway, rollout_id) == [(1, "committed")]
    third = json.loads(await Caller(gateway, key, CHAT, BODY).call())
    assert third["choices"][0]["message"]["content"] == "reply 2"
    assert [turn.fork_cause for turn in await gateway.turns(rollout_id)] == [None, "repeated_request"]


async def test_a_retry_takes_the_place_of_the_call_that_was_lost(gateway: Gateway) -> None:
    """Of three equal calls side by side one is lost and tried again. Three are trained."""
    gateway.engine.before = forever
    rollout_id, key = await gateway.start_rollout()
    lost = asyncio.create_task(post(gateway, key, CHAT, BODY))
    await until(lambda: len(gateway.engine.requests) == 1)
    answered = asyncio.Event()
    gateway.engine.before = answered.wait  # type: ignore[assignment]
    others = [asyncio.create_task(post(gateway, key, CHAT, BODY)) for _ in range(2)]
    await until(lambda: len(gateway.engine.requests) == 3)
    lost.cancel()
    await until(lambda: gateway.engine.cancelled == 1)
    again = asyncio.create_task(post(gateway, key, CHAT, BODY, **{"x-stainless-retry-count": "1"}))
    await until(lambda: len(gateway.engine.requests) == 4)
    answered.set()
    answers = await asyncio.gather(again, *others)
    texts = sorted(answer["choices"][0]["message"]["content"] for _, answer in answers)
    assert texts == ["reply 2", "reply 3", "reply 4"]
    assert [state for _, state in states(gateway, rollout_id)] == ["abandoned", *["committed"] * 3]


@pytest.mark.parametrize("count", ["1", "2"])
async def test_a_retry_ends_a_predecessor_that_is_still_connected(gateway: Gateway, count: str) -> None:
    """Behind a proxy a call can outlive its caller: it is told that another took its place."""
    gateway.engine.before = forever
    rollout_id, key = await gateway.start_rollout()
    first = asyncio.create_task(post(gateway, key, CHAT, BODY))
    await until(lambda: len(gateway.engine.requests) == 1)
    gateway.engine.before = at_once
    status, _ = await post(gateway, key, CHAT, BODY, **{"x-stainless-retry-count": count})
    old_status, old = await first
    assert (status, old_status, old["error"]["code"]) == (200, 400, "gone")
    assert states(gateway, rollout_id) == [(1, "abandoned"), (1, "committed")]


@pytest.mark.parametrize("count", ["", "0", "00", "x", "-1", "²"])
async def test_what_does_not_say_that_it_is_a_retry(gateway: Gateway, count: str) -> None:
    rollout_id, key = await gateway.start_rollout()
    for _ in range(2):
        async with (
            aiohttp.ClientSession(headers={"authorization": f"Bearer {key}"}) as session,
            session.post(gateway.url + CHAT, json=BODY, headers={"x-stainless-retry-count": count}) as response,
        ):
            assert response.status == 200
    assert len(await gateway.turns(rollout_id)) == 2


async def test_choices_are_replayed_whole(gateway: Gateway) -> None:
    """Both choices are turns, and a retry gets both again."""
    gateway.engine.replies = [sampled([5, 6]), sampled([5, 7])]
    rollout_id, key = await gateway.start_rollout()
    client = sdk(gateway, key)
    first: ChatCompletion = await call(client, [USER], n=2)
    assert [turn.sampled_T.tolist() for turn in await gateway.turns(rollout_id)] == [[5, 6], [5, 7]]
    again: ChatCompletion = await call(client, [USER], n=2, extra_headers={"x-stainless-retry-count": "1"})
    assert again.choices == first.choices
    assert len(gateway.engine.requests) == 2


async def test_retries_do_not_stack(gateway: Gateway) -> None:
    """One layer owns them: what the engine does is tried again behind one HTTP request of an SDK that retries twice;
    what cannot succeed is tried once."""
    gateway.engine.replies = [EngineUnavailable("503"), EngineUnavailable("cut"), "here"]
    rollout_id, key = await gateway.start_rollout()
    client = sdk(gateway, key)
    answer = await call(client, [USER])
    assert answer.choices[0].message.content == "here"
    assert states(gateway, rollout_id) == [(1, "committed")]
    with pytest.raises(openai.BadRequestError):
        await call(client, [{"role": "user", "content": "x y z " * 1000}])
    assert [state for _, state in states(gateway, rollout_id)] == ["committed", "failed"]


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


CALLS = [
    {"id": f"call_7_{i}", "type": "function", "function": {"name": name, "arguments": {key: i + 1}}}
    for i, (name, key) in enumerate([("f", "x"), ("g", "y")])
]
REPLY = ChatReply(
    7,
    "policy",
    123,
    10,
    [
        ChatChoice(
            {"role": "assistant", "content": "Hel好🙂lo", "reasoning_content": "好🙂", "tool_calls": CALLS},
            FinishReason.STOP,
            2,
        )
    ],
)


class Pieces(httpx2.AsyncByteStream):
    def __init__(self, *pieces: bytes) -> None:
        self._pieces = pieces

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self._pieces:
            yield piece


def wire(name: str) -> bytes:
    """A streamed reply with the keep-alives that can come before it."""
    protocol = BY_NAME[name]
    request = ChatRequest("m", stream=True, include_usage=True, protocol=name)
    return protocol.KEEP_ALIVE * 2 + b"".join(protocol.stream(REPLY, request))


def client_for(*pieces: bytes) -> httpx2.AsyncClient:
    def answer(_request: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(200, headers={"content-type": "text/event-stream"}, stream=Pieces(*pieces))

    return httpx2.AsyncClient(transport=httpx2.MockTransport(answer))


async def openai_chat_says(http: httpx2.AsyncClient) -> Json:
    """What the SDK's own accumulator makes of a stream."""
    client = openai.AsyncOpenAI(base_url="http://test/v1", api_key="k", http_client=http)
    async with client.chat.completions.stream(model="m", messages=[], stream_options={"include_usage": True}) as stream:
        final = await stream.get_final_completion()
    choice = final.choices[0]
    assert final.usage is not None
    calls = [
        {"id": c.id, "name": c.function.name, "arguments": json.loads(c.function.arguments)}
        for c in choice.message.tool_calls or []
    ]
    reasoning = choice.message.model_extra or {}
    return {
        "text": choice.message.content,
        "reasoning": reasoning.get("reasoning_content"),
        "calls": calls,
        "finish": choice.finish_reason,
        "tokens": final.usage.completion_tokens,
    }


async def openai_responses_says(http: httpx2.AsyncClient) -> Json:
    client = openai.AsyncOpenAI(base_url="http://test/v1", api_key="k", http_client=http)
    async with client.responses.stream(model="m", input="x") as stream:
        final = await stream.get_final_response()
    thought, message, *calls = final.output
    return {
        "text": message.content[0].text,  # type: ignore[union-attr]
        "reasoning": thought.summary[0].text,  # type: ignore[union-attr]
        "calls": [{"id": c.call_id, "name": c.name, "arguments": json.loads(c.arguments)} for c in calls],  # type: ignore[union-attr]
        "finish": "tool_calls" if final.status == "completed" else final.status,
        "tokens": final.usage.output_tokens if final.usage else 0,
    }


async def anthropic_says(http: httpx2.AsyncClient) -> Json:
    client = anthropic.AsyncAnthropic(base_url="http://test", api_key="k", http_client=http)
    async with client.messages.stream(model="m", max_tokens=9, messages=[]) as stream:
        final = await stream.get_final_message()
    thought, text, *calls = final.content
    return {
        "text": text.text,  # type: ignore[union-attr]
        "reasoning": thought.thinking,  # type: ignore[union-attr]
        "calls": [{"id": c.id, "name": c.name, "arguments": c.input} for c in calls],  # type: ignore[union-attr]
        "finish": {"tool_use": "tool_calls"}.get(final.stop_reason or ""),
        "tokens": final.usage.output_tokens,
    }


SDKS: dict[str, Callable[[httpx2.AsyncClient], Any]] = {
    "openai-chat": openai_chat_says,
    "openai-responses": openai_responses_says,
    "anthropic-messages": anthropic_says,
}
EXPECTED = {
    "text": "Hel好🙂lo",
    "reasoning": "好🙂",
    "calls": [
        {"id": "call_7_0", "name": "f", "arguments": {"x": 1}},
        {"id": "call_7_1", "name": "g", "arguments": {"y": 2}},
    ],
    "finish": "tool_calls",
    "tokens": 2,
}


@pytest.mark.parametrize("name", SDKS)
async def test_the_official_sdk_assembles_what_was_said(name: str) -> None:
    """Keep-alives before the first event, a last frame with usage alone, two calls by index."""
    assert await SDKS[name](client_for(wire(name))) == EXPECTED
    if name == "openai-chat":
        frames = [json.loads(f.removeprefix("data: ")) for f in wire(name).decode().split("\n\n") if "data: {" in f]
        assert (frames[-1]["choices"], frames[-1]["usage"]["completion_tokens"]) == ([], 2)
        assert all(frame["choices"] and frame["usage"] is None for frame in frames[:-1])


@pytest.mark.parametrize("name", SDKS)
async def test_characters_may_be_cut_between_reads(name: str) -> None:
    """Around every multi-byte character the stream is split at every byte; the SDK reads the same."""
    stream = wire(name)
    for split in split_points(stream):
        assert await SDKS[name](client_for(stream[:split], stream[split:])) == EXPECTED, split
    assert await SDKS[name](client_for(*(stream[i : i + 1] for i in range(len(stream))))) == EXPECTED


def split_points(stream: bytes) -> Iterator[int]:
    """All offsets within the characters of more than one byte, and their ends."""
    return (i for i in range(1, len(stream)) if stream[i - 1] >= 0x80 or stream[i] >= 0x80)


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
