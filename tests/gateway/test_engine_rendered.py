"""`render: engine`: the messages go to the engine, and what it showed the model comes back as ids."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from aiohttp import web

from leyden.gateway.engines.vllm_wire import ids_apart
from leyden.records import ServedModels
from leyden.types import FinishReason, VersionSpan
from tests.gateway.conftest import Gateway, serving, until
from tests.gateway.fake_vllm import FakeVllm, Json, chatted, completed, cut_within, listening, refused
from tests.gateway.test_chat import BASH, SYSTEM, USER, call, sdk
from tests.gateway.test_engines import config_for, metric, refusal

CHAT, COMPLETIONS, TOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize"
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


@pytest.fixture
async def vllm() -> AsyncIterator[FakeVllm]:
    async with listening(FakeVllm(default=chatted([1, 2, 3], [4, 5]))) as fake:
        yield fake


@pytest.fixture
async def gateway(tmp_path: Path, vllm: FakeVllm, request: pytest.FixtureRequest) -> AsyncIterator[Gateway]:
    """There is no tokenizer and no renderer: the model's folder does not exist."""
    engine = {"render": "engine", "drain_limit_s": getattr(request, "param", 100)}
    async with serving(config_for(tmp_path, Path("/nowhere/model"), vllm, engine=engine), None) as running:  # type: ignore[arg-type]
        yield running


@pytest.mark.parametrize(
    "text",
    [
        '{"prompt_token_ids":[1,2,3],"choices":[]}',
        '{"choices":[], "prompt_token_ids":[ 1, 2 ,3 ]}',
        '{"prompt_token_ids":[12]}',
    ],
)
def test_prompt_ids_are_read_from_their_digits(text: str) -> None:
    rest, ids = ids_apart(text.encode())
    whole = json.loads(text)
    assert ids is not None
    assert ids.tolist() == whole["prompt_token_ids"]
    assert json.loads(rest) == whole | {"prompt_token_ids": None}


@pytest.mark.parametrize(
    "text",
    [
        '{"prompt_token_ids":null}',
        '{"prompt_token_ids": [1, 2]}',
        '{"prompt_token_ids":[]}',
        '{"prompt_token_ids":[1.5,2]}',
        '{"prompt_token_ids":[1,,2]}',
        '{"prompt_token_ids":[1 2]}',
        '{"prompt_token_ids":[1,"a"]}',
        '{"prompt_token_ids":[[1]]}',
        '{"prompt_token_ids":[1],"x":{"prompt_token_ids":[2]}}',
        '{"prompt_token_ids":[1',
        r'{"a": "\"prompt_token_ids\":[1]"}',
        "",
    ],
)
def test_anything_else_is_left_as_it_is(text: str) -> None:
    assert ids_apart(text.encode()) == (text.encode(), None)


async def test_messages_go_to_the_engine_and_ids_come_back(gateway: Gateway, vllm: FakeVllm) -> None:
    """Images and tools as they came, sampling overridden, everything that the record needs asked for."""
    content = [{"token": f"token_id:{i}", "logprob": -i / 10} for i in (4, 5)]
    message = {"content": "hello", "reasoning": "hm"}
    vllm.script = [chatted([1, 2, 3], [4, 5], message, logprobs={"content": content})]
    rollout_id, key = await gateway.start_rollout()
    user = {"role": "user", "content": [{"type": "text", "text": "look"}, IMAGE]}
    answer = await call(sdk(gateway, key), [SYSTEM, user], tools=[BASH], max_tokens=50, temperature=0.1, stop=["x"])
    reply = answer.choices[0].message
    assert (reply.content, reply.reasoning_content, answer.choices[0].finish_reason) == ("hello", "hm", "stop")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 2)

    (turn,) = await gateway.turns(rollout_id)
    assert (turn.delta_P.tolist(), turn.sampled_T.tolist()) == ([1, 2, 3], [4, 5])
    assert turn.logprobs_T.tolist() == pytest.approx([-0.4, -0.5])
    assert turn.spans == (VersionSpan(0, 2),)
    ((path, body),) = vllm.asked
    assert path == CHAT
    assert body["messages"] == [SYSTEM, user]
    assert (body["tools"], body["tool_choice"]) == ([BASH], "auto")
    assert (body["temperature"], body["top_p"], body["top_k"], body["stop"]) == (1.0, 1.0, 0, ["x"])
    assert (body["min_p"], body["repetition_penalty"], body["presence_penalty"]) == (0.0, 1.0, 0.0)
    assert (body["max_completion_tokens"], body["logprobs"], body["top_logprobs"]) == (50, True, 0)
    assert (body["return_token_ids"], body["return_tokens_as_token_ids"]) == (True, True)
    assert "stream" not in body or body["stream"] is False


async def test_tool_calls_are_the_engines_and_named_after_the_turn(gateway: Gateway, vllm: FakeVllm) -> None:
    wire = {"id": "xyz", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}
    odd = {"id": "w", "type": "function", "function": {"name": "bash", "arguments": '{"command": NaN}'}}
    vllm.script = [chatted([1], [4, 5], {"tool_calls": [wire, odd]}, finish_reason="tool_calls")]
    rollout_id, key = await gateway.start_rollout()
    client = sdk(gateway, key)
    answer = await call(client, [USER], tools=[BASH])
    (turn,) = await gateway.turns(rollout_id)
    calls = answer.choices[0].message.tool_calls
    assert [(c.id, c.function.name, c.function.arguments) for c in calls] == [
        (f"call_{turn.turn_id}_0", "bash", '{"command":"ls"}'),
        (f"call_{turn.turn_id}_1", "bash", '{"command": NaN}'),
    ]
    assert answer.choices[0].finish_reason == "tool_calls"

    assistant = answer.choices[0].message.model_dump(exclude_none=True) | {"reasoning_content": "hm"}
    results = [{"role": "tool", "tool_call_id": c.id, "content": "out"} for c in calls]
    await call(client, [USER, assistant, *results], tools=[BASH])
    sent = vllm.bodies[1]["messages"]
    assert [c["function"]["arguments"] for c in sent[1]["tool_calls"]] == ['{"command":"ls"}', '{"command": NaN}']
    assert [c["id"] for c in sent[1]["tool_calls"]] == [c.id for c in calls]
    assert (sent[1]["reasoning"], sent[1]["reasoning_content"]) == ("hm", "hm")
    assert sent[2:] == results


async def test_a_prompt_that_extends_the_ids_continues_the_turn(gateway: Gateway, vllm: FakeVllm) -> None:
    vllm.script = [chatted([1, 2, 3], [4, 5]), chatted([1, 2, 3, 4, 5, 6, 7], [8])]
    rollout_id, key = await gateway.start_rollout()
    client = sdk(gateway, key)
    await call(client, [USER])
    await call(client, [USER, {"role": "assistant", "content": "hello"}, USER])
    one, two = await gateway.turns(rollout_id)
    assert (two.parent_id, two.delta_P.tolist(), two.fork_cause) == (one.turn_id, [6, 7], None)


async def test_a_prompt_that_was_rendered_otherwise_is_a_fork_with_its_cause(gateway: Gateway, vllm: FakeVllm) -> None:
    """The messages continue the turn, their ids do not; and messages that continue none."""
    vllm.script = [
        chatted([1, 2, 3], [4, 5]),
        chatted([1, 2, 3, 45, 6], [8], {"content": "so"}),
        chatted([1, 2, 3, 4, 5, 6, 7], [9]),
        chatted([9, 9], [8]),
    ]
    rollout_id, key = await gateway.start_rollout()
    client = sdk(gateway, key)
    history = [SYSTEM, USER, {"role": "assistant", "content": "hello"}, USER]
    await call(client, [SYSTEM, USER])
    await call(client, history)
    await call(client, [*history, {"role": "assistant", "content": "so"}, USER])
    await call(client, [{"role": "system", "content": "another agent"}, {"role": "user", "content": "task"}])
    turns = await gateway.turns(rollout_id)
    first = turns[0].turn_id
    assert [(turn.parent_id, turn.fork_cause) for turn in turns] == [
        *((None, None), (None, "rerendered_by_engine"), (first, None), (None, "new_conversation"))
    ]
    assert [turn.delta_P.tolist() for turn in turns] == [[1, 2, 3], [1, 2, 3, 45, 6], [6, 7], [9, 9]]
    assert await metric(gateway, 'leyden_forks_total{cause="rerendered_by_engine"}') == 1


async def test_a_call_that_was_cut_reads_as_a_call_and_is_not_one(gateway: Gateway, vllm: FakeVllm) -> None:
    """Finish reason tool_calls where the last allowed token was sampled."""
    cut = {"id": "w", "type": "function", "function": {"name": "bash", "arguments": '{"city": "Par'}}
    vllm.script = [chatted([1], [7] * 64, {"tool_calls": [cut]}, finish_reason="tool_calls")]
    rollout_id, key = await gateway.start_rollout()
    answer = await call(sdk(gateway, key), [USER], tools=[BASH], max_tokens=64)
    (turn,) = await gateway.turns(rollout_id)
    assert (answer.choices[0].finish_reason, turn.finish_reason) == ("length", FinishReason.LENGTH)
    assert await metric(gateway, "leyden_truncated_turns_total") == 1


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(chatted(None, [3]), id="no prompt ids"),
        pytest.param(chatted([], [3]), id="empty prompt ids"),
        pytest.param(chatted([1, 2], [], token_ids=None), id="no sampled ids"),
        pytest.param(
            chatted([1, 2], [3]) | {"usage": {"prompt_tokens": 3, "completion_tokens": 1}}, id="usage: prompt"
        ),
        pytest.param(chatted([1, 2], [3]) | {"usage": {"prompt_tokens": 2, "completion_tokens": 2}}, id="usage: ids"),
        pytest.param(chatted([1, 2.5], [3]), id="ids that are none"),
        pytest.param(chatted([1, -2], [3]), id="an id below zero"),
        pytest.param(chatted([1], [2**40]), id="an id that is too large"),
        pytest.param(chatted([1], [3]) | {"prompt_token_ids": [[1]]}, id="nested ids"),
        pytest.param(chatted([1], [3], {"content": [1]}), id="content that is no text"),
        pytest.param(chatted([1], [3], {"tool_calls": [{"id": "a"}]}), id="a call without a function"),
        pytest.param(
            chatted([1], [3, 4], logprobs={"content": [{"token": "x", "logprob": -0.1}]}), id="fewer log-probs than ids"
        ),
    ],
)
async def test_ids_that_are_missing_make_the_attempt_incomplete(gateway: Gateway, vllm: FakeVllm, answer: Json) -> None:
    """Capture is fail-closed."""
    vllm.script = [answer]
    status, _, reason = await refusal(gateway)
    assert (status, (reason or "").startswith("incomplete: ")) == (400, True)


async def test_log_probs_of_other_tokens_are_absent(gateway: Gateway, vllm: FakeVllm) -> None:
    """As many entries, one for another token."""
    content = [{"token": "token_id:4", "logprob": -0.1}, {"token": "token_id:6", "logprob": -0.1}]
    vllm.script = [chatted([1], [4, 5], logprobs={"content": content}), chatted([1], [4, 5], logprobs=None)]
    rollout_id, key = await gateway.start_rollout()
    for text in ("a", "b"):
        await call(sdk(gateway, key), [{"role": "user", "content": text}])
    turns = await gateway.turns(rollout_id)
    assert [(turn.sampled_T.tolist(), turn.logprobs_T) for turn in turns] == [([4, 5], None)] * 2


async def test_an_update_waits_for_open_calls(gateway: Gateway, vllm: FakeVllm) -> None:
    """POST /api/pause returns when the call is over, and the call is of one version."""

    async def later(_request: web.Request, _body: Json) -> web.StreamResponse:
        await paused.wait()
        order.append("answered")
        return web.json_response(chatted([1], [4]))

    async def pause() -> None:
        await gateway.client.pause()
        order.append("paused")

    paused = asyncio.Event()
    order: list[str] = []
    vllm.script = [later]
    rollout_id, key = await gateway.start_rollout()
    calling = asyncio.create_task(call(sdk(gateway, key), [USER]))
    await vllm.arrived.wait()
    pausing = asyncio.create_task(pause())
    while not (await gateway.client._call(ServedModels, "GET", "/api/models")).paused:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    paused.set()
    await pausing
    await gateway.client.resume()
    await calling
    assert (order, len(vllm.asked)) == (["answered", "paused"], 1)
    (turn,) = await gateway.turns(rollout_id)
    assert turn.spans == (VersionSpan(0, 1),)


@pytest.mark.parametrize("gateway", [0.2], indirect=True)
async def test_a_call_that_takes_longer_than_the_drain_limit_is_made_again(gateway: Gateway, vllm: FakeVllm) -> None:
    """The turn is wholly of the new version, the wait is not the rollout's, and the harness sees only the answer."""

    async def never(_request: web.Request, _body: Json) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError

    vllm.script = [never, chatted([1], [4, 5])]
    rollout_id, key = await gateway.start_rollout()
    calling = asyncio.create_task(call(sdk(gateway, key, max_retries=0), [USER]))
    await vllm.arrived.wait()
    await gateway.client.pause()
    await until(lambda: vllm.cancelled == 1)
    await gateway.client.put_model("policy", engines=[vllm.url], version=1, lineage="l", context_tokens=2000)
    await gateway.client.resume()
    await calling
    (turn,) = await gateway.turns(rollout_id)
    assert (turn.spans, len(vllm.asked)) == ((VersionSpan(1, 2),), 2)
    assert await metric(gateway, "leyden_interrupted_calls_total") == 1
    assert (await gateway.client.rollout(rollout_id)).held_s >= 0.2


async def test_an_abort_is_made_again(gateway: Gateway, vllm: FakeVllm) -> None:
    """The engine's own message of a partial answer is nobody's."""
    vllm.script = [chatted([1], [4], finish_reason="abort"), cut_within, refused(503), chatted([1], [4, 5])]
    rollout_id, key = await gateway.start_rollout()
    await call(sdk(gateway, key, max_retries=0), [USER])
    (turn,) = await gateway.turns(rollout_id)
    assert (turn.sampled_T.tolist(), len(vllm.asked)) == ([4, 5], 4)


async def test_every_choice_is_recorded_with_its_own_prompt(gateway: Gateway, vllm: FakeVllm) -> None:
    vllm.script = [chatted([1], [5, 6]), chatted([1], [5, 7])]
    rollout_id, key = await gateway.start_rollout()
    answer = await call(sdk(gateway, key), [USER], n=2)
    turns = await gateway.turns(rollout_id)
    assert (len(answer.choices), sorted(turn.sampled_T.tolist() for turn in turns)) == (2, [[5, 6], [5, 7]])
    assert [turn.fork_cause for turn in turns] == [None, "repeated_request"]


@pytest.mark.parametrize("prompt", ["once upon", [7, 8]])
async def test_a_prompt_without_messages_goes_to_the_completions_route(
    gateway: Gateway, vllm: FakeVllm, prompt: Any
) -> None:
    vllm.script = [completed([4, 5], prompt_token_ids=[7, 8], text=" a time")]
    rollout_id, key = await gateway.start_rollout()
    answer = await sdk(gateway, key).completions.create(model="m", prompt=prompt, max_tokens=9)
    assert (answer.choices[0].text, answer.usage.prompt_tokens) == (" a time", 2)
    ((path, body),) = vllm.asked
    assert (path, body["prompt"], body["max_tokens"], body["return_token_ids"]) == (COMPLETIONS, prompt, 9, True)
    (turn,) = await gateway.turns(rollout_id)
    assert (turn.delta_P.tolist(), turn.sampled_T.tolist(), turn.logprobs_T.tolist()) == ([7, 8], [4, 5], [-0.5] * 2)


async def test_tokens_are_counted_by_the_engine(gateway: Gateway, vllm: FakeVllm) -> None:
    """And where it cannot, the caller hears why."""
    _, key = await gateway.start_rollout()
    vllm.script = [{"count": 42}]

    async def count() -> tuple[int, Json]:
        body = {"model": "m", "messages": [USER], "system": "be brief"}
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{gateway.url}/v1/messages/count_tokens", json=body, headers={"x-api-key": key}) as response,
        ):
            return response.status, await response.json()

    assert await count() == (200, {"input_tokens": 42})
    ((path, body),) = vllm.asked
    assert (path, body) == (TOKENIZE, {"messages": [SYSTEM, USER]})
    vllm.missing = {TOKENIZE}
    status, answer = await count()
    assert (status, "/tokenize" in answer["error"]["message"]) == (404, True)


async def test_the_engines_refusal_of_an_image_is_passed_on(gateway: Gateway, vllm: FakeVllm) -> None:
    vllm.script = [refused(400, "tiny is not a multimodal model")]
    _, key = await gateway.start_rollout()
    with pytest.raises(openai.BadRequestError, match="not a multimodal model"):
        await call(sdk(gateway, key), [{"role": "user", "content": [IMAGE]}])
