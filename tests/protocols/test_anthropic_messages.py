from __future__ import annotations

from typing import Any, get_args, get_type_hints

import orjson
import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_count_tokens_params as beta_count_params
from anthropic.types.beta import message_create_params as beta_create_params

from leyden.errors import BudgetExceeded, RequestError, TooLarge, Unauthorized
from leyden.protocols import Call, ChatChoice, ChatReply, ChatRequest, anthropic_messages
from leyden.protocols.fields import FIELDS, FieldClass, check_fields
from leyden.types import FinishReason
from tests.protocols.calls import NO_CALL, Remembered

PROTOCOL = "anthropic-messages"
REQUEST = ChatRequest("claude")
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}
CALL = {"id": "call_7_0", "type": "function", "function": {"name": "f", "arguments": {"x": 1, "é": "好"}}}
CACHED = {"cache_control": {"type": "ephemeral"}}


def body(**changes: Any) -> dict[str, Any]:
    return {"model": "claude", "max_tokens": 100, "messages": [{"role": "user", "content": "hi"}], **changes}


def parse(document: dict[str, Any], **recalled: Any) -> ChatRequest:
    return anthropic_messages.parse(document, Call({}, Remembered(**recalled)))


def messages(*items: dict[str, Any], **changes: Any) -> list[dict[str, Any]]:
    return parse(body(messages=list(items), **changes)).messages


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def text(value: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **more}


def result(call_id: str, **content: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, **content}


def reply(
    message: dict[str, Any], finish: FinishReason = FinishReason.STOP, stop_string: str | None = None
) -> ChatReply:
    choice = ChatChoice({"role": "assistant", "content": "", **message}, finish, 5, stop_string)
    return ChatReply(7, "policy", 123, 10, [choice])


def events(answer: ChatReply) -> list[tuple[str, dict[str, Any]]]:
    found = []
    for event in anthropic_messages.stream(answer, REQUEST):
        head, _, data = event.decode().removesuffix("\n\n").partition("\ndata: ")
        found.append((head.removeprefix("event: "), orjson.loads(data)))
    assert all(data["type"] == name for name, data in found)
    return found


def test_system_blocks_are_one_text_without_the_clients_billing_header() -> None:
    blocks = [text("x-anthropic-billing-header: cc_version=2.1.197.fbe;"), text("You are", **CACHED), text(" brief.")]
    hi = {"role": "user", "content": "hi"}
    assert messages(hi, system=blocks) == [{"role": "system", "content": "You are brief."}, hi]
    assert messages(hi, system=" kept as it is ") == [{"role": "system", "content": " kept as it is "}, hi]
    assert messages(hi, system=[]) == messages(hi, system="") == messages(hi) == [hi]


def test_a_system_message_stays_where_it_is() -> None:
    later = {"role": "system", "content": [text("x-anthropic-billing-header: a"), text("Agents: "), text("none")]}
    assert messages(user(text("hi")), later, system="s") == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "hi"},
        {"role": "system", "content": "Agents: none"},
    ]


def test_tool_results_come_first_then_the_rest_of_the_message() -> None:
    shot = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    found = messages(
        user(
            text("look: "),
            result("a", content="one\n", is_error=True),
            result("b", content=[text("two"), text("lines")]),
            result("c"),
            result("d", content=[text("seen"), shot]),
            result("e", content=[{"type": "tool_reference", "tool_name": "Bash"}]),
            {"type": "image", "source": {"type": "url", "url": "https://x/y.png"}},
            text("what now?", **CACHED),
        )
    )
    assert found == [
        {"role": "tool", "tool_call_id": "a", "content": "one\n"},
        {"role": "tool", "tool_call_id": "b", "content": "two\nlines"},
        {"role": "tool", "tool_call_id": "c", "content": ""},
        {
            "role": "tool",
            "tool_call_id": "d",
            "content": [text("seen"), {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}],
        },
        {"role": "tool", "tool_call_id": "e", "content": "Bash"},
        {
            "role": "user",
            "content": [
                text("look: "),
                {"type": "image_url", "image_url": {"url": "https://x/y.png"}},
                text("what now?"),
            ],
        },
    ]
    assert messages(user()) == [{"role": "user", "content": ""}]


def test_an_assistant_message_in_parts() -> None:
    call = {"type": "tool_use", "id": "t1", "name": "f", "input": {"x": 1}, **CACHED}
    assert messages(
        assistant(
            {"type": "thinking", "thinking": "\nhm\n", "signature": "foreign"},
            {"type": "redacted_thinking", "data": "AAAA"},
            text("I will"),
            text(" run it."),
            call,
            {"type": "tool_use", "id": "t2", "name": "g", "input": {}},
        )
    ) == [
        {
            "role": "assistant",
            "content": "I will run it.",
            "reasoning_content": "\nhm\n",
            "tool_calls": [
                {"id": "t1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}},
                {"id": "t2", "type": "function", "function": {"name": "g", "arguments": {}}},
            ],
        }
    ]


def test_assistant_messages_in_a_row_are_one_turn() -> None:
    """As the API defines; user messages stay apart, as a deployed server shows them."""
    apart = [
        assistant({"type": "thinking", "thinking": "a", "signature": ""}, text("x")),
        {"role": "assistant", "content": "y"},
        assistant({"type": "thinking", "thinking": "b", "signature": ""}, {"type": "tool_use", "id": "1", "name": "f"}),
        assistant({"type": "tool_use", "id": "2", "name": "f"}),
    ]
    (found,) = messages(*apart)
    assert (found["content"], found["reasoning_content"]) == ("xy", "ab")
    assert [call["id"] for call in found["tool_calls"]] == ["1", "2"]
    assert messages(user(text("a")), user(text("b"))) == [
        {"role": "user", "content": "a"},
        {"role": "user", "content": "b"},
    ]


@pytest.mark.parametrize(
    ("signature", "recalled"),
    [
        ("leyden-turn-7", "as sampled"),
        ("leyden-turn-8", None),
        ("leyden-turn-7 ", None),
        ("leyden-turn-", None),
        ("leyden-turn-" + 40 * "9", None),
        ("c2lnbmF0dXJl", None),
        ("", None),
    ],
)
def test_dropped_thinking_is_recalled_by_our_signature_alone(signature: str, recalled: str | None) -> None:
    replies = {7: {"role": "assistant", "content": "x", "reasoning_content": "as sampled"}, 9: {"content": ""}}
    thinking = {"type": "thinking", "thinking": "", "signature": signature}
    (message,) = parse(body(messages=[assistant(thinking, text("x"))]), replies=replies).messages
    assert message.get("reasoning_content") == recalled
    (message,) = parse(body(messages=[assistant(thinking | {"thinking": "own"})]), replies=replies).messages
    assert message["reasoning_content"] == "own"


def test_a_signature_of_a_turn_without_reasoning_recalls_nothing() -> None:
    thinking = {"type": "thinking", "thinking": "", "signature": "leyden-turn-9"}
    (message,) = parse(body(messages=[assistant(thinking)]), replies={9: {"content": ""}}).messages
    assert message == {"role": "assistant", "content": ""}


def test_cache_control_never_reaches_messages_or_tools() -> None:
    """It moves from turn to turn, and the conversation must stay the same."""
    tool = {"name": "f", "description": "runs", "input_schema": SCHEMA}
    turn = [
        user(text("hi"), result("t", content=[text("out")])),
        assistant(text("ok"), {"type": "tool_use", "id": "t", "name": "f", "input": {}}),
    ]
    marked = [
        {**item, "content": [{**block, **CACHED} for block in item["content"]]}
        for item in turn  # a marker on every block
    ]
    marked[0]["content"][1]["content"] = [text("out", **CACHED)]
    plain = parse(body(messages=turn, tools=[tool], system=[text("s")]))
    cached = parse(body(messages=marked, tools=[tool | CACHED], system=[text("s", **CACHED)], **CACHED))
    assert plain.messages == cached.messages
    assert plain.key() == cached.key()
    assert cached.tools == [
        {"type": "function", "function": {"name": "f", "description": "runs", "parameters": SCHEMA}}
    ]


def test_tools_without_a_schema_are_not_offered() -> None:
    tools = [
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 3},
        {"type": "bash_20250124", "name": "bash"},
        {"type": "mcp_toolset", "mcp_server_name": "x"},
        {"type": "custom", "name": "f", "input_schema": SCHEMA, "strict": True, "defer_loading": True},
    ]
    assert parse(body(tools=tools)).tools == [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
    with pytest.raises(RequestError, match=r"tools\[0\]\.input_schema is missing"):
        parse(body(tools=[{"name": "f"}]))


def test_limits_and_sampling() -> None:
    request = parse(body(max_tokens=9, stop_sequences=["a", "b"], temperature=0, top_p=0.5, top_k=4, stream=True))
    assert (request.max_tokens, request.stop, request.stream, request.n) == (9, ("a", "b"), True, 1)
    assert (request.sampling.temperature, request.sampling.top_p, request.sampling.top_k) == (0.0, 0.5, 4)
    assert request.protocol == PROTOCOL
    plain = parse(body())
    assert plain.key() == parse(body(stream=True)).key()
    assert plain.key() != parse(body(max_tokens=101)).key()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_tokens": None}, "max_tokens is missing"),
        ({"max_tokens": 0}, "max_tokens is 0; allowed is 1 to"),
        ({"messages": []}, "messages is empty; send at least one message"),
        ({"messages": [{"role": "tool", "content": ""}]}, r"messages\[0\].role is 'tool'; allowed are assistant, sys"),
        ({"messages": [{"role": ["user"], "content": ""}]}, r"messages\[0\].role is \['user'\]; allowed are"),
        ({"messages": [{"role": "user"}]}, r"messages\[0\].content is null; send a string or a list of blocks"),
        ({"messages": [user("hi")]}, r"messages\[0\].content\[0\] is a string, not an object"),
        (
            {"messages": [user({"type": "document"})]},
            r"content\[0\] has type 'document'; allowed .* image, text, tool_",
        ),
        ({"messages": [user({"type": ["text"]})]}, r"content\[0\] has type \['text'\]"),
        ({"messages": [user({"type": "text"})]}, r"messages\[0\].content\[0\].text is missing"),
        ({"messages": [user(result("x", content=3))]}, r"content\[0\].content is a number"),
        ({"messages": [user({"type": "tool_result"})]}, r"content\[0\].tool_use_id is missing"),
        ({"messages": [user({"type": "image", "source": {"type": "file"}})]}, "has type 'file'; allowed are base64"),
        ({"messages": [assistant({"type": "tool_use", "id": "1", "name": "f", "input": "x"})]}, "input is a string"),
        ({"messages": [assistant(result("x"))]}, "has type 'tool_result'; allowed are"),
        ({"system": [{"type": "image"}]}, r"system\[0\] has type 'image'; allowed are blocks of type text"),
        ({"system": 3}, "system is a number; send a string or a list of blocks"),
        ({"tools": [{"name": 3, "input_schema": {}}]}, r"tools\[0\].name is a number; send a string"),
        ({"thread": {"type": "create"}}, "thread is not supported: send all messages"),
        ({"compaction": {"type": "x"}}, "compaction is not supported: ask for the summary"),
    ],
)
def test_what_is_refused_says_what_to_send(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        parse(body(**changes))
    assert caught.value.status == 400


def test_a_count_takes_no_max_tokens_and_sees_the_same_conversation() -> None:
    document = body(system="s", tools=[{"name": "f", "input_schema": SCHEMA}])
    call = parse(document)
    del document["max_tokens"]
    counted = anthropic_messages.parse_count(document, NO_CALL)
    assert (counted.messages, counted.tools) == (call.messages, call.tools)
    assert anthropic_messages.count(12) == {"input_tokens": 12}


def test_every_field_has_its_class() -> None:
    """Honoured and overridden fields are silent, ignored ones are named, refused ones raise."""
    for name, kind in FIELDS[PROTOCOL].items():
        if kind is FieldClass.REFUSED:
            with pytest.raises(RequestError, match=name) as caught:
                check_fields(PROTOCOL, {name: {"x": 1}})
            assert (caught.value.param, caught.value.status) == (name, 400)
        else:
            expected = (name,) if kind is FieldClass.IGNORED else ()
            assert check_fields(PROTOCOL, {name: "x"}) == expected


def test_the_table_has_every_parameter_that_the_sdk_documents() -> None:
    kinds = [
        *get_args(message_create_params.MessageCreateParams),
        *get_args(beta_create_params.MessageCreateParams),
        message_count_tokens_params.MessageCountTokensParams,
        beta_count_params.MessageCountTokensParams,
    ]
    documented = set().union(*(get_type_hints(kind) for kind in kinds))
    assert len(kinds) == 6
    assert documented - set(FIELDS[PROTOCOL]) == set()
    # What the table has beyond: older SDKs send these.
    assert set(FIELDS[PROTOCOL]) - documented == {"temperature", "top_p", "top_k", "output_format"}


def test_plain_reply() -> None:
    answer = anthropic_messages.reply(
        reply({"content": " text\n", "reasoning_content": "r", "tool_calls": [CALL]}), REQUEST
    )
    assert answer == {
        "id": "msg_7",
        "type": "message",
        "role": "assistant",
        "model": "claude",
        "content": [
            {"type": "thinking", "thinking": "r", "signature": "leyden-turn-7"},
            {"type": "text", "text": " text\n"},
            {"type": "tool_use", "id": "call_7_0", "name": "f", "input": {"x": 1, "é": "好"}},
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 10,
            "output_tokens": 5,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
        },
    }


@pytest.mark.parametrize(
    ("message", "finish", "stop_string", "reason", "sequence"),
    [
        ({"content": "x"}, FinishReason.STOP, None, "end_turn", None),
        ({"content": "x"}, FinishReason.STOP, "END", "stop_sequence", "END"),
        ({"tool_calls": [CALL]}, FinishReason.STOP, None, "tool_use", None),
        ({"tool_calls": [CALL]}, FinishReason.STOP, "END", "tool_use", None),
        ({"content": "x"}, FinishReason.LENGTH, None, "max_tokens", None),
        ({"tool_calls": [CALL]}, FinishReason.LENGTH, None, "max_tokens", None),
    ],
)
def test_stop_reasons(
    message: dict[str, Any], finish: FinishReason, stop_string: str | None, reason: str, sequence: str | None
) -> None:
    """A cut reply says max_tokens even with tool calls."""
    answer = reply(message, finish, stop_string)
    plain = anthropic_messages.reply(answer, REQUEST)
    assert (plain["stop_reason"], plain["stop_sequence"]) == (reason, sequence)
    streamed = dict(events(answer))["message_delta"]
    assert streamed["delta"] == {"stop_reason": reason, "stop_sequence": sequence}


def test_input_is_always_an_object() -> None:
    """What only text holds is what JavaScript reads of it."""
    odd = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": NaN, "b": 1e999}'}}
    (block,) = anthropic_messages.reply(reply({"tool_calls": [odd]}), REQUEST)["content"]
    assert block["input"] == {"a": None, "b": None}


def test_stream_of_a_tool_call_alone() -> None:
    """No empty text block before it, its arguments whole, and the reason tool_use."""
    found = events(reply({"tool_calls": [CALL]}))
    assert [name for name, _ in found] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    start, block, delta, stop, end, _ = (data for _, data in found)
    usage = {"input_tokens": 10, "output_tokens": 0, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    assert start["message"] == {
        "id": "msg_7",
        "type": "message",
        "role": "assistant",
        "model": "claude",
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage,
    }
    assert (block["index"], block["content_block"]) == (
        0,
        {"type": "tool_use", "id": "call_7_0", "name": "f", "input": {}},
    )
    assert (delta["index"], delta["delta"]["type"]) == (0, "input_json_delta")
    assert orjson.loads(delta["delta"]["partial_json"]) == {"x": 1, "é": "好"}
    assert stop == {"type": "content_block_stop", "index": 0}
    assert end["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert end["usage"] == usage | {"output_tokens": 5}


def test_stream_of_all_kinds_of_blocks() -> None:
    found = events(reply({"content": "hi", "reasoning_content": "r", "tool_calls": [CALL, CALL]}))
    starts = [data["content_block"] for name, data in found if name == "content_block_start"]
    assert starts[:2] == [{"type": "thinking", "thinking": "", "signature": ""}, {"type": "text", "text": ""}]
    deltas = [(data["index"], data["delta"]) for name, data in found if name == "content_block_delta"]
    assert deltas[:3] == [
        (0, {"type": "thinking_delta", "thinking": "r"}),
        (0, {"type": "signature_delta", "signature": "leyden-turn-7"}),
        (1, {"type": "text_delta", "text": "hi"}),
    ]
    assert [index for index, _ in deltas[3:]] == [2, 3]


def test_an_empty_reply_has_no_blocks() -> None:
    assert anthropic_messages.reply(reply({}), REQUEST)["content"] == []
    assert [name for name, _ in events(reply({}))] == ["message_start", "message_delta", "message_stop"]


@pytest.mark.parametrize(
    ("problem", "kind"),
    [
        (RequestError("m"), "invalid_request_error"),
        (Unauthorized("m"), "authentication_error"),
        (Unauthorized("m", forbidden=True), "permission_error"),
        (TooLarge("m"), "request_too_large"),
        (BudgetExceeded("m"), "invalid_request_error"),
    ],
)
def test_errors_have_the_type_of_their_status(problem: RequestError, kind: str) -> None:
    expected = {"type": "error", "error": {"type": kind, "message": "m"}}
    assert anthropic_messages.error(problem) == expected
    event = anthropic_messages.stream_error(problem)
    assert event == b"event: error\ndata: " + orjson.dumps(expected) + b"\n\n"


def test_a_refused_thread_says_so_as_the_sdk_understands_it() -> None:
    with pytest.raises(RequestError) as caught:
        parse(body(thread={"type": "create"}))
    details = anthropic_messages.error(caught.value)["error"]["details"]
    assert details == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


def test_a_full_context_says_so_in_the_words_that_clients_look_for() -> None:
    problem = BudgetExceeded("too many", code="context_length_exceeded")
    assert anthropic_messages.error(problem)["error"]["message"] == "prompt is too long: too many"


def test_what_anthropics_servers_ran_is_skipped() -> None:
    """As in the history of a conversation that Anthropic's model began."""
    blocks = [
        {"type": "text", "text": "I look. "},
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "x"}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
        {"type": "text", "text": "Found."},
    ]
    asked = {"role": "user", "content": "a"}
    history = [asked, {"role": "assistant", "content": blocks}, asked]
    assert parse(body(messages=history)).messages[1] == {"role": "assistant", "content": "I look. Found."}
