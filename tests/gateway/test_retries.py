"""A call that is made again is answered once, and recorded once."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import openai
import pytest
from openai.types.chat import ChatCompletion

from leyden.errors import EngineUnavailable
from tests.gateway.conftest import Gateway, at_once, forever, make_config, serving, until
from tests.gateway.patience import losing_patience
from tests.gateway.sdk_calls import BODY, CHAT, IDS, SERVED, USER, call, post, sampled, sdk, states
from tests.protocols.bodies import VALID, url_of


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
