"""Anthropic Messages through the official SDK and a real socket."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import anthropic
import openai
import pytest
from anthropic import beta_async_tool

from leyden.errors import CaptureError
from leyden.gateway.render import ModelRenderer
from leyden.types import FinishReason, Generation, VersionSpan
from tests.gateway.conftest import Gateway, at_once, forever, make_config, serving, until
from tests.gateway.patience import losing_patience
from tests.qwen_tokenizers import qwen_tokenizer_folder

BASH = {
    "name": "bash",
    "description": "run",
    "input_schema": {"type": "object", "properties": {"command": {"type": "string"}}},
}
USER = {"role": "user", "content": "hello"}
CACHED = {"cache_control": {"type": "ephemeral"}}
FIRST = (
    '<think>\nI need  a shell.\n</think>\n\n Let me.\n<tool_call>\n{"name": "bash", "arguments": {"command": "a"}}\n'
    '</tool_call>\n<tool_call>\n{"name": "bash", "arguments": {"command" : "b é"}}\n</tool_call>'
)
SECOND = '<tool_call>\n{"name": "bash", "arguments": {"command": "c"}}\n</tool_call>'


def sdk(gateway: Gateway, key: str, **options: Any) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=gateway.url, api_key=key, **options)


async def call(client: anthropic.AsyncAnthropic, messages: list[Any], *, stream: bool = False, **options: Any) -> Any:
    """The message that is answered, by `create` or gathered by the SDK from a stream."""
    options = {"model": "any", "max_tokens": 50, **options}
    if not stream:
        return await client.messages.create(messages=messages, **options)
    async with client.messages.stream(messages=messages, **options) as events:
        return await events.get_final_message()


def results(message: Any, *outputs: str) -> dict[str, Any]:
    """The user message that answers the tool calls of `message`."""
    uses = [block for block in message.content if block.type == "tool_use"]
    content = [
        {"type": "tool_result", "tool_use_id": use.id, "content": output, "is_error": False}
        for use, output in zip(uses, outputs, strict=True)
    ]
    return {"role": "user", "content": content}


def resent(message: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in message.content]}


async def assert_one_chain(gateway: Gateway, rollout_id: str) -> list[Any]:
    """Each turn extends the one before by its exact ids, and the engine was asked with just those."""
    turns = await gateway.turns(rollout_id)
    ids: list[int] = []
    for turn, before, request in zip(turns, [None, *turns[:-1]], gateway.engine.requests, strict=True):
        assert (turn.parent_id, turn.fork_cause) == (before.turn_id if before else None, None)
        ids += turn.delta_P.tolist()
        assert request.prompt_ids == ids
        ids += turn.sampled_T.tolist()
        assert len(turn.logprobs_T) == len(turn.sampled_T)
    return turns


@pytest.mark.parametrize("stream", [False, True])
async def test_a_tool_loop_with_thinking_and_parallel_calls_is_one_chain(gateway: Gateway, stream: bool) -> None:
    gateway.engine.replies = [FIRST, SECOND, "Done.\n"]
    rollout_id, key = await gateway.start_rollout()
    client = sdk(gateway, key)
    options: dict[str, Any] = {"stream": stream, "tools": [BASH], "system": "be brief"}
    one = await call(client, [USER], **options)
    thinking, text, *uses = one.content
    assert (thinking.type, thinking.thinking.strip()) == ("thinking", "I need  a shell.")
    assert (text.type, text.text.strip()) == ("text", "Let me.")
    assert [(use.type, use.name, use.input) for use in uses] == [
        ("tool_use", "bash", {"command": "a"}),
        ("tool_use", "bash", {"command": "b é"}),
    ]
    assert (one.stop_reason, one.stop_sequence, one.role, one.model) == ("tool_use", None, "assistant", "any")
    history = [USER, resent(one), results(one, "out a\n", "out b")]
    two = await call(client, history, **options)
    assert [block.type for block in two.content] == ["tool_use"]
    history += [resent(two), results(two, "out c")]
    three = await call(client, history, **options)
    assert ([block.text for block in three.content], three.stop_reason) == (["Done.\n"], "end_turn")

    turns = await assert_one_chain(gateway, rollout_id)
    decode = gateway.renderer.decode
    assert decode(turns[0].delta_P).startswith("<|im_start|>system\nbe brief\n\n# Tools")
    assert decode(turns[1].delta_P) == (
        "\n<|im_start|>user\n<tool_response>\nout a\n\n</tool_response>\n<tool_response>\nout b\n</tool_response>"
        "<|im_end|>\n<|im_start|>assistant\n"
    )
    for answer, turn, request in zip([one, two, three], turns, gateway.engine.requests, strict=True):
        assert answer.id == f"msg_{turn.turn_id}"
        usage = answer.usage
        assert (usage.input_tokens, usage.output_tokens) == (len(request.prompt_ids), len(turn.sampled_T))
        assert (usage.cache_creation_input_tokens, usage.cache_read_input_tokens) == (0, 0)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_sdks_own_tool_runner(gateway: Gateway, stream: bool) -> None:
    gateway.engine.replies = [FIRST, SECOND, "Done."]
    rollout_id, key = await gateway.start_rollout()
    commands = []

    @beta_async_tool
    async def bash(command: str) -> str:
        """Run a command.

        Args:
            command: what to run
        """
        commands.append(command)
        return f"ran {command}"

    runner = sdk(gateway, key).beta.messages.tool_runner(
        model="any", max_tokens=50, messages=[USER], tools=[bash], stream=stream
    )
    last = await runner.until_done()
    assert ([block.text for block in last.content], commands) == (["Done."], ["a", "b é", "c"])
    assert len(await assert_one_chain(gateway, rollout_id)) == 3


async def test_system_role_cache_markers_and_trimmed_output_as_claude_code_sends_them(gateway: Gateway) -> None:
    """Markers move to the newest block, and the trailing newline of tool output is gone: append-only all the same."""
    gateway.engine.replies = [FIRST, "ok"]
    rollout_id, key = await gateway.start_rollout()
    client = sdk(gateway, key)
    billing = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.197.fbe; cc_entrypoint=sdk-cli;"}
    system = [billing, {"type": "text", "text": "You are an agent.", **CACHED}, {"type": "text", "text": "\nHelp."}]
    reminder = {"type": "text", "text": "<system-reminder>\ndate\n</system-reminder>\n\n"}
    agents = {"role": "system", "content": "Agents: none"}
    options: dict[str, Any] = {
        "tools": [BASH, {"type": "web_search_20250305", "name": "web_search"}],
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "high"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "metadata": {"user_id": "{}"},
        "max_tokens": 32000,
    }

    async def ask(messages: list[Any], system: list[Any]) -> Any:
        events = client.beta.messages.stream(model="any", messages=messages, system=system, **options)
        async with events as running:
            return await running.get_final_message()

    first = await ask(
        [{"role": "user", "content": [reminder, {"type": "text", "text": "Go.", **CACHED}]}, agents], system
    )
    answers = results(first, "out a", "out b")
    answers["content"][-1] |= CACHED
    other_billing = billing | {"text": billing["text"].replace("fbe", "c40")}
    history = [
        {"role": "user", "content": [reminder, {"type": "text", "text": "Go."}]},
        agents,
        resent(first),
        answers,
    ]
    await ask(history, [other_billing, *system[1:]])
    one, two = await assert_one_chain(gateway, rollout_id)
    decode = gateway.renderer.decode
    assert decode(one.delta_P).startswith("<|im_start|>system\nYou are an agent.\nHelp.\n\n# Tools")
    assert "web_search" not in decode(one.delta_P)
    assert decode(one.delta_P).endswith(
        "<|im_start|>user\n<system-reminder>\ndate\n</system-reminder>\n\nGo.<|im_end|>\n"
        "<|im_start|>system\nAgents: none<|im_end|>\n<|im_start|>assistant\n"
    )
    assert decode(two.delta_P) == (
        "\n<|im_start|>user\n<tool_response>\nout a\n</tool_response>\n<tool_response>\nout b\n</tool_response>"
        "<|im_end|>\n<|im_start|>assistant\n"
    )
    assert one.protocol == "anthropic-messages"


@pytest.mark.parametrize("kept", ["thinking", "signature", "foreign signature", "nothing"])
async def test_thinking_that_comes_back(gateway: Gateway, kept: str) -> None:
    """Its text continues the turn, and so does its signature alone; without either a branch says why."""
    gateway.engine.replies = [FIRST, "ok"]
    rollout_id, key = await gateway.start_rollout()
    client = sdk(gateway, key)
    first = await call(client, [USER], tools=[BASH])
    message = resent(first)
    if kept == "nothing":
        del message["content"][0]
    elif kept != "thinking":
        message["content"][0]["thinking"] = ""
    if kept == "foreign signature":
        message["content"][0]["signature"] = "leyden-turn-999"
    await call(client, [USER, message, results(first, "1", "2")], tools=[BASH])
    one, two = await gateway.turns(rollout_id)
    if kept in ("thinking", "signature"):
        assert (two.parent_id, two.fork_cause) == (one.turn_id, None)
    else:
        assert (two.parent_id, two.fork_cause) == (None, "reasoning_dropped_by_harness")


async def test_only_turns_of_the_same_attempt_are_recalled(gateway: Gateway) -> None:
    gateway.engine.replies = [FIRST, "ok"]
    _, key = await gateway.start_rollout()
    first = await call(sdk(gateway, key), [USER], tools=[BASH])
    message = resent(first)
    message["content"][0]["thinking"] = ""
    rollout_id, other = await gateway.start_rollout()
    await call(sdk(gateway, other), [USER, message, results(first, "1", "2")], tools=[BASH])
    (turn,) = await gateway.turns(rollout_id)
    assert "I need  a shell." not in gateway.renderer.decode(turn.delta_P)


async def test_non_canonical_tokenisation_is_continued_as_sampled(gateway: Gateway) -> None:
    """The same ids as through any other route."""
    tokenizer = gateway.renderer._tokenizer
    gateway.engine.spell = lambda text: [i for c in text for i in tokenizer.encode(c, add_special_tokens=False)]
    gateway.engine.replies = ["the quick brown fox", "done", "the quick brown fox"]
    rollout_id, key = await gateway.start_rollout()
    client = sdk(gateway, key)
    await call(client, [USER], stream=True)
    await call(client, [USER, {"role": "assistant", "content": "the quick brown fox"}, USER])
    one, _ = await assert_one_chain(gateway, rollout_id)
    other_rollout, key = await gateway.start_rollout()
    await openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=key).chat.completions.create(
        model="any", messages=[USER], max_tokens=50
    )
    (same,) = await gateway.turns(other_rollout)
    assert (same.delta_P.tolist(), same.sampled_T.tolist()) == (one.delta_P.tolist(), one.sampled_T.tolist())


async def test_count_tokens_is_what_the_same_call_is_asked_with(gateway: Gateway) -> None:
    """Also where the call continues a turn, and a count is no turn."""
    gateway.engine.replies = [FIRST, "ok"]
    rollout_id, key = await gateway.start_rollout()
    client = sdk(gateway, key)
    options: dict[str, Any] = {"tools": [BASH], "system": [{"type": "text", "text": "be brief", **CACHED}]}

    async def count(messages: list[Any]) -> int:
        return (await client.messages.count_tokens(model="any", messages=messages, **options)).input_tokens

    counted = await count([USER])
    first = await call(client, [USER], **options)
    assert first.usage.input_tokens == counted
    history = [USER, resent(first), results(first, "1", "2")]
    counted = await count(history)
    assert (await client.beta.messages.count_tokens(model="any", messages=history, **options)).input_tokens == counted
    second = await call(client, history, **options)
    assert second.usage.input_tokens == counted
    assert len(await assert_one_chain(gateway, rollout_id)) == 2
    with pytest.raises(anthropic.AuthenticationError):
        await sdk(gateway, "wrong").messages.count_tokens(model="any", messages=[USER])


async def test_length_and_stop_sequences_have_their_reasons(gateway: Gateway) -> None:
    ids = gateway.engine.ids("do it END")
    spans = (VersionSpan(0, len(ids)),)
    gateway.engine.replies = [
        Generation(ids, [-1.0] * len(ids), FinishReason.LENGTH, spans),
        Generation(ids, [-1.0] * len(ids), FinishReason.STOP, spans, stop_string="END"),
    ]
    _, key = await gateway.start_rollout()
    client = sdk(gateway, key)
    cut = await call(client, [USER], max_tokens=len(ids), stream=True)
    assert (cut.content[0].text, cut.stop_reason) == ("do it END", "max_tokens")
    ended = await call(client, [USER], stop_sequences=["END"], stream=True)
    assert (ended.content[0].text, ended.stop_reason, ended.stop_sequence) == ("do it ", "stop_sequence", "END")
    asked = gateway.engine.requests
    assert (asked[0].max_tokens, asked[0].stop, asked[1].stop) == (len(ids), (), ("END",))


@pytest.mark.parametrize("stream", [False, True])
async def test_keep_alives_are_skipped_before_the_first_event(
    tmp_path: Path, tokenizer_path: Path, renderer: ModelRenderer, stream: bool
) -> None:
    async with serving(make_config(tmp_path, tokenizer_path), renderer, keep_alive_s=0.05) as gateway:
        rollout_id, key = await gateway.start_rollout()
        gateway.engine.before = gateway.kept_alive
        gateway.engine.replies = [FIRST, CaptureError("no token_ids")]
        client = sdk(gateway, key, max_retries=0)
        answer = await call(client, [USER], tools=[BASH], stream=stream)
        assert [block.type for block in answer.content] == ["thinking", "text", "tool_use", "tool_use"]
        assert len(await assert_one_chain(gateway, rollout_id)) == 1
        if stream:  # an error after the first bytes comes as an event
            with pytest.raises(anthropic.APIStatusError, match="cannot be recorded exactly"):
                await call(client, [USER], stream=True)


async def test_keep_alives_are_pings(tmp_path: Path, tokenizer_path: Path, renderer: ModelRenderer) -> None:
    async with serving(make_config(tmp_path, tokenizer_path), renderer, keep_alive_s=0.05) as gateway:
        _, key = await gateway.start_rollout()
        gateway.engine.before = gateway.kept_alive
        body = {"model": "any", "max_tokens": 5, "messages": [USER], "stream": True}
        async with (
            aiohttp.ClientSession(headers={"x-api-key": key}) as http,
            http.post(f"{gateway.url}/v1/messages?beta=true", json=body) as answer,
        ):
            text = await answer.text()
        assert answer.headers["content-type"] == "text/event-stream"
        assert text.startswith('event: ping\ndata: {"type":"ping"}\n\n')
        assert text.endswith('event: message_stop\ndata: {"type":"message_stop"}\n\n')


async def test_a_retry_after_a_client_timeout_leaves_one_turn(gateway: Gateway) -> None:
    """With the retry that the SDK makes itself."""

    def asked() -> bool:
        if gateway.engine.requests:
            gateway.engine.before = at_once
        return bool(gateway.engine.requests)

    gateway.engine.before = forever
    gateway.engine.replies = ["answer"]
    rollout_id, key = await gateway.start_rollout()
    answer = await call(sdk(gateway, key, http_client=losing_patience(asked), max_retries=1), [USER])
    assert gateway.engine.cancelled == 1
    assert len(await gateway.turns(rollout_id)) == 1
    assert answer.content[0].text == "answer"


async def test_a_cut_stream_asked_again_without_stream_is_the_same_call(gateway: Gateway) -> None:
    """What Claude Code does, with retry count 0 and nothing else changed."""
    gateway.engine.before = forever
    rollout_id, key = await gateway.start_rollout()
    body = {"model": "any", "max_tokens": 5, "messages": [USER]}
    async with aiohttp.ClientSession(headers={"x-api-key": key, "x-stainless-retry-count": "0"}) as http:
        cut = asyncio.create_task(http.post(f"{gateway.url}/v1/messages?beta=true", json=body | {"stream": True}))
        await until(lambda: len(gateway.engine.requests) == 1)
        cut.cancel()
        await until(lambda: gateway.engine.cancelled == 1)
        gateway.engine.before = at_once
        async with http.post(f"{gateway.url}/v1/messages?beta=true", json=body) as answer:
            content = (await answer.json())["content"]
    assert content == [{"type": "text", "text": "reply 2"}]
    (turn,) = await gateway.turns(rollout_id)
    assert (turn.fork_cause, gateway.engine.cancelled) == (None, 1)


async def test_errors_are_what_the_sdk_raises(gateway: Gateway) -> None:
    rollout_id, key = await gateway.start_rollout()
    client = sdk(gateway, key)
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\].content\[0\] has type 'mystery'") as caught:
        await call(client, [{"role": "user", "content": [{"type": "mystery"}]}])
    assert caught.value.body["error"]["type"] == "invalid_request_error"
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long: This model's maximum context length is 2"):
        await call(client, [{"role": "user", "content": "x y z " * 1000}])
    with pytest.raises(anthropic.AuthenticationError) as unknown:
        await call(sdk(gateway, "wrong"), [USER])
    assert unknown.value.body["error"]["type"] == "authentication_error"
    elsewhere = anthropic.AsyncAnthropic(base_url=f"{gateway.url}/rollouts/other", api_key=key)
    with pytest.raises(anthropic.PermissionDeniedError, match="another rollout"):
        await call(elsewhere, [USER])
    assert len(gateway.engine.requests) == 0
    assert await gateway.turns(rollout_id) == []


async def test_a_body_over_the_limit(tmp_path: Path, tokenizer_path: Path, renderer: ModelRenderer) -> None:
    config = make_config(tmp_path, tokenizer_path, gateway={"max_body_bytes": 2000})
    async with serving(config, renderer) as gateway:
        _, key = await gateway.start_rollout()
        with pytest.raises(anthropic.APIStatusError, match="the limit is 2000") as caught:
            await call(sdk(gateway, key), [{"role": "user", "content": "x" * 3000}])
        assert (caught.value.status_code, caught.value.body["error"]["type"]) == (413, "request_too_large")


async def test_system_messages_in_between_where_the_template_takes_them_only_at_the_beginning(tmp_path: Path) -> None:
    """Qwen3.5: all are shown as one at the beginning, as vLLM does, so each new one starts a branch."""
    model = qwen_tokenizer_folder("qwen3.5")
    qwen35 = ModelRenderer(str(model), "qwen3.5", "template")
    async with serving(make_config(tmp_path, model), qwen35) as gateway:
        gateway.engine.replies = [
            "</think>\n\n<tool_call>\n<function=bash>\n<parameter=command>\na\n</parameter>\n</function>\n</tool_call>",
            "</think>\n\n<tool_call>\n<function=bash>\n<parameter=command>\nb\n</parameter>\n</function>\n</tool_call>",
            "</think>\n\nok",
        ]
        rollout_id, key = await gateway.start_rollout()
        client = sdk(gateway, key)
        history = [USER, {"role": "system", "content": "Agents: none."}]
        for reminder in ([], [{"role": "system", "content": "Use tasks."}], None):
            answer = await call(client, history, tools=[BASH], system="You are an agent.")
            if reminder is not None:
                history += [resent(answer), results(answer, "out"), *reminder]
        one, two, three = await gateway.turns(rollout_id)
    assert (one.parent_id, two.parent_id, three.parent_id) == (None, one.turn_id, None)
    assert (one.fork_cause, two.fork_cause, three.fork_cause) == (None, None, "late_system_message")
    decode = qwen35.decode
    assert "You are an agent.Agents: none.<|im_end|>\n<|im_start|>user\nhello<|im_end|>" in decode(one.delta_P)
    assert "You are an agent.Agents: none.Use tasks.<|im_end|>\n<|im_start|>user\nhello" in decode(three.delta_P)


async def test_the_base_answers_who_looks_first_and_says_nothing(gateway: Gateway) -> None:
    """Claude Code sends HEAD without a key to the base URL that it was given."""
    rollout_id, key = await gateway.start_rollout()
    async with aiohttp.ClientSession() as http:
        for path in ("/", f"/rollouts/{rollout_id}", "/rollouts/nothing"):
            async with http.head(gateway.url + path) as answer:
                assert answer.status == 200
            async with http.get(gateway.url + path) as answer:
                assert (answer.status, await answer.json()) == (200, {"status": "ok"})
    client = anthropic.AsyncAnthropic(base_url=f"{gateway.url}/rollouts/{rollout_id}", auth_token=key)
    assert (await call(client, [USER])).content[0].text == "reply 1"
