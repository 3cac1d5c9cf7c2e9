"""Gemini's routes through the official SDK and a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from google import genai
from google.genai import errors, types

from leyden.errors import EngineRejected
from leyden.gateway.render import ModelRenderer
from leyden.types import FinishReason, Generation, VersionSpan
from tests.gateway.conftest import Gateway, make_config, serving

BASH = types.FunctionDeclaration(
    name="bash",
    description="run",
    parameters=types.Schema(type=types.Type.OBJECT, properties={"command": types.Schema(type=types.Type.STRING)}),
)
CONFIG = types.GenerateContentConfig(tools=[types.Tool(function_declarations=[BASH])], system_instruction="be brief")
USER = types.UserContent("hello")


def sdk(gateway: Gateway, key: str, version: str = "v1beta") -> genai.Client:
    """Gemini CLI and older SDKs ask for `v1beta`, the newest for `v1`."""
    return genai.Client(api_key=key, http_options=types.HttpOptions(base_url=gateway.url, api_version=version))


def tool_call(command: str) -> str:
    return f'<tool_call>\n{{"name": "bash", "arguments": {{"command": "{command}"}}}}\n</tool_call>'


THOUGHT_AND_CALLS = f"<think>\nplan\n</think>\n\nI look.\n{tool_call('ls')}\n{tool_call('pwd')}"


async def ask(client: genai.Client, contents: Any, config: Any = None) -> types.GenerateContentResponse:
    return await client.aio.models.generate_content(model="policy", contents=contents, config=config)


async def streamed(client: genai.Client, contents: Any, config: Any = None) -> list[types.GenerateContentResponse]:
    stream = await client.aio.models.generate_content_stream(model="policy", contents=contents, config=config)
    return [chunk async for chunk in stream]


def parts_of(*responses: types.GenerateContentResponse) -> list[types.Part]:
    return [part for r in responses for c in r.candidates or [] for part in (c.content and c.content.parts) or []]


def results(*pairs: tuple[types.Part, str]) -> types.Content:
    return types.UserContent(
        [
            types.Part(
                function_response=types.FunctionResponse(
                    id=part.function_call.id, name=part.function_call.name, response={"output": text}
                )
            )
            for part, text in pairs
            if part.function_call
        ]
    )


@pytest.mark.parametrize("version", ["v1", "v1beta"])
@pytest.mark.parametrize("as_stream", [False, True])
async def test_a_chat_of_the_sdk_makes_one_chain_of_exact_ids(gateway: Gateway, as_stream: bool, version: str) -> None:
    tokenizer = gateway.renderer._tokenizer
    gateway.engine.spell = lambda text: [i for c in text for i in tokenizer.encode(c, add_special_tokens=False)]
    gateway.engine.replies = [" the quick \u2028 é \n", "two"]
    rollout_id, key = await gateway.start_rollout()
    chat = sdk(gateway, key, version).aio.chats.create(model="policy", config=CONFIG)

    async def say(text: str) -> list[types.GenerateContentResponse]:
        if as_stream:
            return [chunk async for chunk in await chat.send_message_stream(text)]
        return [await chat.send_message(text)]

    first = await say("hello")
    assert [part.text for part in parts_of(*first)] == [" the quick \u2028 é \n"]
    assert first[-1].candidates[0].finish_reason == types.FinishReason.STOP
    assert first[-1].model_version == "policy"
    await say("more")
    one, two = await gateway.turns(rollout_id)
    assert (one.protocol, one.streamed, one.tools) == ("gemini", as_stream, 1)
    usage = first[-1].usage_metadata
    assert (usage.prompt_token_count, usage.candidates_token_count) == (len(one.delta_P), len(one.sampled_T))
    decode = gateway.renderer.decode
    assert "be brief" in decode(one.delta_P)
    assert decode(one.delta_P).endswith("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n")
    assert (two.parent_id, two.fork_cause) == (one.turn_id, None)
    assert decode(two.delta_P) == "\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
    assert gateway.engine.requests[1].prompt_ids == [*one.delta_P, *one.sampled_T, *two.delta_P]


@pytest.mark.parametrize("as_stream", [False, True])
@pytest.mark.parametrize("dropped", [False, True], ids=["kept", "dropped"])
async def test_a_tool_loop_is_continued_exactly_also_without_the_thought(
    gateway: Gateway, as_stream: bool, dropped: bool
) -> None:
    """Parallel calls; the harness drops the thought part and keeps the signature, as Gemini CLI does."""
    gateway.engine.replies = [THOUGHT_AND_CALLS, tool_call("id"), "done"]
    rollout_id, key = await gateway.start_rollout()
    client = sdk(gateway, key)
    history: list[types.Content] = [USER]
    for _ in range(2):
        answered = await streamed(client, history, CONFIG) if as_stream else [await ask(client, history, CONFIG)]
        parts = [part for part in parts_of(*answered) if not (dropped and part.thought)]
        history += [types.ModelContent(parts), results(*((part, "out") for part in parts))]
    await ask(client, history, CONFIG)
    one, two, three = await gateway.turns(rollout_id)
    assert [t.parent_id for t in (one, two, three)] == [None, one.turn_id, two.turn_id]
    assert [t.fork_cause for t in (one, two, three)] == [None, None, None]
    assert gateway.renderer.decode(two.delta_P) == (
        "\n<|im_start|>user\n<tool_response>\nout\n</tool_response>\n<tool_response>\nout\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    first = history[1].parts or []
    texts = [(p.text, bool(p.thought), bool(p.thought_signature)) for p in first if p.text]
    assert texts == [*([] if dropped else [("plan", True, False)]), ("I look.", False, False)]
    calls = [p for p in first if p.function_call]
    assert [(p.function_call.args, bool(p.thought_signature)) for p in calls if p.function_call] == [
        ({"command": "ls"}, True),
        ({"command": "pwd"}, False),
    ]


async def test_a_streamed_chat_of_the_sdk_resends_a_content_for_each_chunk(gateway: Gateway) -> None:
    gateway.engine.replies = [THOUGHT_AND_CALLS, "done"]
    rollout_id, key = await gateway.start_rollout()
    chat = sdk(gateway, key).aio.chats.create(model="policy", config=CONFIG)
    chunks = [chunk async for chunk in await chat.send_message_stream("go")]
    assert [content.role for content in chat.get_history()] == ["user", *["model"] * 4]
    answers = results(*((part, "out") for part in parts_of(*chunks)))
    last = [chunk async for chunk in await chat.send_message_stream(answers.parts or [])]
    assert [part.text for part in parts_of(*last)] == ["done"]
    one, two = await gateway.turns(rollout_id)
    assert (two.parent_id, two.fork_cause) == (one.turn_id, None)


async def test_without_its_signature_a_dropped_thought_is_named(gateway: Gateway) -> None:
    gateway.engine.replies = [THOUGHT_AND_CALLS, "done"]
    rollout_id, key = await gateway.start_rollout()
    client = sdk(gateway, key)
    parts = [part for part in parts_of(await ask(client, USER, CONFIG)) if not part.thought]
    for part in parts:
        part.thought_signature = b"skip_thought_signature_validator"
    await ask(client, [USER, types.ModelContent(parts), results(*((part, "out") for part in parts))], CONFIG)
    assert [t.fork_cause for t in await gateway.turns(rollout_id)] == [None, "reasoning_dropped_by_harness"]


async def test_the_sdk_calls_functions_by_itself(gateway: Gateway) -> None:
    def bash(command: str) -> str:
        """Run a command."""
        return f"ran {command}"

    gateway.engine.replies = [tool_call("ls"), "done"]
    rollout_id, key = await gateway.start_rollout()
    answer = await ask(sdk(gateway, key), "go", types.GenerateContentConfig(tools=[bash]))
    assert answer.text == "done"
    one, two = await gateway.turns(rollout_id)
    assert (two.parent_id, two.fork_cause) == (one.turn_id, None)
    assert "<tool_response>\nran ls\n</tool_response>" in gateway.renderer.decode(two.delta_P)
    assert '"properties": {"command": {"type": "string"}}' in gateway.renderer.decode(one.delta_P)


async def test_each_candidate_can_be_continued(gateway: Gateway) -> None:
    """All are recorded; the signature of each names its own turn."""
    gateway.engine.replies = [THOUGHT_AND_CALLS, THOUGHT_AND_CALLS.replace("plan", "other"), "done"]
    rollout_id, key = await gateway.start_rollout()
    client = sdk(gateway, key)
    answer = await ask(client, USER, CONFIG.model_copy(update={"candidate_count": 2}))
    second = answer.candidates[1].content.parts[1:]
    await ask(client, [USER, types.ModelContent(second), results(*((part, "out") for part in second))], CONFIG)
    one, two, three = await gateway.turns(rollout_id)
    assert [one.fork_cause, two.fork_cause, three.fork_cause] == [None, "repeated_request", None]
    assert three.parent_id == two.turn_id


async def test_a_cut_answer_says_max_tokens(gateway: Gateway) -> None:
    ids = gateway.engine.ids("half an ans")
    gateway.engine.replies = [Generation(ids, [-0.5] * len(ids), FinishReason.LENGTH, (VersionSpan(0, len(ids)),))]
    _, key = await gateway.start_rollout()
    answer = await ask(sdk(gateway, key), USER, types.GenerateContentConfig(max_output_tokens=7, stop_sequences=["x"]))
    assert (answer.text, answer.candidates[0].finish_reason) == ("half an ans", types.FinishReason.MAX_TOKENS)
    assert (gateway.engine.requests[0].max_tokens, gateway.engine.requests[0].stop) == (7, ("x",))


@pytest.fixture
async def slow(tmp_path: Path, tokenizer_path: Path, renderer: ModelRenderer) -> AsyncIterator[Gateway]:
    async with serving(make_config(tmp_path, tokenizer_path), renderer, keep_alive_s=0.05) as running:
        running.engine.before = running.kept_alive
        yield running


async def test_keep_alives_are_skipped(slow: Gateway) -> None:
    """By the SDK's asynchronous client (aiohttp) and its synchronous one (httpx), streamed and plain."""
    _, key = await slow.start_rollout()
    client = sdk(slow, key)
    assert [part.text for part in parts_of(*await streamed(client, USER))] == ["reply 1"]
    assert (await ask(client, USER)).text == "reply 2"
    plain = await asyncio.to_thread(lambda: client.models.generate_content(model="m", contents=USER).text)
    chunks = await asyncio.to_thread(lambda: list(client.models.generate_content_stream(model="m", contents=USER)))
    assert (plain, [part.text for part in parts_of(*chunks)]) == ("reply 3", ["reply 4"])


async def test_an_error_after_keep_alives_is_raised(slow: Gateway) -> None:
    slow.engine.replies = [EngineRejected("no"), EngineRejected("no")]
    _, key = await slow.start_rollout()
    client = sdk(slow, key)
    with pytest.raises(errors.ClientError, match="400 INVALID_ARGUMENT") as caught:
        await streamed(client, USER)
    assert caught.value.message == "no"
    with pytest.raises(errors.ClientError, match="400 INVALID_ARGUMENT"):
        await asyncio.to_thread(lambda: list(client.models.generate_content_stream(model="m", contents=USER)))


async def test_errors_have_the_status_names(gateway: Gateway) -> None:
    rollout_id, key = await gateway.start_rollout()
    client = sdk(gateway, key)
    long = types.UserContent("x y z " * 1000)
    for call in (ask, streamed):
        with pytest.raises(errors.ClientError) as caught:
            await call(client, long)
        assert (caught.value.code, caught.value.status) == (400, "INVALID_ARGUMENT")
        assert "maximum context length is 2000 tokens" in str(caught.value.message)
    with pytest.raises(errors.ClientError, match="cachedContent is not supported"):
        await ask(client, USER, types.GenerateContentConfig(cached_content="cachedContents/1"))
    with pytest.raises(errors.ClientError, match="401 UNAUTHENTICATED"):
        await ask(sdk(gateway, "nonsense"), USER)
    with pytest.raises(errors.ClientError, match="404 NOT_FOUND"):
        await client.aio.models.embed_content(model="policy", contents="x")
    await gateway.client.exit(rollout_id, 1, exit_code=0, timed_out=False, reason=None)
    with pytest.raises(errors.ClientError, match="403 PERMISSION_DENIED"):
        await ask(client, USER)
    assert gateway.engine.requests == []


async def test_counts_and_models(gateway: Gateway) -> None:
    rollout_id, key = await gateway.start_rollout()
    client = sdk(gateway, key)
    counted = await client.aio.models.count_tokens(model="policy", contents=USER)
    assert counted.total_tokens == len(gateway.renderer.render([{"role": "user", "content": "hello"}], []))
    assert [model.name async for model in await client.aio.models.list()] == ["models/policy"]
    assert await gateway.turns(rollout_id) == []


@pytest.mark.parametrize("prefix", ["/v1beta", "/v1", "/rollouts/{}/v1beta"])
async def test_a_stream_without_events_is_a_list(gateway: Gateway, prefix: str) -> None:
    rollout_id, key = await gateway.start_rollout()
    body = {"contents": [{"parts": [{"text": "hi"}]}]}
    async with aiohttp.ClientSession(headers={"x-goog-api-key": key}) as session:
        url = f"{gateway.url}{prefix.format(rollout_id)}/models/org/name"
        async with session.post(f"{url}:streamGenerateContent", json=body) as response:
            assert response.content_type == "application/json"
            (chunk,) = await response.json()
        async with session.post(f"{url}:countTokens", json={"generateContentRequest": body}) as response:
            assert (await response.json())["totalTokens"] > 5
    assert chunk["candidates"][0]["content"]["parts"] == [{"text": "reply 1"}]


async def test_training_overrides_and_evaluation_keeps_the_sampling(gateway: Gateway) -> None:
    config = types.GenerateContentConfig(temperature=0.2, top_p=0.5, top_k=5, seed=3)
    for kind, expected in (("train", (1.0, 1.0, 0, None)), ("eval", (0.2, 0.5, 5, 3))):
        _, key = await gateway.start_rollout(kind=kind)
        await ask(sdk(gateway, key), USER, config)
        request = gateway.engine.requests[-1]
        assert (request.temperature, request.top_p, request.top_k, request.seed) == expected
