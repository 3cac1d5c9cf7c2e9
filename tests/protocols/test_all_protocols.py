"""What holds for every protocol that the gateway serves: no body breaks `parse`, and a stream says what a plain reply
says."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from leyden.errors import RequestError
from leyden.protocols import COUNT_ROUTES, ROUTES, Call, ChatChoice, ChatReply, ChatRequest
from leyden.protocols.chat import WireProtocol, digest
from leyden.protocols.checks import MAX_DEPTH, arguments_of, arguments_text, loads, sampled_arguments
from leyden.types import FinishReason, Json
from tests.protocols.bodies import VALID, VALUES, almost_valid, is_error
from tests.protocols.calls import Remembered

PROTOCOLS: dict[str, WireProtocol] = {protocol.PROTOCOL: protocol for _, protocol in ROUTES}
COUNTERS = {protocol.PROTOCOL: protocol for _, protocol in COUNT_ROUTES}
NAMES = sorted(PROTOCOLS)
ASSISTANT = {"role": "assistant", "content": "so", "reasoning_content": "hm", "tool_calls": []}
RECALL = Remembered({1: ASSISTANT}, {1: [{"role": "user", "content": "hi"}]})
CALL = Call({"model": "m", "method": "generateContent"}, RECALL)

QUICK = settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))


def answers_of(message: Json, finish: FinishReason = FinishReason.STOP, stop: str | None = None) -> ChatReply:
    return ChatReply(7, "policy", 123, 10, [ChatChoice({"role": "assistant", **message}, finish, 5, stop)])


def test_every_protocol_is_covered() -> None:
    assert set(NAMES) == set(VALID) == set(ASSEMBLE)


@pytest.mark.parametrize("name", NAMES)
def test_the_valid_body_is_valid(name: str) -> None:
    request = PROTOCOLS[name].parse(VALID[name], CALL)
    assert request.protocol == name
    assert request.prompt is not None or [m["role"] for m in request.messages][-1] == "tool"


@pytest.mark.parametrize("name", NAMES)
def test_no_body_breaks_parse(name: str) -> None:
    """A RequestError, or a request that all later stages can take."""

    @QUICK
    @given(almost_valid(VALID[name]) | VALUES.filter(lambda value: isinstance(value, dict)))
    def check(body: Any) -> None:
        read, _ = loads(json.dumps(body))
        for parse in [PROTOCOLS[name].parse, *([COUNTERS[name].parse_count] if name in COUNTERS else [])]:
            try:
                request = parse(read, CALL)
            except RequestError as error:
                assert 400 <= error.status < 500
                assert is_error(name, orjson.loads(orjson.dumps(PROTOCOLS[name].error(error))), error.status)
                continue
            request.key()
            digest([request.messages, request.tools])
            assert_shape(request)
            answer = answers_of({"content": "hi"})
            orjson.dumps(PROTOCOLS[name].reply(answer, request))
            b"".join(PROTOCOLS[name].stream(answer, request))

    check()


def assert_shape(request: ChatRequest) -> None:
    """What `protocols.chat` promises of messages and tools."""
    assert isinstance(request.model, str)
    for message in request.messages:
        assert message["role"] in ("system", "user", "assistant", "tool")
        assert isinstance(message["content"], str | list)
        assert isinstance(message.get("reasoning_content", ""), str)
        for call in message.get("tool_calls", ()):
            assert isinstance(call["function"]["name"], str)
            assert isinstance(call["function"]["arguments"], str | dict)
        if isinstance(message["content"], list):
            assert {part["type"] for part in message["content"]} <= {"text", "image_url"}
    for tool in request.tools:
        assert isinstance(tool["function"]["name"], str)
        assert isinstance(tool["function"].get("parameters"), dict | None)
        assert isinstance(tool["function"].get("description"), str | None)


OBJECTS = st.dictionaries(st.text(max_size=5), VALUES, max_size=3).map(json.dumps).map(sampled_arguments)
MESSAGES = st.fixed_dictionaries(
    {"content": st.text(max_size=20)},
    optional={
        "reasoning_content": st.text(min_size=1, max_size=20),
        "tool_calls": st.lists(st.tuples(st.sampled_from(["bash", "read file"]), OBJECTS), min_size=1, max_size=3).map(
            lambda calls: [
                {"id": f"call_7_{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
                for i, (name, arguments) in enumerate(calls)
            ]
        ),
    },
)


@pytest.mark.parametrize("name", NAMES)
def test_a_stream_says_what_the_plain_reply_says(name: str) -> None:
    protocol = PROTOCOLS[name]

    @QUICK
    @given(MESSAGES, st.sampled_from(list(FinishReason)), st.sampled_from([None, "</code>"]), st.booleans())
    def check(message: Json, finish: FinishReason, stop: str | None, usage: bool) -> None:
        if name == "openai-completions":
            message = {"content": message["content"]}
        answer = answers_of(message, finish, stop)
        request = ChatRequest("m", stream=True, include_usage=usage, protocol=name)
        plain = orjson.loads(orjson.dumps(protocol.reply(answer, request)))
        assert ASSEMBLE[name](events(b"".join(protocol.stream(answer, request)))) == SAID[name](plain)

    check()


def events(stream: bytes) -> list[Json]:
    """The data of each server-sent event, split as SSE clients in Python split lines."""
    data = [line.removeprefix("data: ") for line in stream.decode().splitlines() if line.startswith("data: ")]
    return [orjson.loads(item) for item in data if item != "[DONE]"]


def _chat_stream(chunks: Iterable[Json]) -> Json:
    said: Json = {"content": "", "reasoning_content": "", "tool_calls": {}, "finish": None}
    for chunk in chunks:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            said["content"] += delta.get("content") or ""
            said["reasoning_content"] += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls", ()):
                kept = said["tool_calls"].setdefault(call["index"], {"id": "", "name": "", "arguments": ""})
                kept["id"] += call.get("id", "")
                for part in ("name", "arguments"):
                    kept[part] += call["function"].get(part, "")
            said["finish"] = choice["finish_reason"] or said["finish"]
    return said | {"tool_calls": list(said["tool_calls"].values())}


def _chat_plain(answer: Json) -> Json:
    (choice,) = answer["choices"]
    message = choice["message"]
    return {
        "content": message["content"] or "",
        "reasoning_content": message.get("reasoning_content", ""),
        "tool_calls": [{"id": call["id"], **call["function"]} for call in message.get("tool_calls", ())],
        "finish": choice["finish_reason"],
    }


def _completion_stream(chunks: Iterable[Json]) -> Json:
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return {"text": "".join(choice["text"] for choice in choices), "finish": choices[-1]["finish_reason"]}


def _completion_plain(answer: Json) -> Json:
    (choice,) = answer["choices"]
    return {"text": choice["text"], "finish": choice["finish_reason"]}


def _responses_stream(items: Iterable[Json]) -> Json:
    deltas: dict[str, str] = {}
    final: Json = {}
    for item in items:
        if item["type"].endswith(".delta"):
            deltas[item["item_id"]] = deltas.get(item["item_id"], "") + item["delta"]
        final = item.get("response", final)
    return {"response": final, "deltas": {item: text for item, text in deltas.items() if text}}


def _responses_plain(answer: Json) -> Json:
    deltas = {}
    for item in answer["output"]:
        parts = item.get("summary") or item.get("content") or [{"text": item.get("arguments", "")}]
        deltas[item["id"]] = "".join(part["text"] for part in parts)
    return {"response": answer, "deltas": {item: text for item, text in deltas.items() if text}}


def _messages_stream(items: Iterable[Json]) -> Json:
    said: Json = {}
    for item in items:
        if item["type"] == "message_start":
            said = item["message"]
        elif item["type"] == "content_block_start":
            said["content"].append(item["content_block"] | {"json": ""})
        elif item["type"] == "content_block_delta":
            block, delta = said["content"][item["index"]], item["delta"]
            for name, value in delta.items():
                if name != "type":
                    kept = "json" if name == "partial_json" else name
                    block[kept] += value
        elif item["type"] == "message_delta":
            said |= item["delta"] | {"usage": item["usage"]}
    for block in said["content"]:
        text = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = orjson.loads(text)
    return said


def _gemini_stream(chunks: Iterable[Json]) -> Json:
    said: Json = {"parts": [], "finish": None}
    for chunk in chunks:
        for candidate in chunk["candidates"]:
            said["parts"] += candidate.get("content", {}).get("parts", [])
            said["finish"] = candidate.get("finishReason", said["finish"])
    return said | {"parts": _joined(said["parts"])}


def _joined(parts: list[Json]) -> list[Json]:
    """Neighbouring texts of one kind as one; texts that are empty say nothing."""
    joined: list[Json] = []
    for part in parts:
        if part.get("text") == "" and set(part) <= {"text", "thought"}:
            continue
        if joined and "text" in part and "text" in joined[-1] and part.get("thought") == joined[-1].get("thought"):
            joined[-1] = joined[-1] | part | {"text": joined[-1]["text"] + part["text"]}
        else:
            joined.append(part)
    return joined


def _gemini_plain(answer: Json) -> Json:
    (candidate,) = answer["candidates"]
    return {"parts": _joined(candidate["content"]["parts"]), "finish": candidate["finishReason"]}


ASSEMBLE: dict[str, Callable[[list[Json]], Json]] = {
    "openai-chat": _chat_stream,
    "openai-completions": _completion_stream,
    "openai-responses": _responses_stream,
    "anthropic-messages": _messages_stream,
    "gemini": _gemini_stream,
}
SAID: dict[str, Callable[[Json], Json]] = {
    "openai-chat": _chat_plain,
    "openai-completions": _completion_plain,
    "openai-responses": _responses_plain,
    "anthropic-messages": lambda answer: answer,
    "gemini": _gemini_plain,
}


JSON_TEXTS = st.text(alphabet=st.sampled_from('\\u"dD83c0nxef '), max_size=24)


@settings(max_examples=300, deadline=None)
@given(JSON_TEXTS)
def test_halves_of_surrogate_pairs(text: str) -> None:
    """Wherever Python's own parser reads the text, the value is the same with U+FFFD for each half."""
    raw = f'"{text}"'
    try:
        expected = json.loads(raw)
    except ValueError:
        with pytest.raises(ValueError):
            loads(raw)
        return
    whole = expected.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    value, halves = loads(raw.encode())
    assert (value, halves) == (whole, whole.count("�") - expected.count("�"))


@pytest.mark.parametrize(
    ("text", "expected", "halves"),
    [
        (r'"x \ud83d"', "x �", 1),
        (r'"\ude00\ud83d\ude00\ud83d"', "�😀�", 2),
        (r'"\ud83d\ud83d\ude00"', "�😀", 1),
        (r'"\\ud83d"', r"\ud83d", 0),
        (r'{"\\\ud83d": "\ufffd"}', {"\\�": "�"}, 1),
    ],
)
def test_halves_of_surrogate_pairs_exactly(text: str, expected: Any, halves: int) -> None:
    """A backslash that is escaped escapes nothing."""
    assert loads(text) == (expected, halves)


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e400", "{", "", "'x'", '"\x00"', '"\\ud83"'])
def test_what_is_no_json(text: str) -> None:
    with pytest.raises(ValueError):
        loads(text)


def test_depth() -> None:
    deepest = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    assert orjson.dumps(loads(deepest)[0]).decode() == deepest
    for levels in (MAX_DEPTH + 1, 1024, 5000):
        with pytest.raises(ValueError, match=r"nested deeper than 200 levels|depth limit"):
            loads("[" * levels + "]" * levels)


def test_duplicate_keys_and_big_numbers() -> None:
    assert loads('{"a": 1, "a": 2}') == ({"a": 2}, 0)
    assert loads("[18446744073709551615, 18446744073709551616]") == ([2**64 - 1, 1.8446744073709552e19], 0)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (None, {}),
        ("", {}),
        ('{"a": 1}', {"a": 1}),
        ({"a": 1}, {"a": 1}),
        ('{"a": ', '{"a": '),
        ("[1]", "[1]"),
        (r'{"a": "\ud83d"}', {"a": "�"}),
        ('{"a": 12345678901234567890123}', '{"a": 12345678901234567890123}'),
        ('{"a": "12345678901234567890123"}', {"a": "12345678901234567890123"}),
        ('{"a": 18446744073709551615}', {"a": 2**64 - 1}),
        ('{"a": NaN}', '{"a": NaN}'),
        ('{"a":' + "[" * 300 + "]" * 300 + "}", '{"a":' + "[" * 300 + "]" * 300 + "}"),
    ],
)
def test_arguments_as_an_object_where_nothing_is_lost(arguments: Any, expected: Any) -> None:
    assert arguments_of(arguments) == expected
    assert arguments_of(arguments_text(expected)) == expected


@given(VALUES)
def test_sampled_arguments_come_back_as_they_went(value: Any) -> None:
    """What Python's json read from a model's words is written, sent, sent back and read as the same."""
    arguments = sampled_arguments(json.loads(json.dumps(value)))
    assert arguments_of(arguments_text(arguments)) == arguments
    orjson.dumps(arguments)
