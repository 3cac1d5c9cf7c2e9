"""Custom tools and those of a namespace, through the official SDK: offered, called in their own items, continued."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from leyden.types import Json
from tests.gateway.conftest import Gateway
from tests.gateway.test_chat import sdk

PATCH = "*** Begin Patch\n*** Update File: a.py\n@@\n-1\n+2\n*** End Patch"
TOOLS: list[Any] = [
    {"type": "custom", "name": "apply_patch", "description": "Edit files."},
    {
        "type": "namespace",
        "name": "mcp__crm",
        "description": "Customers.",
        "tools": [
            {"type": "function", "name": "find", "parameters": {"type": "object"}},
            {"type": "custom", "name": "ask"},
        ],
    },
    {"type": "web_search"},
]


def called(name: str, arguments: Json) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


CALLS: dict[str, tuple[str, Json]] = {
    "custom": (
        called("apply_patch", {"input": PATCH}),
        {"type": "custom_tool_call", "name": "apply_patch", "input": PATCH},
    ),
    "custom, with other arguments": (
        called("apply_patch", {"patch": "x"}),
        {"type": "custom_tool_call", "name": "apply_patch", "input": '{"patch":"x"}'},
    ),
    "function of a namespace": (
        called("mcp__crm__find", {"q": 1}),
        {"type": "function_call", "name": "find", "namespace": "mcp__crm", "arguments": '{"q":1}'},
    ),
    "custom tool of a namespace": (
        called("mcp__crm__ask", {"input": "who?"}),
        {"type": "custom_tool_call", "name": "ask", "namespace": "mcp__crm", "input": "who?"},
    ),
    "unknown": (called("other", {}), {"type": "function_call", "name": "other", "arguments": "{}"}),
}


async def asked(client: openai.AsyncOpenAI, items: list[Any], *, stream: bool) -> list[Json]:
    """The output items."""
    options: Any = {"model": "m", "input": items, "tools": TOOLS, "store": False}
    if not stream:
        answer = await client.responses.create(**options)
        return [item.model_dump(exclude_none=True) for item in answer.output]
    done, inputs = [], ""
    async for event in await client.responses.create(**options, stream=True):
        if event.type == "response.custom_tool_call_input.delta":
            inputs += event.delta
        elif event.type == "response.output_item.done":
            done.append(event.item.model_dump(exclude_none=True))
    assert inputs == "".join(item.get("input", "") for item in done)
    return done


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("ids", [True, False], ids=["with ids", "without ids"])
@pytest.mark.parametrize("name", CALLS)
async def test_a_call_is_answered_in_its_own_item_and_continued(
    gateway: Gateway, name: str, ids: bool, stream: bool
) -> None:
    """Codex sends items without their ids."""
    text, expected = CALLS[name]
    gateway.engine.replies = [text, "done"]
    rollout_id, key = await gateway.start_rollout()
    client = sdk(gateway, key)
    user = {"role": "user", "content": "fix it"}
    (item,) = await asked(client, [user], stream=stream)
    assert {field: item.get(field) for field in expected} == expected
    assert item["id"].startswith("ctc_" if expected["type"] == "custom_tool_call" else "fc_")
    echoed = item if ids else {field: value for field, value in item.items() if field not in ("id", "status")}
    output = {"type": f"{expected['type']}_output", "call_id": item["call_id"], "output": "ok"}
    await asked(client, [user, echoed, output], stream=stream)
    one, two = await gateway.turns(rollout_id)
    assert (two.parent_id, two.fork_cause) == (one.turn_id, None)
    assert "<tool_response>\nok\n</tool_response>" in gateway.renderer.decode(two.delta_P)
    assert await gateway.client.unmet() == {"tools.web_search": 2}


async def test_the_model_is_shown_what_it_may_call(gateway: Gateway) -> None:
    _, key = await gateway.start_rollout()
    await asked(sdk(gateway, key), [{"role": "user", "content": "hi"}], stream=False)
    shown = gateway.renderer.decode(gateway.engine.requests[0].prompt_ids)
    for name in ("apply_patch", "mcp__crm__find", "mcp__crm__ask"):
        assert f'"name": "{name}"' in shown
    assert "web_search" not in shown
