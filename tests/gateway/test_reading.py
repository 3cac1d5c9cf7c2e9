"""How a reply is read from what was sampled, on every protocol: reasoning, and what a harness asks of tool calls."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from leyden.gateway.render import ModelRenderer
from leyden.types import Json
from tests.gateway.conftest import Gateway, make_config, serving
from tests.gateway.fake_vllm import FakeVllm, chatted, listening
from tests.gateway.test_bad_input import CHAT, GEMINI, RESENT, post
from tests.gateway.test_chat import BASH, USER
from tests.gateway.test_engines import config_for
from tests.qwen_speech import said
from tests.qwen_tokenizers import qwen_tokenizer_folder

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
SERVED = (CHAT, RESPONSES, MESSAGES, GEMINI)
STREAMED = {GEMINI: GEMINI.replace("generateContent", "streamGenerateContent") + "?alt=sse"}
READ = {**BASH, "function": {**BASH["function"], "name": "read"}}
TOOLS = [BASH, READ]
ASKED: dict[str, Json] = {
    CHAT: {"messages": [USER], "tools": TOOLS},
    RESPONSES: {"input": [USER], "tools": [{"type": "function", **tool["function"]} for tool in TOOLS]},
    MESSAGES: {
        "max_tokens": 1000,
        "messages": [USER],
        "tools": [{"name": tool["function"]["name"], "input_schema": {"type": "object"}} for tool in TOOLS],
    },
    GEMINI: {
        "contents": [{"parts": [{"text": "hello"}]}],
        "tools": [{"functionDeclarations": [{"name": tool["function"]["name"]} for tool in TOOLS]}],
    },
}
NO_CALLS: dict[str, Json] = {
    CHAT: {"tool_choice": "none"},
    RESPONSES: {"tool_choice": "none"},
    MESSAGES: {"tool_choice": {"type": "none"}},
    GEMINI: {"toolConfig": {"functionCallingConfig": {"mode": "NONE"}}},
}
ONLY_BASH: dict[str, Json] = {
    CHAT: {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [BASH]}}},
    RESPONSES: {
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "bash"}]}
    },
    GEMINI: {"tool_config": {"function_calling_config": {"mode": "VALIDATED", "allowed_function_names": ["bash"]}}},
}
ONE_CALL: dict[str, Json] = {
    CHAT: {"parallel_tool_calls": False},
    RESPONSES: {"parallel_tool_calls": False},
    MESSAGES: {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
}
CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "read", "arguments": {"command": "a"}}\n</tool_call>'


def _chat(answer: Json) -> tuple[str, list[str]]:
    message = answer["choices"][0]["message"]
    return message["content"] or "", [call["function"]["name"] for call in message.get("tool_calls", ())]


def _responses(answer: Json) -> tuple[str, list[str]]:
    items = answer["output"]
    texts = [part["text"] for item in items if item["type"] == "message" for part in item["content"]]
    return "".join(texts), [item["name"] for item in items if item["type"] == "function_call"]


def _messages(answer: Json) -> tuple[str, list[str]]:
    blocks = answer["content"]
    texts = [block["text"] for block in blocks if block["type"] == "text"]
    return "".join(texts), [block["name"] for block in blocks if block["type"] == "tool_use"]


def _gemini(answer: Json) -> tuple[str, list[str]]:
    parts = answer["candidates"][0]["content"]["parts"]
    texts = [part["text"] for part in parts if "text" in part and not part.get("thought")]
    return "".join(texts), [part["functionCall"]["name"] for part in parts if "functionCall" in part]


READ_FROM: dict[str, Callable[[Json], tuple[str, list[str]]]] = {
    CHAT: _chat,
    RESPONSES: _responses,
    MESSAGES: _messages,
    GEMINI: _gemini,
}


async def asked(gateway: Gateway, key: str, path: str, **fields: Any) -> Json:
    status, answer = await post(gateway, key, path, {"model": "m", **ASKED[path], **fields})
    assert status == 200, answer
    return answer


@pytest.mark.parametrize("path", SERVED)
@pytest.mark.parametrize("family", ["qwen3", "qwen3.5"])
@pytest.mark.parametrize("reasoning", ["", " ", "I add."])
async def test_an_empty_block_of_reasoning_is_no_content(
    tmp_path: Path, family: str, path: str, reasoning: str
) -> None:
    """The ids keep it, and the next turn goes on from them."""
    folder = qwen_tokenizer_folder(family)
    config = make_config(tmp_path, folder, model={"renderer": family})
    renderer = ModelRenderer(str(folder), family, "template")
    async with serving(config, renderer) as gateway:
        block = said(family, "54", reasoning=reasoning)
        gateway.engine.replies = [block, said(family, "55", reasoning="")]
        rollout_id, key = await gateway.start_rollout()
        answer = await asked(gateway, key, path)
        assert READ_FROM[path](answer) == ("54", [])
        name, again = RESENT[path](answer)
        await asked(gateway, key, path, **{name: [*ASKED[path][name], *again]})
        one, two = await gateway.turns(rollout_id)
        assert renderer.decode(one.sampled_T) == f"{block}<|im_end|>"
        if not reasoning.strip():
            assert (two.parent_id, two.fork_cause) == (one.turn_id, None)


@pytest.mark.parametrize("family", ["qwen3", "qwen3.5"])
@pytest.mark.parametrize("name", [None, "reasoning_content", "reasoning"])
async def test_a_reply_without_its_empty_reasoning_is_continued(tmp_path: Path, family: str, name: str | None) -> None:
    """Echoed as its text alone, or with a field of reasoning that is empty or blank."""
    folder = qwen_tokenizer_folder(family)
    config = make_config(tmp_path, folder, model={"renderer": family})
    async with serving(config, ModelRenderer(str(folder), family, "template")) as gateway:
        gateway.engine.replies = [said(family, "54", reasoning=""), said(family, "55", reasoning="")]
        rollout_id, key = await gateway.start_rollout()
        await asked(gateway, key, CHAT)
        for thought in ("", "\n"):
            echoed: Json = {"role": "assistant", "content": "54"} | ({name: thought} if name else {})
            await asked(gateway, key, CHAT, messages=[USER, echoed, USER])
        one, two, three = await gateway.turns(rollout_id)
        assert (two.parent_id, two.fork_cause) == (one.turn_id, None)
        assert three.parent_id == one.turn_id


@pytest.mark.parametrize(
    ("sampled", "content"),
    [
        ("<think>\n\n</think>\n\n54", "54"),
        ("<think></think>54", "54"),
        ("\n<think>\n</think>\n\n 54\n", "54"),
        ("<think>\n\n</think>", ""),
        ("<think>\n", ""),
        (" 54\n", " 54\n"),
        ("it is <think> 54 </think>", "it is <think> 54 </think>"),
        ("<think>\n\n</think>\n\n<tool_call>\n{", "<tool_call>\n{"),
        ("<think>\nhm\n</think>\n\nI say </think> and <tool_call>\n{", "I say </think> and <tool_call>\n{"),
    ],
)
async def test_content_without_reasoning(gateway: Gateway, sampled: str, content: str) -> None:
    gateway.engine.replies = [sampled]
    _, key = await gateway.start_rollout()
    assert _chat(await asked(gateway, key, CHAT)) == (content, [])


@pytest.mark.parametrize("path", SERVED)
@pytest.mark.parametrize("reasoning", ["", "<think>\nhm\n</think>\n\n", "<think>\n\n</think>\n\n"])
async def test_no_call_is_delivered_where_none_is_wanted(gateway: Gateway, path: str, reasoning: str) -> None:
    """Its text is, and the next turn goes on from it, whatever that one wants."""
    gateway.engine.replies = [f"{reasoning}I look.\n{CALL}", CALL]
    rollout_id, key = await gateway.start_rollout()
    answer = await asked(gateway, key, path, **NO_CALLS[path])
    assert READ_FROM[path](answer) == (f"I look.\n{CALL}", [])
    name, again = RESENT[path](answer)
    second = await asked(gateway, key, path, **{name: [*ASKED[path][name], *again]})
    assert READ_FROM[path](second) == ("", ["bash"])
    one, two = await gateway.turns(rollout_id)
    assert two.fork_cause == ("reasoning_dropped_by_template" if "hm" in reasoning else None)
    assert (two.parent_id == one.turn_id) == ("hm" not in reasoning)


@pytest.mark.parametrize("path", ONLY_BASH)
async def test_only_allowed_tools_are_called(gateway: Gateway, path: str) -> None:
    gateway.engine.replies = [CALL, OTHER, f"{CALL}\n{OTHER}"]
    _, key = await gateway.start_rollout()
    read = READ_FROM[path]
    assert read(await asked(gateway, key, path, **ONLY_BASH[path])) == ("", ["bash"])
    assert read(await asked(gateway, key, path, **ONLY_BASH[path])) == (OTHER, [])
    assert read(await asked(gateway, key, path, **ONLY_BASH[path])) == (f"{CALL}\n{OTHER}", [])


@pytest.mark.parametrize("path", ONE_CALL)
async def test_one_call_where_no_parallel_ones_are_wanted(gateway: Gateway, path: str) -> None:
    gateway.engine.replies = [f"{CALL}\n{OTHER}", f"{CALL}\n{OTHER}"]
    _, key = await gateway.start_rollout()
    assert READ_FROM[path](await asked(gateway, key, path)) == ("", ["bash", "read"])
    assert READ_FROM[path](await asked(gateway, key, path, **ONE_CALL[path])) == ("", ["bash"])


@pytest.mark.parametrize("path", SERVED)
async def test_tool_choice_where_the_engine_renders(tmp_path: Path, path: str) -> None:
    """It is told that no call is wanted; one that comes all the same, or what is none, is delivered as text."""
    async with listening(FakeVllm()) as vllm:
        config = config_for(tmp_path, Path("/nowhere/model"), vllm, engine={"render": "engine"})
        async with serving(config, None) as gateway:  # type: ignore[arg-type]
            call = {"id": "x", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}
            broken = {"id": "y", "type": "function", "function": {"name": "bash", "arguments": '"ls"'}}
            vllm.script = [
                chatted([1], [4], {"content": "text"}),
                chatted([2], [4], {"content": "I look.", "tool_calls": [call]}, finish_reason="tool_calls"),
                chatted([3], [4], {"content": None, "tool_calls": [broken]}, finish_reason="tool_calls"),
                chatted([4], [4], {"content": None, "tool_calls": [call, call]}, finish_reason="tool_calls"),
            ]
            _, key = await gateway.start_rollout()
            read = READ_FROM[path]
            assert read(await asked(gateway, key, path, **NO_CALLS[path])) == ("text", [])
            text = '{"name":"bash","arguments":{"command":"ls"}}'
            assert read(await asked(gateway, key, path, **NO_CALLS[path])) == (f"I look.\n{text}", [])
            assert read(await asked(gateway, key, path)) == (r'{"name":"bash","arguments":"\"ls\""}', [])
            one_call = ONE_CALL.get(path, {})
            assert read(await asked(gateway, key, path, **one_call)) == ("", ["bash"] * (1 if one_call else 2))
            assert [body["tool_choice"] for body in vllm.bodies] == ["none", "none", "auto", "auto"]
