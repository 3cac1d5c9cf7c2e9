"""A conversation that ends with the assistant is refused: the reply would not be what was asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from leyden.types import Json
from tests.gateway.conftest import Gateway, serving
from tests.gateway.fake_vllm import FakeVllm, chatted, listening
from tests.gateway.test_bad_input import CHAT, GEMINI, post
from tests.gateway.test_chat import USER
from tests.gateway.test_engines import config_for
from tests.gateway.test_reading import MESSAGES, RESPONSES, SERVED

SAID = {"role": "assistant", "content": "The answer is"}
CALLED = {"type": "function_call", "call_id": "c", "name": "bash", "arguments": "{}"}
ENDINGS: dict[str, list[Json]] = {
    CHAT: [
        {"messages": [USER, SAID]},
        {"messages": [USER, {"role": "assistant", "content": ""}]},
        {"messages": [USER, SAID | {"prefix": True}]},
        {"messages": [USER, {"role": "assistant", "content": None, "reasoning_content": "hm"}]},
    ],
    RESPONSES: [
        {"input": [USER, SAID]},
        {"input": [USER, CALLED]},
        {"input": [USER, {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}]},
    ],
    MESSAGES: [
        {"max_tokens": 9, "messages": [USER, SAID]},
        {"max_tokens": 9, "messages": [USER, {"role": "assistant", "content": [{"type": "text", "text": "{"}]}]},
    ],
    GEMINI: [
        {"contents": [{"parts": [{"text": "hello"}]}, {"role": "model", "parts": [{"text": "The answer is"}]}]},
        {"contents": [{"parts": [{"text": "x"}]}, {"role": "model", "parts": [{"functionCall": {"name": "bash"}}]}]},
    ],
}
NAMED = {CHAT: "messages", RESPONSES: "input", MESSAGES: "messages", GEMINI: "contents"}


def text_of(answer: Json) -> str:
    return str(answer["error"]["message"])


@pytest.mark.parametrize("path", SERVED)
async def test_a_conversation_that_ends_with_the_assistant(gateway: Gateway, path: str) -> None:
    rollout_id, key = await gateway.start_rollout()
    for ending in ENDINGS[path]:
        status, answer = await post(gateway, key, path, {"model": "m", **ending})
        assert status == 400
        assert text_of(answer).startswith(f"{NAMED[path]} ends with a message of the assistant")
    assert gateway.engine.requests == []
    assert await gateway.turns(rollout_id) == []


@pytest.mark.parametrize("path", SERVED)
async def test_it_is_refused_where_the_engine_renders(tmp_path: Path, path: str) -> None:
    async with listening(FakeVllm(default=chatted([1], [4]))) as vllm:
        config = config_for(tmp_path, Path("/nowhere/model"), vllm, engine={"render": "engine"})
        async with serving(config, None) as gateway:  # type: ignore[arg-type]
            _, key = await gateway.start_rollout()
            status, _ = await post(gateway, key, path, {"model": "m", **ENDINGS[path][0]})
            assert (status, vllm.asked) == (400, [])


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
@pytest.mark.parametrize(
    ("name", "asked", "harmless"), [("continue_final_message", True, False), ("add_generation_prompt", False, True)]
)
async def test_fields_that_ask_for_it(gateway: Gateway, path: str, name: str, asked: bool, harmless: bool) -> None:
    _, key = await gateway.start_rollout()
    body = {"model": "m", **ENDINGS[path][0]}
    listed = NAMED[path]
    body[listed] = [USER]
    status, answer = await post(gateway, key, path, body | {name: asked})
    assert status == 400
    assert name in text_of(answer)
    assert (await post(gateway, key, path, body | {name: harmless}))[0] == 200


async def test_what_is_only_counted_may_end_so(gateway: Gateway) -> None:
    _, key = await gateway.start_rollout()
    status, answer = await post(gateway, key, f"{MESSAGES}/count_tokens", {"model": "m", "messages": [USER, SAID]})
    assert status == 200
    assert answer["input_tokens"] > 0
