"""Custom tools of chat completions, through the official SDK: offered, called with plain text, continued."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from leyden.types import Json
from tests.gateway.conftest import Gateway
from tests.gateway.test_chat import sdk
from tests.gateway.test_responses_tools import PATCH, called

GRAMMAR = {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: /.+/"}}
TOOLS: list[Any] = [
    {"type": "custom", "custom": {"name": "apply_patch", "description": "Edit files.", "format": GRAMMAR}},
    {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}},
]
CALLS: dict[str, tuple[str, Json]] = {
    "its input": (
        called("apply_patch", {"input": PATCH}),
        {"type": "custom", "custom": {"name": "apply_patch", "input": PATCH}},
    ),
    "other arguments": (
        called("apply_patch", {"patch": "x"}),
        {"type": "custom", "custom": {"name": "apply_patch", "input": '{"patch":"x"}'}},
    ),
    "a function beside it": (
        called("find", {"q": 1}),
        {"type": "function", "function": {"name": "find", "arguments": '{"q":1}'}},
    ),
}


async def asked(client: openai.AsyncOpenAI, messages: list[Any], *, stream: bool, **options: Any) -> Json:
    """The assistant message, as a harness keeps it."""
    options = {"model": "m", "messages": messages, "tools": TOOLS} | options
    if not stream:
        answer = await client.chat.completions.create(**options)
        return dict(answer.choices[0].message.model_dump(exclude_none=True))
    calls: list[Json] = []
    content = ""
    async for chunk in await client.chat.completions.create(**options, stream=True):
        delta = chunk.choices[0].delta
        content += delta.content or ""
        calls += [call.model_dump(exclude_none=True, exclude={"index"}) for call in delta.tool_calls or ()]
    return {"role": "assistant", "content": content} | ({"tool_calls": calls} if calls else {})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", CALLS)
async def test_a_call_is_answered_with_its_input_and_continued(gateway: Gateway, name: str, stream: bool) -> None:
    text, expected = CALLS[name]
    gateway.engine.replies = [text, "done"]
    rollout_id, key = await gateway.start_rollout()
    client = sdk(gateway, key)
    user = {"role": "user", "content": "fix it"}
    message = await asked(client, [user], stream=stream)
    (call,) = message["tool_calls"]
    assert {field: call[field] for field in expected} == expected
    result = {"role": "tool", "tool_call_id": call["id"], "content": "ok"}
    await asked(client, [user, message, result], stream=stream)
    one, two = await gateway.turns(rollout_id)
    assert (two.parent_id, two.fork_cause) == (one.turn_id, None)
    assert "<tool_response>\nok\n</tool_response>" in gateway.renderer.decode(two.delta_P)


async def test_the_model_is_shown_the_tool_and_its_grammar(gateway: Gateway) -> None:
    _, key = await gateway.start_rollout()
    await asked(sdk(gateway, key), [{"role": "user", "content": "hi"}], stream=False)
    shown = gateway.renderer.decode(gateway.engine.requests[0].prompt_ids)
    assert '"name": "apply_patch"' in shown
    assert "start: /.+/" in shown
    assert await gateway.client.unmet() == {"tools.grammar": 1}


async def test_calls_of_a_tool_that_is_not_allowed_are_text(gateway: Gateway) -> None:
    gateway.engine.replies = [CALLS["its input"][0]]
    _, key = await gateway.start_rollout()
    choice = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "find"}}]}
    message = await asked(
        sdk(gateway, key),
        [{"role": "user", "content": "hi"}],
        stream=False,
        tool_choice={"type": "allowed_tools", "allowed_tools": choice},
    )
    assert "tool_calls" not in message
    choice["tools"] = [{"type": "custom", "custom": {"name": "apply_patch"}}]
    gateway.engine.replies = [CALLS["its input"][0]]
    message = await asked(
        sdk(gateway, key),
        [{"role": "user", "content": "hi again"}],
        stream=False,
        tool_choice={"type": "allowed_tools", "allowed_tools": choice},
    )
    assert message["tool_calls"][0]["custom"]["input"] == PATCH


@pytest.mark.parametrize(
    ("tool", "words"),
    [
        ({"type": "custom"}, "tools[0].custom is missing"),
        ({"type": "custom", "custom": {}}, "tools[0].custom.name is missing"),
        ({"type": "custom", "custom": {"name": "f", "format": "text"}}, "tools[0].custom.format is a string"),
    ],
)
async def test_a_custom_tool_that_is_none(gateway: Gateway, tool: Json, words: str) -> None:
    _, key = await gateway.start_rollout()
    with pytest.raises(openai.BadRequestError) as caught:
        await asked(sdk(gateway, key), [{"role": "user", "content": "hi"}], stream=False, tools=[tool])
    assert words in caught.value.message
