"""What the official SDKs make of the streams, wherever these are cut."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import anthropic
import httpx2
import openai
import pytest

from leyden.protocols import ChatChoice, ChatReply, ChatRequest
from leyden.types import FinishReason, Json
from tests.gateway.sdk_calls import BY_NAME

CALLS = [
    {"id": f"call_7_{i}", "type": "function", "function": {"name": name, "arguments": {key: i + 1}}}
    for i, (name, key) in enumerate([("f", "x"), ("g", "y")])
]
REPLY = ChatReply(
    7,
    "policy",
    123,
    10,
    [
        ChatChoice(
            {"role": "assistant", "content": "Hel好🙂lo", "reasoning_content": "好🙂", "tool_calls": CALLS},
            FinishReason.STOP,
            2,
        )
    ],
)


class Pieces(httpx2.AsyncByteStream):
    def __init__(self, *pieces: bytes) -> None:
        self._pieces = pieces

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self._pieces:
            yield piece


def wire(name: str) -> bytes:
    """A streamed reply with the keep-alives that can come before it."""
    protocol = BY_NAME[name]
    request = ChatRequest("m", stream=True, include_usage=True, protocol=name)
    return protocol.KEEP_ALIVE * 2 + b"".join(protocol.stream(REPLY, request))


def client_for(*pieces: bytes) -> httpx2.AsyncClient:
    def answer(_request: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(200, headers={"content-type": "text/event-stream"}, stream=Pieces(*pieces))

    return httpx2.AsyncClient(transport=httpx2.MockTransport(answer))


async def openai_chat_says(http: httpx2.AsyncClient) -> Json:
    """What the SDK's own accumulator makes of a stream."""
    client = openai.AsyncOpenAI(base_url="http://test/v1", api_key="k", http_client=http)
    async with client.chat.completions.stream(model="m", messages=[], stream_options={"include_usage": True}) as stream:
        final = await stream.get_final_completion()
    choice = final.choices[0]
    assert final.usage is not None
    calls = [
        {"id": c.id, "name": c.function.name, "arguments": json.loads(c.function.arguments)}
        for c in choice.message.tool_calls or []
    ]
    reasoning = choice.message.model_extra or {}
    return {
        "text": choice.message.content,
        "reasoning": reasoning.get("reasoning_content"),
        "calls": calls,
        "finish": choice.finish_reason,
        "tokens": final.usage.completion_tokens,
    }


async def openai_responses_says(http: httpx2.AsyncClient) -> Json:
    client = openai.AsyncOpenAI(base_url="http://test/v1", api_key="k", http_client=http)
    async with client.responses.stream(model="m", input="x") as stream:
        final = await stream.get_final_response()
    thought, message, *calls = final.output
    return {
        "text": message.content[0].text,  # type: ignore[union-attr]
        "reasoning": thought.summary[0].text,  # type: ignore[union-attr]
        "calls": [{"id": c.call_id, "name": c.name, "arguments": json.loads(c.arguments)} for c in calls],  # type: ignore[union-attr]
        "finish": "tool_calls" if final.status == "completed" else final.status,
        "tokens": final.usage.output_tokens if final.usage else 0,
    }


async def anthropic_says(http: httpx2.AsyncClient) -> Json:
    client = anthropic.AsyncAnthropic(base_url="http://test", api_key="k", http_client=http)
    async with client.messages.stream(model="m", max_tokens=9, messages=[]) as stream:
        final = await stream.get_final_message()
    thought, text, *calls = final.content
    return {
        "text": text.text,  # type: ignore[union-attr]
        "reasoning": thought.thinking,  # type: ignore[union-attr]
        "calls": [{"id": c.id, "name": c.name, "arguments": c.input} for c in calls],  # type: ignore[union-attr]
        "finish": {"tool_use": "tool_calls"}.get(final.stop_reason or ""),
        "tokens": final.usage.output_tokens,
    }


SDKS: dict[str, Callable[[httpx2.AsyncClient], Any]] = {
    "openai-chat": openai_chat_says,
    "openai-responses": openai_responses_says,
    "anthropic-messages": anthropic_says,
}
EXPECTED = {
    "text": "Hel好🙂lo",
    "reasoning": "好🙂",
    "calls": [
        {"id": "call_7_0", "name": "f", "arguments": {"x": 1}},
        {"id": "call_7_1", "name": "g", "arguments": {"y": 2}},
    ],
    "finish": "tool_calls",
    "tokens": 2,
}


@pytest.mark.parametrize("name", SDKS)
async def test_the_official_sdk_assembles_what_was_said(name: str) -> None:
    """Keep-alives before the first event, a last frame with usage alone, two calls by index."""
    assert await SDKS[name](client_for(wire(name))) == EXPECTED
    if name == "openai-chat":
        frames = [json.loads(f.removeprefix("data: ")) for f in wire(name).decode().split("\n\n") if "data: {" in f]
        assert (frames[-1]["choices"], frames[-1]["usage"]["completion_tokens"]) == ([], 2)
        assert all(frame["choices"] and frame["usage"] is None for frame in frames[:-1])


@pytest.mark.parametrize("name", SDKS)
async def test_characters_may_be_cut_between_reads(name: str) -> None:
    """Around every multi-byte character the stream is split at every byte; the SDK reads the same."""
    stream = wire(name)
    for split in split_points(stream):
        assert await SDKS[name](client_for(stream[:split], stream[split:])) == EXPECTED, split
    assert await SDKS[name](client_for(*(stream[i : i + 1] for i in range(len(stream))))) == EXPECTED


def split_points(stream: bytes) -> Iterator[int]:
    """All offsets within the characters of more than one byte, and their ends."""
    return (i for i in range(1, len(stream)) if stream[i - 1] >= 0x80 or stream[i] >= 0x80)
