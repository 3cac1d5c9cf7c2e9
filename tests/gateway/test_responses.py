"""The Responses protocol through the official SDK and a real socket: every way in which harnesses resend."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from leyden.errors import EngineRejected
from leyden.gateway.render import ModelRenderer
from leyden.types import FinishReason, Generation, VersionSpan
from tests.gateway.conftest import Gateway, make_config, serving

USER = {"role": "user", "content": "list the files"}
BASH = {
    "type": "function",
    "name": "bash",
    "description": "run",
    "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
    "strict": True,
}
CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
TURNS = [
    f"<think>\nA shell is needed.\n</think>\n\n  Let me.\n\n{CALL}\n{CALL}",
    CALL,
    "<think>\nAh.\n</think>\n\nDone.\n",
]


def sdk(gateway: Gateway, key: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=0)


async def call(client: openai.AsyncOpenAI, **fields: Any) -> Any:
    return await client.responses.create(model="any", **fields)


async def streamed(client: openai.AsyncOpenAI, **fields: Any) -> Any:
    """The final response that the SDK's own accumulator ends with."""
    async with client.responses.stream(model="any", **fields) as stream:
        async for _ in stream:
            pass
        return await stream.get_final_response()


def outputs(response: Any) -> list[Any]:
    """What a harness adds after running the tools."""
    return [
        {"type": "function_call_output", "call_id": item.call_id, "output": f"out {item.id}"}
        for item in response.output
        if item.type == "function_call"
    ]


async def check_one_chain(gateway: Gateway, rollout_id: str) -> None:
    """Each prompt is its parent's prompt, its sampled ids, and new ones."""
    turns = await gateway.turns(rollout_id)
    assert [turn.fork_cause for turn in turns] == [None] * len(turns)
    assert [turn.parent_id for turn in turns] == [None, *(turn.turn_id for turn in turns[:-1])]
    ids: list[int] = []
    for turn, request in zip(turns, gateway.engine.requests, strict=True):
        assert request.prompt_ids == [*ids, *turn.delta_P]
        ids = [*request.prompt_ids, *turn.sampled_T]


def whole(item: Any) -> Any:
    return item.model_dump(exclude_unset=True)


def as_the_ai_sdk(item: Any) -> Any:
    """Reasoning and text by reference; calls without their id, with arguments dumped anew."""
    if item.type != "function_call":
        return {"type": "item_reference", "id": item.id}
    arguments = item.arguments.replace(":", " : ")
    return {"type": "function_call", "call_id": item.call_id, "name": item.name, "arguments": arguments}


def without_text(item: Any) -> Any:
    return whole(item) | ({"summary": []} if item.type == "reasoning" else {})


def without_id(item: Any) -> Any:
    return {name: value for name, value in without_text(item).items() if name != "id"}


def all_references(item: Any) -> Any:
    return {"id": item.id}


@pytest.mark.parametrize("ask", [call, streamed])
@pytest.mark.parametrize("resend", [whole, as_the_ai_sdk, without_text, without_id, all_references])
async def test_a_resent_conversation_is_one_chain(gateway: Gateway, ask: Any, resend: Callable[[Any], Any]) -> None:
    gateway.engine.replies = [*TURNS]
    rollout_id, key = await gateway.start_rollout()
    client = sdk(gateway, key)
    history: list[Any] = [{"role": "developer", "content": "You run commands."}, USER]
    for expected in (["reasoning", "message", "function_call", "function_call"], ["function_call"]):
        response = await ask(client, input=history, tools=[BASH])
        assert [item.type for item in response.output] == expected
        history += [*(resend(item) for item in response.output), *outputs(response)]
    last = await ask(client, input=history, tools=[BASH])
    assert (last.output_text, last.status, last.output[0].summary[0].text) == ("Done.", "completed", "Ah.")
    await check_one_chain(gateway, rollout_id)


@pytest.mark.parametrize("ask", [call, streamed])
async def test_previous_response_id_is_one_chain(gateway: Gateway, ask: Any) -> None:
    """The same instructions each time, as openai-agents does; without them they are gone, as OpenAI has it."""
    gateway.engine.replies = [*TURNS, "again"]
    rollout_id, key = await gateway.start_rollout()
    client = sdk(gateway, key)
    first = await ask(client, input="list the files", instructions="Be brief.", tools=[BASH])
    second = await ask(
        client, input=outputs(first), previous_response_id=first.id, instructions="Be brief.", tools=[BASH]
    )
    third = await ask(
        client, input=outputs(second), previous_response_id=second.id, instructions="Be brief.", tools=[BASH]
    )
    assert (third.previous_response_id, third.output_text) == (second.id, "Done.")
    await check_one_chain(gateway, rollout_id)
    await ask(client, input=outputs(second), previous_response_id=second.id, tools=[BASH])
    *_, forked = await gateway.turns(rollout_id)
    assert (forked.parent_id, forked.fork_cause) == (None, "history_rewritten")
    assert "Be brief." not in gateway.renderer.decode(forked.delta_P)
    assert "list the files" in gateway.renderer.decode(forked.delta_P)


async def test_text_turns_continue_without_reasoning(gateway: Gateway) -> None:
    rollout_id, key = await gateway.start_rollout()
    client = sdk(gateway, key)
    first = await call(client, input="hello", instructions="Be brief.")
    assert (first.output_text, first.id) == ("reply 1", f"resp_{(await gateway.turns(rollout_id))[0].turn_id}")
    await call(client, input="more", instructions="Be brief.", previous_response_id=first.id)
    await check_one_chain(gateway, rollout_id)
    decoded = [gateway.renderer.decode(turn.delta_P) for turn in await gateway.turns(rollout_id)]
    assert decoded == [
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n",
        "\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n",
    ]


async def test_what_codex_sends(gateway: Gateway) -> None:
    gateway.engine.replies = [*TURNS]
    rollout_id, key = await gateway.start_rollout()
    client = sdk(gateway, key)
    fields: Any = {
        "tools": [
            BASH,
            {"type": "namespace", "name": "mcp", "description": "d", "tools": [BASH]},
            {"type": "web_search", "external_web_access": False},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "k",
        "extra_body": {"client_metadata": {"x": "y"}},
    }
    history: list[Any] = [
        *(
            {"type": "message", "role": role, "content": [{"type": "input_text", "text": role}]}
            for role in ["developer"] * 2
        ),
        *(
            {"type": "message", "role": role, "content": [{"type": "input_text", "text": role}]}
            for role in ["user"] * 2
        ),
    ]
    for _ in range(2):
        response = await streamed(client, input=history, **fields)
        assert (response.store, response.reasoning.summary, response.tools[2].type) == (False, "auto", "web_search")
        history += [*map(whole, response.output), *outputs(response)]
    last = await streamed(client, input=history, **fields)
    await check_one_chain(gateway, rollout_id)
    prompt = gateway.renderer.decode(gateway.engine.requests[0].prompt_ids)
    assert prompt.count('"name": "bash"') == 1
    assert ("namespace" in prompt, "web_search" in prompt, prompt.count("<|im_start|>")) == (False, False, 5)
    with pytest.raises(openai.BadRequestError) as caught:
        await call(client, input="more", previous_response_id=last.id)
    assert caught.value.code == "previous_response_not_found"


async def test_the_stream_says_the_same_as_the_plain_answer(gateway: Gateway) -> None:
    gateway.engine.replies = [TURNS[0], TURNS[0]]
    rollout_id, key = await gateway.start_rollout()
    client = sdk(gateway, key)
    plain = await call(client, input=[USER], tools=[BASH])
    stream = await call(client, input=[USER], tools=[BASH], stream=True)
    events = [event async for event in stream]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    reasoning = "".join(event.delta for event in events if event.type == "response.reasoning_summary_text.delta")
    arguments = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert (text, reasoning, arguments) == ("Let me.", "A shell is needed.", ['{"command":"ls"}'] * 2)
    final = events[-1].response.model_dump(exclude={"id", "output", "created_at", "completed_at"})
    assert final == plain.model_dump(exclude={"id", "output", "created_at", "completed_at"})
    one, two = await gateway.turns(rollout_id)
    assert one.sampled_T.tolist() == two.sampled_T.tolist()


async def test_reasoning_that_the_harness_drops_is_named(gateway: Gateway) -> None:
    gateway.engine.replies = [*TURNS]
    rollout_id, key = await gateway.start_rollout()
    client = sdk(gateway, key)
    first = await call(client, input=[USER], tools=[BASH])
    kept = [whole(item) for item in first.output if item.type != "reasoning"]
    await call(client, input=[USER, *kept, *outputs(first)], tools=[BASH])
    assert [turn.fork_cause for turn in await gateway.turns(rollout_id)] == [None, "reasoning_dropped_by_harness"]


async def test_a_conversation_goes_on_after_a_cut_answer(gateway: Gateway) -> None:
    """The cut reply stays a message of its own, so the third call continues the second."""
    ids = gateway.engine.ids("cut here")
    cut = Generation(ids, [-0.5] * len(ids), FinishReason.LENGTH, (VersionSpan(0, len(ids)),))
    gateway.engine.replies = [cut, "and on", "end"]
    rollout_id, key = await gateway.start_rollout()
    client = sdk(gateway, key)
    first = await call(client, input=[USER], max_output_tokens=2)
    assert (first.status, first.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (first.output[0].status, first.usage.output_tokens) == ("incomplete", len(ids))
    assert gateway.engine.requests[0].max_tokens == 2
    with pytest.raises(openai.BadRequestError, match="input ends with a message of the assistant"):
        await call(client, input=[USER, *map(whole, first.output)])
    history = [USER, *map(whole, first.output), USER]
    second = await call(client, input=history)
    await call(client, input=[*history, *map(whole, second.output), USER])
    turns = await gateway.turns(rollout_id)
    assert (turns[2].parent_id, turns[2].fork_cause) == (turns[1].turn_id, None)


async def test_keep_alives_before_the_first_event(
    tmp_path: Path, tokenizer_path: Path, renderer: ModelRenderer
) -> None:
    async with serving(make_config(tmp_path, tokenizer_path), renderer, keep_alive_s=0.05) as gateway:
        gateway.engine.before = gateway.kept_alive
        _, key = await gateway.start_rollout()
        client = sdk(gateway, key)
        assert (await streamed(client, input="hi")).output_text == "reply 1"
        assert (await call(client, input="hi again")).output_text == "reply 2"


async def test_errors_have_openais_shape(gateway: Gateway) -> None:
    rollout_id, key = await gateway.start_rollout()
    client = sdk(gateway, key)
    with pytest.raises(openai.BadRequestError, match="background is not supported") as bad:
        await call(client, input="hi", background=True)
    assert (bad.value.param, bad.value.code, bad.value.type) == (
        *("background", "unsupported_parameter"),
        "invalid_request_error",
    )
    with pytest.raises(openai.NotFoundError, match="Item with id 'rs_77' not found"):
        await call(client, input=[{"type": "item_reference", "id": "rs_77"}])
    with pytest.raises(openai.BadRequestError, match="maximum context length is 2000 tokens") as long:
        await call(client, input="word " * 4000, stream=True)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.AuthenticationError):
        await call(sdk(gateway, "forged"), input="hi")
    other = openai.AsyncOpenAI(base_url=f"{gateway.url}/rollouts/other/v1", api_key=key)
    with pytest.raises(openai.PermissionDeniedError):
        await call(other, input="hi")
    own = openai.AsyncOpenAI(base_url=f"{gateway.url}/rollouts/{rollout_id}/v1", api_key=key)
    assert (await call(own, input="hi")).status == "completed"
    with pytest.raises(openai.NotFoundError, match="is not served here"):
        await client.responses.retrieve("resp_1")


async def test_an_error_after_the_stream_has_begun(
    tmp_path: Path, tokenizer_path: Path, renderer: ModelRenderer
) -> None:
    async with serving(make_config(tmp_path, tokenizer_path), renderer, keep_alive_s=0.05) as gateway:
        gateway.engine.before, gateway.engine.replies = gateway.kept_alive, [EngineRejected("no room")] * 2
        _, key = await gateway.start_rollout()
        client = sdk(gateway, key)
        for ask in (streamed, lambda c, **f: call(c, stream=True, **f)):
            with pytest.raises(openai.APIError, match="no room"):
                stream = await ask(client, input="hi")
                async for _ in stream:
                    pass


async def test_another_attempt_cannot_be_recalled(gateway: Gateway) -> None:
    gateway.engine.replies = [*TURNS]
    _, key = await gateway.start_rollout()
    first = await call(sdk(gateway, key), input=[USER], tools=[BASH])
    _, other = await gateway.start_rollout()
    with pytest.raises(openai.NotFoundError):
        await call(sdk(gateway, other), input=[{"type": "item_reference", "id": first.output[0].id}])
    with pytest.raises(openai.BadRequestError, match="no such response"):
        await call(sdk(gateway, other), input="hi", previous_response_id=first.id)


async def test_a_restarted_gateway_still_knows_its_responses(
    tmp_path: Path, tokenizer_path: Path, renderer: ModelRenderer
) -> None:
    config = make_config(tmp_path, tokenizer_path)
    async with serving(config, renderer) as gateway:
        gateway.engine.replies = [*TURNS[:2]]
        rollout_id, key = await gateway.start_rollout()
        first = await call(sdk(gateway, key), input=[USER], tools=[BASH])
        second = await call(sdk(gateway, key), input=outputs(first), previous_response_id=first.id, tools=[BASH])
    async with serving(config, renderer) as gateway:
        await call(sdk(gateway, key), input=outputs(second), previous_response_id=second.id, tools=[BASH])
        turns = await gateway.turns(rollout_id)
        assert [turn.parent_id for turn in turns] == [None, turns[0].turn_id, turns[1].turn_id]
        assert [turn.fork_cause for turn in turns] == [None, None, None]
