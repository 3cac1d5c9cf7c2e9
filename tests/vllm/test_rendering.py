"""Prompts and replies: the gateway's renderer beside vLLM's chat template and parsers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from leyden.gateway.render import ModelRenderer
from tests.gateway.test_chat import BASH, SYSTEM, USER, call, sdk
from tests.vllm.conftest import Weights
from tests.vllm.server import Vllm
from tests.vllm.test_recording import gateway_to

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

CALL = {"id": "call_1", "type": "function", "function": {"name": "bash", "arguments": '{"command": "echo é \\"q\\""}'}}
ASSISTANT_CALLS = {"role": "assistant", "content": "look", "tool_calls": [CALL, CALL | {"id": "call_2"}]}
RESULTS = [{"role": "tool", "tool_call_id": f"call_{i}", "content": f"out {i}\n"} for i in (1, 2)]
REASONED = {"role": "assistant", "content": "so", "reasoning_content": "a thought"}
CONVERSATIONS = {
    "one message": ([USER], []),
    "system and tools": ([SYSTEM, USER], [BASH]),
    "tools alone": ([USER], [BASH]),
    "two calls and their results": ([SYSTEM, USER, ASSISTANT_CALLS, *RESULTS], [BASH]),
    "after the results": ([USER, ASSISTANT_CALLS, *RESULTS, {"role": "assistant", "content": "done"}, USER], [BASH]),
    "a call without words": ([USER, ASSISTANT_CALLS | {"content": ""}, *RESULTS], [BASH]),
    "reasoning of this query": ([USER, REASONED | {"tool_calls": [CALL]}, RESULTS[0]], [BASH]),
    "reasoning of an earlier query": ([USER, REASONED, USER], []),
    "parts": ([{"role": "user", "content": [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]}], []),
}


async def test_both_ways_in_show_the_model_the_same_ids(
    tmp_path: Path, weights: Weights, renderer: ModelRenderer, vllm: Vllm
) -> None:
    """vLLM's chat template and the gateway's renderer, on each conversation from its beginning."""
    prompts: dict[str, dict[str, list[int]]] = {}
    for render in ("gateway", "engine"):
        folder = tmp_path / render
        folder.mkdir()
        async with gateway_to(folder, weights, renderer, vllm.url, engine={"render": render}) as gateway:
            for name, (messages, tools) in CONVERSATIONS.items():
                rollout_id, key = await gateway.start_rollout()
                await call(sdk(gateway, key), messages, max_tokens=1, **({"tools": tools} if tools else {}))
                (turn,) = await gateway.turns(rollout_id)
                prompts.setdefault(name, {})[render] = turn.delta_P.tolist()
    decoded = {name: {render: renderer.decode(ids) for render, ids in both.items()} for name, both in prompts.items()}
    assert {name: both["engine"] for name, both in decoded.items()} == {
        name: both["gateway"] for name, both in decoded.items()
    }
    assert all(both["engine"] == both["gateway"] for both in prompts.values())


def tool_call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


REPLIES = {
    "text": "just text",
    "odd blanks": "  two  blanks \n\n and lines\n",
    "one call": tool_call("bash", '{"command": "ls -la"}'),
    "text and a call": "I look.\n" + tool_call("bash", '{"command": "ls"}'),
    "two calls": tool_call("bash", '{"command": "ls"}') + "\n" + tool_call("bash", '{"command": "pwd"}'),
    "nested arguments": tool_call("bash", '{"command": "x", "options": {"a": [1, 2.5, null, true], "b": {}}}'),
    "escapes": tool_call("bash", '{"command": "printf \\"é\\\\n\\" | tee /tmp/x"}'),
    "no arguments": tool_call("bash", "{}"),
    "another tool": tool_call("search", '{"query": "fox"}'),
    "reasoning": "<think>\nhm, so\n</think>\n\nhello",
    "reasoning and a call": "<think>\nI must look\n</think>\n\n" + tool_call("bash", '{"command": "ls"}'),
    "reasoning, text and a call": "<think>\nhm\n</think>\n\nLooking.\n" + tool_call("bash", '{"command": "ls"}'),
}


@pytest.mark.parametrize("name", REPLIES)
async def test_replies_are_parsed_as_vllm_parses_them(vllm: Vllm, renderer: ModelRenderer, name: str) -> None:
    """The same ids to both: vLLM's derender route runs its own hermes and qwen3 parsers on them. (The stop token is no
    part of what vLLM's engine makes text of.)

    vLLM's qwen3 parser takes text without a thinking block for reasoning that was cut, unless thinking is off; the
    gateway goes by what was sampled.
    """
    thinking = {"enable_thinking": "<think>" in REPLIES[name]}
    ids = renderer.encode(REPLIES[name], add_special_tokens=False)
    ours = renderer.parse([*ids, renderer.stop_token_ids[0]], [1], [BASH], call_prefix="call_", stop_string=None)
    answer = await vllm.post(
        "/v1/chat/completions/derender",
        {
            "generate_response": {"choices": [{"index": 0, "token_ids": ids, "finish_reason": "stop"}]},
            "chat_request": {
                "messages": [USER],
                "tools": [BASH],
                "tool_choice": "auto",
                "chat_template_kwargs": thinking,
            },
        },
    )
    theirs = answer["choices"][0]["message"]
    assert calls_of(ours) == calls_of(theirs)
    assert (ours["content"] or "").strip() == (theirs["content"] or "").strip()
    assert ours.get("reasoning_content", "").strip() == (theirs.get("reasoning") or "").strip()


def calls_of(message: dict[str, Any]) -> list[tuple[str, Any]]:
    functions = [each["function"] for each in message.get("tool_calls") or []]
    return [
        (f["name"], json.loads(f["arguments"]) if isinstance(f["arguments"], str) else f["arguments"])
        for f in functions
    ]
