from __future__ import annotations

import base64
from typing import Any

import orjson
import pytest
from google.genai import types

from leyden.errors import BudgetExceeded, RequestError, Unauthorized
from leyden.protocols import Call, ChatChoice, ChatReply, ChatRequest, gemini
from leyden.protocols.fields import FIELDS, FieldClass, check_fields
from leyden.protocols.gemini import _named
from leyden.types import FinishReason
from tests.protocols.calls import Remembered

REMEMBERED = Remembered({7: {"role": "assistant", "content": "a", "reasoning_content": "r"}})
REQUEST = ChatRequest("m", protocol="gemini")
SIGNATURE = base64.b64encode(b"leyden-turn-7").decode()
HI = {"role": "user", "parts": [{"text": "hi"}]}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}


def parse(contents: Any = None, *, method: str = "generateContent", alt: str = "sse", **body: Any) -> ChatRequest:
    call = Call({"model": "m", "method": method}, REMEMBERED, {"alt": alt} if alt else {})
    return gemini.parse({"contents": [HI] if contents is None else contents, **body}, call)


def messages(*contents: Any) -> list[Any]:
    return parse(list(contents)).messages


def answer(message: dict[str, Any], finish: FinishReason = FinishReason.STOP, n: int = 1) -> ChatReply:
    return ChatReply(7, "policy", 123, 10, [ChatChoice({"role": "assistant", **message}, finish, 5)] * n)


def chunks(reply: ChatReply) -> list[Any]:
    return [orjson.loads(event.removeprefix(b"data: ")) for event in gemini.stream(reply, REQUEST)]


def call_part(name: str = "f", **fields: Any) -> dict[str, Any]:
    return {"functionCall": {"name": name, "args": {}, **fields}}


def response_part(name: str = "f", response: Any = None, **fields: Any) -> dict[str, Any]:
    return {"functionResponse": {"name": name, "response": response or {}, **fields}}


def test_a_whole_conversation() -> None:
    request = parse(
        [
            {"parts": [{"text": "look: "}, {"inlineData": {"mimeType": "image/png", "data": "QUI_-w=="}}]},
            {
                "role": "model",
                "parts": [
                    {"text": "think", "thought": True},
                    {"text": " so "},
                    {"functionCall": {"id": "1", "name": "f", "args": {"a_b": 1.5}}, "thoughtSignature": "eA=="},
                ],
            },
            {"role": "user", "parts": [response_part("f", {"output": "out\n"}, id="1"), {"text": "go on"}]},
        ],
        systemInstruction={"parts": [{"text": "be "}, {"text": "brief"}]},
    )
    assert request.messages == [
        {"role": "system", "content": "be brief"},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "look: "},
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,QUI/+w=="}},
            ],
        },
        {
            "role": "assistant",
            "content": " so ",
            "reasoning_content": "think",
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a_b": 1.5}}}],
        },
        {"role": "tool", "content": "out\n", "tool_call_id": "1", "name": "f"},
        {"role": "user", "content": "go on"},
    ]
    assert (request.protocol, request.model, request.stream) == ("gemini", "m", False)


def test_names_in_snake_case_and_lists_of_one_as_their_item() -> None:
    request = parse(
        {"role": "user", "parts": {"text": "hi"}},
        system_instruction={"parts": {"text": "s"}},
        generation_config={"max_output_tokens": 5, "stop_sequences": ["x"], "response_mime_type": "text/plain"},
        tools={"function_declarations": {"name": "f", "parameters_json_schema": {"type": "object", "a_b": 1}}},
        safety_settings=[{"category": "x"}],
    )
    assert request.messages == [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]
    assert (request.max_tokens, request.stop) == (5, ("x",))
    assert request.tools[0]["function"] == {"name": "f", "parameters": {"type": "object", "a_b": 1}}
    assert request.ignored == ("safetySettings", "generationConfig.responseMimeType")
    assert parse(systemInstruction="text").messages[0] == {"role": "system", "content": "text"}


def test_model_contents_in_a_row_are_one_message() -> None:
    """The SDKs' chats keep one content per chunk of a stream."""
    made = messages(
        HI,
        {"role": "model", "parts": [{"text": "r", "thought": True}]},
        {"role": "model", "parts": [{"text": "a "}]},
        {"role": "model", "parts": [{"text": "b"}, call_part(id="1")]},
        {"role": "model", "parts": [call_part("g", id="2")]},
        {"role": "user", "parts": [{"text": "one"}]},
        {"role": "user", "parts": [{"text": "two"}]},
    )
    assert [m["role"] for m in made] == ["user", "assistant", "user", "user"]
    assert (made[1]["content"], made[1]["reasoning_content"]) == ("a b", "r")
    assert [call["id"] for call in made[1]["tool_calls"]] == ["1", "2"]


@pytest.mark.parametrize(
    ("parts", "reasoning"),
    [
        ([{"text": "a", "thoughtSignature": SIGNATURE}], "r"),
        ([call_part() | {"thoughtSignature": SIGNATURE}], "r"),
        ([{"text": "a"}, {"thoughtSignature": SIGNATURE.rstrip("=")}], None),
        ([{"text": "a"}, {"thoughtSignature": SIGNATURE}], "r"),
        ([{"text": "own", "thought": True}, {"text": "a", "thoughtSignature": SIGNATURE}], "own"),
        ([{"text": "a", "thoughtSignature": "skip_thought_signature_validator"}], None),
        ([{"text": "a", "thoughtSignature": base64.b64encode(b"leyden-turn-8").decode()}], None),
        ([{"text": "a", "thoughtSignature": 5}], None),
        ([{"text": "a", "thoughtSignature": "é"}], None),
    ],
)
def test_a_signature_stands_for_reasoning_that_was_dropped(parts: list[Any], reasoning: str | None) -> None:
    """Foreign and forged signatures, and those of other attempts' turns, stand for nothing."""
    _, message = messages(HI, {"role": "model", "parts": parts})
    assert message.get("reasoning_content") == reasoning


@pytest.mark.parametrize(
    ("response", "text"),
    [
        ({"output": "plain"}, "plain"),
        ({"result": "plain"}, "plain"),
        ({"output": "", "exit": 0}, '{"output":"","exit":0}'),
        ({"output": {"b": 1, "a": "é"}}, '{"output":{"b":1,"a":"é"}}'),
        ({"error": "no"}, '{"error":"no"}'),
        ({}, "{}"),
        (None, "{}"),
    ],
)
def test_function_responses_as_text(response: Any, text: str) -> None:
    (message,) = messages({"role": "user", "parts": [{"functionResponse": {"name": "f", "response": response}}]})
    assert message == {"role": "tool", "content": text, "name": "f"}


def test_responses_find_their_calls_by_id_then_by_name_in_order() -> None:
    made = messages(
        HI,
        {"role": "model", "parts": [call_part("f"), call_part("g"), call_part("f"), call_part("f", id="own")]},
        {
            "role": "user",
            "parts": [
                response_part("f", id="own"),
                response_part("f"),
                response_part("f", id="unknown"),
                response_part("g"),
                response_part("g", id="late"),
            ],
        },
    )
    assert [call["id"] for call in made[1]["tool_calls"]] == ["call_0", "call_1", "call_2", "own"]
    assert [m["tool_call_id"] for m in made[2:]] == ["own", "call_0", "call_2", "call_1", "late"]


def test_images_in_function_responses_and_by_address() -> None:
    (message,) = messages(
        {
            "role": "function",
            "parts": [response_part(parts=[{"inlineData": {"mimeType": "image/png", "data": "QQ=="}}])],
        }
    )
    assert [part["type"] for part in message["content"]] == ["text", "image_url"]
    (message,) = messages({"parts": [{"fileData": {"mimeType": "image/png", "fileUri": "https://x/y.png"}}]})
    assert message["content"] == [{"type": "image_url", "image_url": {"url": "https://x/y.png"}}]


def test_tools() -> None:
    own = {
        "type": "OBJECT",
        "properties": {
            "type": {"type": "STRING", "enum": ["A", "B"], "description": "OBJECT"},
            "max_items": {"type": "ARRAY", "items": {"type": "INTEGER"}, "max_items": 3},
            "either": {"any_of": [{"type": "NUMBER"}, {"type": "BOOLEAN"}], "nullable": True},
        },
        "required": ["type"],
    }
    request = parse(
        tools=[
            {"functionDeclarations": [{"name": "f", "description": "d", "parameters": own, "behavior": "BLOCKING"}]},
            {"googleSearch": {}},
            {"codeExecution": {}, "functionDeclarations": [{"name": "g"}]},
        ]
    )
    assert [tool["function"] for tool in request.tools] == [
        {
            "name": "f",
            "description": "d",
            "parameters": {
                "type": "object",
                "properties": {
                    "type": {"type": "string", "enum": ["A", "B"], "description": "OBJECT"},
                    "max_items": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
                    "either": {"anyOf": [{"type": "number"}, {"type": "boolean"}], "nullable": True},
                },
                "required": ["type"],
            },
        },
        {"name": "g", "parameters": {"type": "object", "properties": {}}},
    ]


def test_generation_config() -> None:
    config = {"temperature": 0.5, "topP": 0.9, "topK": 64.0, "seed": 3, "candidateCount": 2, "maxOutputTokens": 9}
    request = parse(generationConfig=config | {"thinkingConfig": {"thinkingBudget": 1}, "responseModalities": ["TEXT"]})
    assert (request.sampling.temperature, request.sampling.top_p, request.sampling.top_k) == (0.5, 0.9, 64)
    assert (request.sampling.seed, request.n, request.max_tokens) == (3, 2, 9)
    assert request.ignored == ("generationConfig.thinkingConfig",)


BAD = [
    ({"contents": None}, "contents is missing"),
    ({"contents": []}, "contents is empty"),
    ({"contents": [{"role": "user", "parts": []}]}, "contents is empty"),
    ({"contents": "hi"}, "contents is a string; send a list"),
    ({"contents": ["hi"]}, r"contents\[0\] is a string, not an object"),
    ({"contents": [{"role": "system", "parts": []}]}, r"contents\[0\]\.role is 'system'; allowed are user"),
    ({"contents": [{"role": ["user"], "parts": []}]}, r"contents\[0\]\.role is \['user'\]"),
    ({"contents": [{"parts": [{}]}]}, r"contents\[0\]\.parts\[0\] holds nothing"),
    ({"contents": [{"parts": [{"text": 5}]}]}, r"contents\[0\]\.parts\[0\] holds text"),
    ({"contents": [{"parts": [{"executableCode": {}}]}]}, "holds executableCode; allowed are text"),
    (
        {"contents": [{"parts": [{"inlineData": {"mimeType": "audio/wav"}}]}]},
        "inlineData.data is missing",
    ),
    ({"contents": [{"parts": [{"inlineData": {"mimeType": "image/png"}}]}]}, "inlineData.data is missing"),
    ({"contents": [{"role": "model", "parts": [{"functionCall": {"args": {}}}]}]}, "functionCall.name is missing"),
    (
        {"contents": [{"role": "model", "parts": [call_part(args="x")]}]},
        "functionCall.args is a string; send an object",
    ),
    ({"contents": [{"parts": [{"functionResponse": {"response": "x"}}]}]}, "response is a string; send an object"),
    ({"systemInstruction": 5}, "systemInstruction is a number; send an object"),
    ({"systemInstruction": {"parts": [{"functionCall": {}}]}}, r"systemInstruction\.parts\[0\] holds functionCall"),
    ({"tools": [{"functionDeclarations": [{}]}]}, r"tools\[0\]\.functionDeclarations\[0\]\.name is missing"),
    ({"generationConfig": {"temperature": 3}}, "generationConfig.temperature is 3; allowed is 0 to 2"),
    ({"generationConfig": {"maxOutputTokens": 0}}, "generationConfig.maxOutputTokens is 0"),
    ({"generationConfig": {"stopSequences": [""]}}, "stopSequences is"),
    ({"generationConfig": {"responseModalities": ["AUDIO"]}}, "generationConfig.responseModalities is not supported"),
    ({"cachedContent": "cachedContents/1"}, "cachedContent is not supported: nothing is cached here"),
    ({"cached_content": "cachedContents/1"}, "cachedContent is not supported"),
]


@pytest.mark.parametrize(("changes", "message"), BAD)
def test_bad_bodies_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        gemini.parse({"contents": [HI]} | changes, Call({"model": "m", "method": "generateContent"}, REMEMBERED))
    assert caught.value.status == 400


def test_methods_and_forms() -> None:
    assert parse(method="streamGenerateContent").stream
    listed = parse(method="streamGenerateContent", alt="")
    assert (listed.stream, listed.echo) == (False, {"as_list": True})
    assert listed.key() == parse().key() == parse(method="streamGenerateContent").key()
    with pytest.raises(RequestError, match="embedContent is not served here") as caught:
        parse(method="embedContent")
    assert caught.value.status == 404
    whole = gemini.reply(answer({"content": "x"}), parse())
    assert gemini.reply(answer({"content": "x"}), listed) == [whole]


def test_counts_take_contents_or_a_whole_request() -> None:
    call = Call({"model": "m"}, REMEMBERED)
    assert gemini.parse_count({"contents": [HI]}, call).messages == [{"role": "user", "content": "hi"}]
    whole = {"model": "models/m", "contents": [HI], "system_instruction": "s"}
    assert [m["role"] for m in gemini.parse_count({"generateContentRequest": whole}, call).messages] == [
        "system",
        "user",
    ]
    assert gemini.count(12) == {"totalTokens": 12}


def test_plain_reply() -> None:
    message = {"content": "t", "reasoning_content": "r", "tool_calls": [CALL, CALL | {"id": "c2"}]}
    assert gemini.reply(answer(message), REQUEST) == {
        "candidates": [
            {
                "content": {
                    "role": "model",
                    "parts": [
                        {"text": "r", "thought": True},
                        {"text": "t"},
                        {"functionCall": {"id": "c1", "name": "f", "args": {"x": 1}}, "thoughtSignature": SIGNATURE},
                        {"functionCall": {"id": "c2", "name": "f", "args": {"x": 1}}},
                    ],
                },
                "index": 0,
                "finishReason": "STOP",
            }
        ],
        "modelVersion": "policy",
        "responseId": "7",
        "usageMetadata": {"promptTokenCount": 10, "candidatesTokenCount": 5, "totalTokenCount": 15},
    }


@pytest.mark.parametrize(
    ("message", "parts"),
    [
        ({"content": ""}, [{"text": ""}]),
        ({"content": "x"}, [{"text": "x"}]),
        (
            {"content": "", "reasoning_content": "r"},
            [{"text": "r", "thought": True}, {"text": "", "thoughtSignature": SIGNATURE}],
        ),
        (
            {"content": "x", "reasoning_content": "r"},
            [{"text": "r", "thought": True}, {"text": "x", "thoughtSignature": SIGNATURE}],
        ),
        ({"content": "", "tool_calls": [CALL]}, [{"functionCall": {"id": "c1", "name": "f", "args": {"x": 1}}}]),
    ],
)
def test_parts_of_a_reply(message: dict[str, Any], parts: list[Any]) -> None:
    """Every reply has a part; the signature is on the first one that a harness keeps."""
    assert gemini.reply(answer(message), REQUEST)["candidates"][0]["content"]["parts"] == parts


def test_a_cut_reply_says_so_even_with_tool_calls() -> None:
    cut = answer({"content": "", "tool_calls": [CALL]}, FinishReason.LENGTH)
    assert gemini.reply(cut, REQUEST)["candidates"][0]["finishReason"] == "MAX_TOKENS"
    assert chunks(cut)[-1]["candidates"][0]["finishReason"] == "MAX_TOKENS"


def test_stream_events_hold_the_parts_of_the_plain_reply() -> None:
    reply = answer({"content": "t", "reasoning_content": "r", "tool_calls": [CALL, CALL]}, n=2)
    events = chunks(reply)
    for index, whole in enumerate(gemini.reply(reply, REQUEST)["candidates"]):
        own = [e["candidates"][0] for e in events if e["candidates"][0]["index"] == index]
        assert [c["content"]["parts"][0] for c in own] == whole["content"]["parts"]
        assert [c.get("finishReason") for c in own] == [None, None, None, "STOP"]
    signatures = [p.get("thoughtSignature") for e in events for p in e["candidates"][0]["content"]["parts"]]
    assert [s for s in signatures if s] == [SIGNATURE, base64.b64encode(b"leyden-turn-8").decode()]
    assert events[-1]["usageMetadata"] == {"promptTokenCount": 10, "candidatesTokenCount": 10, "totalTokenCount": 20}
    assert {e["responseId"] for e in events} == {"7"}


def test_errors() -> None:
    assert gemini.error(BudgetExceeded("too long", param="contents")) == {
        "error": {"code": 400, "message": "too long", "status": "INVALID_ARGUMENT"}
    }
    assert gemini.error(Unauthorized("who"))["error"]["status"] == "UNAUTHENTICATED"
    assert gemini.error(Unauthorized("who", forbidden=True))["error"]["status"] == "PERMISSION_DENIED"
    assert orjson.loads(gemini.stream_error(RequestError("x"))) == gemini.error(RequestError("x"))


def test_every_field_has_its_class() -> None:
    for name, kind in FIELDS["gemini"].items():
        if kind is FieldClass.REFUSED:
            with pytest.raises(RequestError, match=name) as caught:
                check_fields("gemini", {name: {"x": 1}})
            assert caught.value.param == name
        else:
            assert check_fields("gemini", {name: "x"}) == ((name,) if kind is FieldClass.IGNORED else ())


def test_the_table_holds_every_parameter_of_the_official_sdk() -> None:
    """What stays in the SDK is left out."""
    local = {"httpOptions", "shouldReturnHttpResponse", "automaticFunctionCalling", "automaticContinuation"}
    documented = {field.alias for field in types.GenerateContentConfig.model_fields.values()} - local
    documented |= {field.alias for field in types.GenerationConfig.model_fields.values()}
    table = set(FIELDS["gemini"])
    assert {name for name in documented if not {str(name), f"generationConfig.{name}"} & table} == set()


def test_a_name_longer_than_any_field_is_left_as_it_is() -> None:
    short, long = "max_output_tokens", "a_b" * 1000
    assert _named({short: 1, long: 2}) == {"maxOutputTokens": 1, long: 2}
