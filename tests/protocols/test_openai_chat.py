from __future__ import annotations

import inspect
from typing import Any

import orjson
import pytest
from openai.resources.chat.completions import Completions

from leyden.errors import RequestError
from leyden.protocols import ChatChoice, ChatReply, ChatRequest, openai_chat
from leyden.protocols.fields import FIELDS, FieldClass, check_fields
from leyden.types import FinishReason
from tests.protocols.calls import NO_CALL

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"x": 1, "é": "好"}}}

REQUEST = ChatRequest("m", include_usage=True)


def parse(document: dict[str, Any]) -> ChatRequest:
    return openai_chat.parse(document, NO_CALL)


def body(**changes: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": "hi"}], **changes}


def reply(message: dict[str, Any], finish: FinishReason = FinishReason.STOP) -> ChatReply:
    return ChatReply(7, "policy", 123, 10, [ChatChoice({"role": "assistant", **message}, finish, 5)])


def test_messages_are_normalised() -> None:
    request = parse(
        body(
            messages=[
                {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
                {"role": "user", "content": "hi", "name": "ann"},
                {
                    "role": "assistant",
                    "content": None,
                    "reasoning": "r",
                    "tool_calls": [
                        {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}},
                        {"id": "2", "type": "function", "function": {"name": "g", "arguments": '{"a": '}},
                    ],
                },
                {"role": "tool", "tool_call_id": "1", "content": "out"},
            ]
        )
    )
    assert request.messages == [
        {"role": "system", "content": "ab"},
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "r",
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}},
                {"id": "2", "type": "function", "function": {"name": "g", "arguments": '{"a": '}},
            ],
        },
        {"role": "tool", "content": "out", "tool_call_id": "1"},
    ]


def test_old_and_odd_messages() -> None:
    """Both names of reasoning. Calls and results of the time before tools; refusals; no arguments at all."""
    request = parse(
        body(
            messages=[
                {"role": "assistant", "content": None, "refusal": "no", "reasoning_content": "a", "reasoning": "b"},
                {"role": "assistant", "content": [{"type": "refusal", "refusal": "never"}], "reasoning_content": None},
                {"role": "assistant", "content": "", "function_call": {"name": "f", "arguments": '{"x": 1}'}},
                {"role": "function", "name": "f", "content": "out"},
                {"role": "assistant", "tool_calls": [{"function": {"name": "g", "arguments": ""}}, _call({"y": 2})]},
                {"role": "tool", "name": "g", "tool_call_id": "c1", "content": [{"type": "text", "text": "done"}]},
            ]
        )
    )
    assert request.messages == [
        {"role": "assistant", "content": "no", "reasoning_content": "a"},
        {"role": "assistant", "content": "never"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}],
        },
        {"role": "tool", "content": "out", "name": "f"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"type": "function", "function": {"name": "g", "arguments": {}}},
                {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"y": 2}}},
            ],
        },
        {"role": "tool", "content": "done", "tool_call_id": "c1", "name": "g"},
    ]


def _call(arguments: Any) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"role": "robot"}, "messages[0].role is 'robot'"),
        ({"role": "user", "content": 5}, "messages[0].content is a number"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "parts of type text and image_url"),
        ({"role": "system", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}, "of type text"),
        ({"role": "assistant", "tool_calls": [_call(["x"])]}, "tool_calls[0].function.arguments is a list"),
        ({"role": "assistant", "tool_calls": [{"id": "c1"}]}, "tool_calls[0] has no function with a name"),
        ({"role": "assistant", "function_call": "f"}, "messages[0].function_call has no function with a name"),
    ],
)
def test_messages_that_are_none(message: dict[str, Any], expected: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse(body(messages=[message]))
    assert expected in str(caught.value)


@pytest.mark.parametrize("function", [{"name": 1}, {"name": "f", "parameters": []}, {"name": "f", "description": {}}])
def test_tools_that_are_none(function: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=r"tools\[0\]"):
        parse(body(tools=[{"type": "function", "function": function}]))


def test_the_table_knows_all_that_the_sdk_can_send() -> None:
    about_http = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
    assert set(inspect.signature(Completions.create).parameters) - about_http <= set(FIELDS["openai-chat"])


def test_every_field_has_its_class() -> None:
    """Honoured and overridden fields are silent, ignored ones are named, refused ones raise."""
    for name, kind in FIELDS["openai-chat"].items():
        if kind is FieldClass.REFUSED:
            with pytest.raises(RequestError, match=name) as caught:
                check_fields("openai-chat", {name: {"x": 1}})
            assert (caught.value.param, caught.value.status) == (name, 400)
        else:
            expected = (name,) if kind is FieldClass.IGNORED else ()
            assert check_fields("openai-chat", {name: "x"}) == expected
    assert check_fields("openai-chat", {"brand_new": 1, "metadata": None}) == ("brand_new",)


def test_limits_and_stop() -> None:
    request = parse(body(max_tokens=5, max_completion_tokens=9, stop=["a", "b"], temperature=0, top_k=-1))
    assert (request.max_tokens, request.stop, request.sampling.temperature) == (9, ("a", "b"), 0.0)
    with pytest.raises(RequestError, match="temperature is 3; allowed is 0 to 2"):
        parse(body(temperature=3))
    with pytest.raises(RequestError, match="max_tokens is a boolean; send an integer"):
        parse(body(max_tokens=True))


def test_the_key_leaves_out_the_stream_flags_alone() -> None:
    plain = parse(body())
    assert plain.key() == parse(body(stream=True, stream_options={"include_usage": True})).key()
    assert plain.key() != parse(body(seed=1)).key()
    assert plain.key() != parse(body(n=2)).key()


def test_plain_reply() -> None:
    answer = openai_chat.reply(reply({"content": "", "reasoning_content": "r", "tool_calls": [CALL]}), REQUEST)
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {
                "role": "assistant",
                "refusal": None,
                "content": None,
                "reasoning_content": "r",
                "tool_calls": [
                    {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x":1,"é":"好"}'}}
                ],
            },
            "logprobs": None,
            "finish_reason": "tool_calls",
        }
    ]
    assert answer["usage"] == {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
    assert (answer["id"], answer["object"], answer["created"], answer["model"]) == (
        "chatcmpl-7",
        "chat.completion",
        123,
        "policy",
    )


def test_a_cut_reply_says_length_even_with_tool_calls() -> None:
    answer = openai_chat.reply(reply({"content": "", "tool_calls": [CALL]}, FinishReason.LENGTH), REQUEST)
    assert answer["choices"][0]["finish_reason"] == "length"


def test_stream_events() -> None:
    events = list(openai_chat.stream(reply({"content": "hi", "tool_calls": [CALL, CALL]}), REQUEST))
    assert events[-1] == b"data: [DONE]\n\n"
    chunks = [orjson.loads(event.removeprefix(b"data: ")) for event in events[:-1]]
    assert all(chunk["id"] == "chatcmpl-7" and chunk["object"] == "chat.completion.chunk" for chunk in chunks)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert deltas[1] == {"content": "hi"}
    assert [d["tool_calls"][0]["index"] for d in deltas[2:4]] == [0, 1]
    assert chunks[-2]["choices"][0]["finish_reason"] == "tool_calls"
    assert (chunks[-1]["choices"], chunks[-1]["usage"]["completion_tokens"]) == ([], 5)
