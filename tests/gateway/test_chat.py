"""The life of a request, through the official SDK and a real socket."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from leyden.errors import EngineUnavailable
from leyden.gateway.render import ModelRenderer
from leyden.types import FinishReason, Generation, VersionSpan
from tests.gateway.conftest import Gateway, at_once, forever, make_config, serving, until
from tests.gateway.patience import losing_patience

SYSTEM = {"role": "system", "content": "be brief"}
USER = {"role": "user", "content": "hello"}
BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "run",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
    },
}


def sdk(gateway: Gateway, key: str, **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=key, **options)


async def call(client: openai.AsyncOpenAI, messages: list[Any], **options: Any) -> Any:
    return await client.chat.completions.create(model="any", messages=messages, **options)


async def test_two_turns_make_one_chain_of_exact_ids(gateway: Gateway) -> None:
    rollout_id, key = await gateway.start_rollout()
    client = sdk(gateway, key)
    first = await call(client, [SYSTEM, USER])
    reply = first.choices[0].message
    assert (reply.content, first.choices[0].finish_reason) == ("reply 1", "stop")
    await call(client, [SYSTEM, USER, reply.model_dump(exclude_none=True), {"role": "user", "content": "more"}])

    one, two = await gateway.turns(rollout_id)
    decode = gateway.renderer.decode
    assert decode(one.delta_P) == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    )
    assert decode(one.sampled_T) == "reply 1<|im_end|>"
    assert decode(two.delta_P) == "\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
    assert (one.parent_id, two.parent_id) == (None, one.turn_id)
    assert (one.fork_cause, two.fork_cause) == (None, None)
    assert gateway.engine.requests[1].prompt_ids == [*one.delta_P, *one.sampled_T, *two.delta_P]
    assert one.logprobs_T.tolist() == [-0.5] * len(one.sampled_T)
    assert one.spans == (VersionSpan(0, len(one.sampled_T)),)
    usage = first.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(one.delta_P), len(one.sampled_T))


async def test_non_canonical_tokenisation_is_continued_as_sampled(gateway: Gateway) -> None:
    tokenizer = gateway.renderer._tokenizer
    gateway.engine.spell = lambda text: [i for c in text for i in tokenizer.encode(c, add_special_tokens=False)]
    gateway.engine.replies = ["the quick brown fox", "done"]
    rollout_id, key = await gateway.start_rollout()
    client = sdk(gateway, key)
    await call(client, [SYSTEM, USER])
    history = [SYSTEM, USER, {"role": "assistant", "content": "the quick brown fox"}, USER]
    await call(client, history)
    one, two = await gateway.turns(rollout_id)
    assert len(one.sampled_T) == 20
    assert two.parent_id == one.turn_id
    assert gateway.engine.requests[1].prompt_ids[: len(one.delta_P) + 20] == [*one.delta_P, *one.sampled_T]
    assert gateway.renderer.render(history, []) != gateway.engine.requests[1].prompt_ids


async def test_tool_calls_round_trip_with_rewritten_arguments(gateway: Gateway) -> None:
    gateway.engine.replies = ['<tool_call>\n{"name": "bash", "arguments": {"command": "echo hi"}}\n</tool_call>', "ok"]
    rollout_id, key = await gateway.start_rollout()
    client = sdk(gateway, key)
    first = await call(client, [USER], tools=[BASH])
    (tool_call,) = first.choices[0].message.tool_calls
    assert (first.choices[0].finish_reason, first.choices[0].message.content) == ("tool_calls", None)
    assert (tool_call.function.name, tool_call.function.arguments) == ("bash", '{"command":"echo hi"}')
    again = {"id": "renamed", "type": "function", "function": {"name": "bash", "arguments": '{"command" : "echo hi"}'}}
    history = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [again]},
        {"role": "tool", "tool_call_id": "renamed", "content": [{"type": "text", "text": "hi"}]},
    ]
    await call(client, history, tools=[BASH])
    one, two = await gateway.turns(rollout_id)
    assert (two.parent_id, two.fork_cause) == (one.turn_id, None)
    assert gateway.renderer.decode(two.delta_P) == (
        "\n<|im_start|>user\n<tool_response>\nhi\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    "text",
    ['<tool_call>\n{"name": "bash", "arguments": {oops}}\n</tool_call>', '<tool_call>\n{"name": "bash"'],
)
async def test_a_call_that_does_not_parse_comes_back_as_literal_text(gateway: Gateway, text: str) -> None:
    gateway.engine.replies = [text]
    _, key = await gateway.start_rollout()
    first = await call(sdk(gateway, key), [USER], tools=[BASH])
    message = first.choices[0].message
    assert (message.content, message.tool_calls, first.choices[0].finish_reason) == (text, None, "stop")


async def test_blanks_around_the_text_are_kept(gateway: Gateway) -> None:
    gateway.engine.replies = ["  \n text \n\n"]
    _, key = await gateway.start_rollout()
    first = await call(sdk(gateway, key), [USER])
    assert first.choices[0].message.content == "  \n text \n\n"


async def test_dropped_reply_forks_and_both_segments_stay(gateway: Gateway) -> None:
    """What mini-swe-agent does after a format error."""
    rollout_id, key = await gateway.start_rollout()
    client = sdk(gateway, key)
    await call(client, [SYSTEM, USER])
    await call(client, [SYSTEM, USER, {"role": "user", "content": "format error"}])
    _, two = await gateway.turns(rollout_id)
    assert (two.parent_id, two.fork_cause) == (None, "reply_dropped")
    assert gateway.renderer.decode(two.delta_P).startswith("<|im_start|>system\nbe brief")
    assert (await gateway.client.rollout(rollout_id)).forks == {"reply_dropped": 1}


async def test_streamed_answer_equals_the_plain_one(gateway: Gateway) -> None:
    text = (
        '<think>\nhm\n</think>\n\nLet me.\n<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
    )
    gateway.engine.replies = [text, text]
    rollout_id, key = await gateway.start_rollout()
    client = sdk(gateway, key)
    plain = (await call(client, [USER], tools=[BASH])).choices[0]
    content, reasoning, arguments, finish, usage = "", "", "", None, None
    stream = await call(client, [USER], tools=[BASH], stream=True, stream_options={"include_usage": True})
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            content += choice.delta.content or ""
            reasoning += getattr(choice.delta, "reasoning_content", None) or ""
            arguments += "".join(c.function.arguments or "" for c in choice.delta.tool_calls or [])
            finish = choice.finish_reason or finish
    assert (content, arguments) == (plain.message.content, plain.message.tool_calls[0].function.arguments)
    assert (reasoning, finish) == ("hm", "tool_calls")
    one, two = await gateway.turns(rollout_id)
    assert usage.completion_tokens == len(one.sampled_T) == len(two.sampled_T)
    assert two.fork_cause == "repeated_request"


async def test_deliberate_repeats_are_turns_of_their_own(gateway: Gateway) -> None:
    """Three equal requests, each answered in full, are three samples."""
    rollout_id, key = await gateway.start_rollout()
    client = sdk(gateway, key)
    texts = [(await call(client, [USER])).choices[0].message.content for _ in range(3)]
    assert texts == ["reply 1", "reply 2", "reply 3"]
    assert [t.fork_cause for t in await gateway.turns(rollout_id)] == [None, "repeated_request", "repeated_request"]


async def test_n_choices_are_recorded_whole(gateway: Gateway) -> None:
    rollout_id, key = await gateway.start_rollout()
    answer = await call(sdk(gateway, key), [USER], n=2)
    assert [c.message.content for c in answer.choices] == ["reply 1", "reply 2"]
    assert len(await gateway.turns(rollout_id)) == 2


async def test_a_retry_after_a_client_timeout_leaves_one_turn(gateway: Gateway) -> None:
    """The first try is abandoned, the second is the turn."""
    gateway.engine.before = forever
    rollout_id, key = await gateway.start_rollout()
    impatient = sdk(gateway, key, http_client=losing_patience(lambda: bool(gateway.engine.requests)), max_retries=0)
    with pytest.raises(openai.APITimeoutError):
        await call(impatient, [USER])
    gateway.engine.before = at_once
    gateway.engine.replies = ["second"]
    answer = await call(sdk(gateway, key), [USER], extra_headers={"x-stainless-retry-count": "1"})
    assert answer.choices[0].message.content == "second"
    await until(lambda: gateway.engine.cancelled == 1)
    assert len(await gateway.turns(rollout_id)) == 1


async def test_a_retry_of_a_finished_call_is_replayed(gateway: Gateway) -> None:
    rollout_id, key = await gateway.start_rollout()
    client = sdk(gateway, key)
    first = await call(client, [USER])
    replay = await call(client, [USER], extra_headers={"x-stainless-retry-count": "1"})
    assert (replay.id, replay.choices[0].message.content) == (first.id, "reply 1")
    assert len(gateway.engine.requests) == 1
    assert len(await gateway.turns(rollout_id)) == 1


async def test_an_engine_that_comes_back_is_waited_for(gateway: Gateway) -> None:
    gateway.engine.replies = [EngineUnavailable("refused"), EngineUnavailable("503"), "here"]
    rollout_id, key = await gateway.start_rollout()
    answer = await call(sdk(gateway, key, max_retries=0), [USER])
    assert answer.choices[0].message.content == "here"
    assert len(await gateway.turns(rollout_id)) == 1
    assert (await gateway.client.rollout(rollout_id)).held_s > 0.1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_default_client_survives_a_pause(
    tmp_path: Path, tokenizer_path: Path, renderer: ModelRenderer, stream: bool
) -> None:
    config = make_config(tmp_path, tokenizer_path)
    async with serving(config, renderer, keep_alive_s=0.05) as gateway:
        rollout_id, key = await gateway.start_rollout()
        client = sdk(gateway, key)
        await call(client, [USER])
        await gateway.client.pause()
        pending = asyncio.create_task(call(client, [SYSTEM, USER], stream=stream))
        await until(lambda: len(gateway.sent) == 2 and gateway.sent[1] >= 4)
        assert len(gateway.engine.requests) == 1
        assert (await gateway.client.rollout(rollout_id)).held_s > 0.1
        (listed,), _ = await gateway.client.rollouts()
        assert listed.held_s > 0.1, "a controller that reads the list would think the deadline has come"
        await gateway.client.resume()
        answer = await pending
        if stream:
            text = "".join([c.choices[0].delta.content or "" async for c in answer if c.choices])
        else:
            text = answer.choices[0].message.content
        assert text == "reply 2"
        assert len(await gateway.turns(rollout_id)) == 2
        assert (await gateway.client.rollout(rollout_id)).held_s >= listed.held_s


async def test_hanging_up_abandons_the_call(gateway: Gateway) -> None:
    gateway.engine.before = forever
    rollout_id, key = await gateway.start_rollout()
    impatient = sdk(gateway, key, http_client=losing_patience(lambda: bool(gateway.engine.requests)), max_retries=0)
    with pytest.raises(openai.APITimeoutError):
        await call(impatient, [USER])
    await until(lambda: gateway.engine.cancelled == 1)
    assert await gateway.turns(rollout_id) == []


async def test_missing_ids_void_the_attempt(gateway: Gateway) -> None:
    """Fail-closed capture: the harness gets a 400 that no SDK tries again, the attempt is run again."""
    from leyden.errors import CaptureError

    gateway.engine.replies = [CaptureError("no token_ids")]
    rollout_id, key = await gateway.start_rollout()
    with pytest.raises(openai.BadRequestError, match="cannot be recorded exactly"):
        await call(sdk(gateway, key), [USER])
    receipt = await gateway.client.exit(rollout_id, 1, exit_code=1, timed_out=False, reason=None)
    assert (receipt.rollout.state, receipt.grader_key) == ("queued", None)
    assert receipt.rollout.reason == "incomplete: no token_ids"


async def test_missing_logprobs_keep_the_turn(gateway: Gateway) -> None:
    ids = [5, 6]
    gateway.engine.replies = [Generation(ids, None, FinishReason.LENGTH, (VersionSpan(0, 2),))]
    rollout_id, key = await gateway.start_rollout()
    answer = await call(sdk(gateway, key), [USER])
    assert answer.choices[0].finish_reason == "length"
    (turn,) = await gateway.turns(rollout_id)
    assert (turn.sampled_T.tolist(), turn.logprobs_T) == (ids, None)


async def test_training_overrides_sampling_and_clamps_tokens(gateway: Gateway) -> None:
    _, key = await gateway.start_rollout()
    await call(sdk(gateway, key), [USER], temperature=0.1, top_p=0.5, max_tokens=7, seed=3, tool_choice="auto")
    request = gateway.engine.requests[0]
    assert (request.temperature, request.top_p, request.max_tokens, request.seed) == (1.0, 1.0, 7, None)
    await call(sdk(gateway, key), [USER], max_tokens=10**6)
    assert gateway.engine.requests[1].max_tokens == 2000 - len(gateway.engine.requests[1].prompt_ids)


async def test_evaluation_keeps_the_harness_sampling(gateway: Gateway) -> None:
    _, key = await gateway.start_rollout(kind="eval")
    await call(sdk(gateway, key), [USER], temperature=0.1, top_p=0.5, seed=3)
    request = gateway.engine.requests[0]
    assert (request.temperature, request.top_p, request.seed) == (0.1, 0.5, 3)
    _, key = await gateway.start_rollout(
        kind="eval", sampling={"temperature": 0.7, "top_p": 1.0, "top_k": 0, "max_tokens": 9}
    )
    await call(sdk(gateway, key), [USER], temperature=0.1)
    assert (gateway.engine.requests[1].temperature, gateway.engine.requests[1].max_tokens) == (0.7, 9)


async def test_context_overflow_is_a_400_that_names_the_limit(gateway: Gateway) -> None:
    """One try, the earlier turns stay."""
    rollout_id, key = await gateway.start_rollout()
    client = sdk(gateway, key)
    await call(client, [USER])
    with pytest.raises(openai.BadRequestError, match="maximum context length is 2000 tokens") as caught:
        await call(client, [{"role": "user", "content": "x y z " * 1000}])
    assert caught.value.code == "context_length_exceeded"
    assert len(gateway.engine.requests) == 1
    assert len(await gateway.turns(rollout_id)) == 1
    refusals = (await gateway.client.rollout(rollout_id)).refusals
    assert list(refusals) == ["context_length_exceeded"]
    assert "maximum context length is 2000 tokens" in refusals["context_length_exceeded"]


async def test_turn_budget(tmp_path: Path, tokenizer_path: Path, renderer: ModelRenderer) -> None:
    config = make_config(tmp_path, tokenizer_path, harness={"max_turns": 2})
    async with serving(config, renderer) as gateway:
        rollout_id, key = await gateway.start_rollout()
        client = sdk(gateway, key)
        await call(client, [USER])
        await call(client, [USER])
        assert (await gateway.client.rollout(rollout_id)).refusals == {}
        for _ in range(2):
            with pytest.raises(openai.BadRequestError, match="may make 2"):
                await call(client, [USER])
        refusals = (await gateway.client.rollout(rollout_id)).refusals
        assert refusals == {"budget_exceeded": "the rollout has made 2 model calls and may make 2 (harness.max_turns)"}


async def test_stop_string_ends_the_text_keeps_the_ids_and_is_never_bridged(gateway: Gateway) -> None:
    ids = gateway.engine.ids("do it</code>")
    gateway.engine.replies = [
        Generation(ids, [-1.0] * len(ids), FinishReason.STOP, (VersionSpan(0, len(ids)),), stop_string="</code>"),
        "next",
    ]
    rollout_id, key = await gateway.start_rollout()
    client = sdk(gateway, key)
    first = await call(client, [USER], stop=["</code>"])
    assert first.choices[0].message.content == "do it"
    await call(client, [USER, {"role": "assistant", "content": "do it"}, USER], stop="</code>")
    one, two = await gateway.turns(rollout_id)
    assert one.sampled_T.tolist() == ids
    assert (two.parent_id, two.fork_cause) == (None, "stop_string")


async def test_reasoning_forks_exactly_where_the_template_drops_it(gateway: Gateway) -> None:
    """Qwen3's template keeps reasoning through a tool cycle and drops it at the next user message."""
    gateway.engine.replies = [
        '<think>\nplan\n</think>\n\n<tool_call>\n{"name": "bash", "arguments": {}}\n</tool_call>',
        "answer",
        "last",
    ]
    rollout_id, key = await gateway.start_rollout()
    client = sdk(gateway, key)
    history: list[Any] = [USER]
    first = (await call(client, history, tools=[BASH])).choices[0].message
    assert first.reasoning_content == "plan"
    history += [
        first.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "out"},
    ]
    second = (await call(client, history, tools=[BASH])).choices[0].message
    history += [second.model_dump(exclude_none=True), {"role": "user", "content": "and now?"}]
    await call(client, history, tools=[BASH])
    turns = await gateway.turns(rollout_id)
    assert [t.fork_cause for t in turns] == [None, None, "reasoning_dropped_by_template"]
    assert "plan" not in gateway.renderer.decode(turns[2].delta_P)


async def test_a_restarted_gateway_goes_on_with_the_same_conversation(
    tmp_path: Path, tokenizer_path: Path, renderer: ModelRenderer
) -> None:
    config = make_config(tmp_path, tokenizer_path)
    async with serving(config, renderer) as gateway:
        rollout_id, key = await gateway.start_rollout()
        first = await call(sdk(gateway, key), [USER])
    async with serving(config, renderer) as gateway:
        client = sdk(gateway, key)
        gateway.engine.replies = ["after the restart"]
        replay = await call(client, [USER], extra_headers={"x-stainless-retry-count": "1"})
        assert (replay.id, replay.choices[0].message.content) == (first.id, "reply 1")
        await call(client, [USER, {"role": "assistant", "content": "reply 1"}, USER])
        one, two = await gateway.turns(rollout_id)
        assert (two.parent_id, two.fork_cause) == (one.turn_id, None)


async def test_300_calls_in_flight(gateway: Gateway) -> None:
    """No pool limits a rollout wave."""

    async def all_are_there() -> None:
        await until(lambda: len(gateway.engine.requests) == 300)

    gateway.engine.before = all_are_there
    _, key = await gateway.start_rollout()
    body = {"model": "m", "messages": [USER]}
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), headers={"authorization": f"Bearer {key}"}
    ) as session:

        async def one(i: int) -> int:
            async with session.post(f"{gateway.url}/v1/chat/completions", json=body | {"seed": i}) as response:
                return response.status

        assert await asyncio.gather(*map(one, range(300))) == [200] * 300
