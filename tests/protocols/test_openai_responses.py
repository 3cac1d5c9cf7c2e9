from __future__ import annotations

from typing import Any

import orjson
import pytest
from openai.types.responses import Response
from openai.types.responses import ResponseStreamEvent as AnyEvent
from pydantic import TypeAdapter

from leyden.errors import BudgetExceeded, RequestError
from leyden.protocols import Call, ChatChoice, ChatReply, ChatRequest, openai_responses
from leyden.protocols.fields import FIELDS, FieldClass, check_fields
from leyden.types import FinishReason
from tests.protocols.calls import NO_CALL, Remembered

WIRE_CALL = {"type": "function_call", "call_id": "call_7_0", "name": "bash", "arguments": '{"command": "ls"}'}
TOOL_CALL = {"id": "call_7_0", "type": "function", "function": {"name": "bash", "arguments": {"command": "ls"}}}
REPLY = {"role": "assistant", "content": " hm\n", "reasoning_content": "think", "tool_calls": [TOOL_CALL]}
USER = {"role": "user", "content": "hi"}
MEMORY = Call({}, Remembered({7: REPLY}, {7: [{"role": "system", "content": "old", "instructions": True}, USER]}))
REQUEST = ChatRequest("m")


def parse(call: Call = NO_CALL, **fields: Any) -> ChatRequest:
    return openai_responses.parse({"model": "m", **fields}, call)


def messages(*items: Any, call: Call = MEMORY) -> list[Any]:
    return parse(call, input=list(items)).messages


def reply(message: dict[str, Any], finish: FinishReason = FinishReason.STOP) -> ChatReply:
    return ChatReply(7, "policy", 123, 10, [ChatChoice({"role": "assistant", **message}, finish, 5)])


def events(answer: ChatReply, request: ChatRequest = REQUEST) -> list[Any]:
    raw = [event.decode().split("\n", 2) for event in openai_responses.stream(answer, request)]
    parsed = [orjson.loads(data.removeprefix("data: ")) for _, data, _ in raw]
    assert [name for name, _, _ in raw] == [f"event: {data['type']}" for data in parsed]
    return parsed


def test_every_field_has_its_class() -> None:
    for name, kind in FIELDS["openai-responses"].items():
        if kind is FieldClass.REFUSED:
            with pytest.raises(RequestError, match=name) as caught:
                check_fields("openai-responses", {name: {"x": 1}})
            assert (caught.value.param, caught.value.status) == (name, 400)
        else:
            expected = (name,) if kind is FieldClass.IGNORED else ()
            assert check_fields("openai-responses", {name: "x"}) == expected
    assert check_fields("openai-responses", {"background": False, "brand_new": 1}) == ("brand_new",)


def test_every_kind_of_message() -> None:
    assert parse(input="hi").messages == [USER]
    assert messages(
        {"role": "developer", "content": "a"},
        {"type": "message", "role": "system", "content": [{"type": "input_text", "text": "b"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "c"}, "d"]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "e"}, {"type": "refusal", "refusal": "f"}]},
        {
            "role": "user",
            "content": [
                {"type": "input_text", "text": "g"},
                {"type": "input_image", "image_url": "data:x", "detail": "auto"},
            ],
        },
    ) == [
        {"role": "system", "content": "a"},
        {"role": "system", "content": "b"},
        {"role": "user", "content": "cd"},
        {"role": "assistant", "content": "ef"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "g"}, {"type": "image_url", "image_url": {"url": "data:x"}}],
        },
    ]


def test_the_items_of_one_reply_are_one_message() -> None:
    reasoning = {"type": "reasoning", "id": "rs_7", "summary": [{"type": "summary_text", "text": "think"}]}
    message = {"type": "message", "id": "msg_7", "role": "assistant", "content": " hm\n", "status": "completed"}
    output = {"type": "function_call_output", "call_id": "call_7_0", "output": [{"type": "input_text", "text": "out"}]}
    tool = {"role": "tool", "content": "out", "tool_call_id": "call_7_0"}
    assert messages(reasoning, message, WIRE_CALL, output) == [REPLY, tool]
    content = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "think"}], "summary": []}
    assert messages(content, message, WIRE_CALL | {"id": "fc_7_0"}) == [REPLY]
    two = messages(WIRE_CALL, WIRE_CALL | {"call_id": "foreign", "arguments": '{"x": '})
    assert two == [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                TOOL_CALL,
                {"id": "foreign", "type": "function", "function": {"name": "bash", "arguments": '{"x": '}},
            ],
        }
    ]


def test_replies_that_follow_each_other_stay_apart() -> None:
    """After an answer that was cut a harness may ask again at once: by turn where ids tell, else by order."""
    said = {"role": "assistant", "content": "a"}
    assert messages({**said, "id": "msg_7"}, {**said, "id": "msg_8"}) == [said, said]
    assert messages(said, said) == [said, said]
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "t"}]}
    assert messages(said, thought, said) == [said, {**said, "reasoning_content": "t"}]
    assert messages({**WIRE_CALL}, {**said, "id": "msg_7"}) == [{**said, "tool_calls": [TOOL_CALL]}]


@pytest.mark.parametrize(
    "item",
    [
        {"type": "reasoning", "id": "rs_7", "summary": []},
        {"type": "reasoning", "summary": [], "encrypted_content": "rs_7"},
        {"type": "reasoning", "id": "rs_renamed", "summary": [], "content": None, "encrypted_content": "rs_7"},
        {"type": "item_reference", "id": "rs_7"},
        {"id": "rs_7"},
    ],
)
def test_reasoning_by_its_handle(item: Any) -> None:
    assert messages(item, {"id": "msg_7"}, {"id": "fc_7_0"}) == [REPLY]


@pytest.mark.parametrize("foreign", ["gAAAAABo", "rs_8", "rs_999999999999999999999999", "msg_7", "", None])
def test_a_foreign_handle_of_reasoning_is_ignored(foreign: Any) -> None:
    assert messages({"type": "reasoning", "id": foreign, "summary": [], "encrypted_content": foreign}, USER) == [USER]


@pytest.mark.parametrize("unknown", ["rs_8", "msg_8", "fc_7_1", "resp_7", "call_7_0", "msg_abc", None, 5])
def test_a_reference_to_nothing_is_a_404(unknown: Any) -> None:
    with pytest.raises(RequestError, match="not found") as caught:
        messages({"type": "item_reference", "id": unknown})
    assert (caught.value.status, caught.value.param) == (404, "input")


def test_previous_response_without_its_instructions() -> None:
    more = {"role": "user", "content": "more"}
    request = parse(MEMORY, previous_response_id="resp_7", input="more")
    assert request.messages == [USER, REPLY, more]
    request = parse(MEMORY, previous_response_id="resp_7", input=[more], instructions="new")
    assert request.messages == [{"role": "system", "content": "new", "instructions": True}, USER, REPLY, more]
    for unknown in ("resp_8", "msg_7", "resp_abc"):
        with pytest.raises(RequestError, match="no such response") as caught:
            parse(MEMORY, previous_response_id=unknown, input="more")
        assert (caught.value.status, caught.value.code) == (400, "previous_response_not_found")
    with pytest.raises(RequestError, match="store: false"):
        parse(Call({}, Remembered({7: REPLY})), previous_response_id="resp_7", input="more")


def test_tools_that_are_no_functions_are_not_offered() -> None:
    function = {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}
    tools = [
        function,
        {"type": "namespace", "name": "n", "tools": [{"type": "mcp"}]},
        {"type": "web_search"},
        {"type": 5},
    ]
    request = parse(input="hi", tools=tools, include=["reasoning.encrypted_content", "file_search_call.results"])
    assert request.tools == [
        {
            "type": "function",
            "function": {"name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True},
        }
    ]
    assert request.ignored == (
        *("tools.mcp", "tools.web_search", "tools.a number"),
        "include.file_search_call.results",
    )


def test_limits_and_defaults() -> None:
    request = parse(input="hi", max_output_tokens=9, temperature=0, top_p=0.5, stream=True)
    assert (request.max_tokens, request.stream, request.store) == (9, True, True)
    assert (request.sampling.temperature, request.sampling.top_p) == (0.0, 0.5)
    assert parse(input="hi", store=False).store is False


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "input is missing"),
        ({"input": []}, "input is empty"),
        ({"input": 5}, "input is a number"),
        ({"input": ["x"]}, r"input\[0\] is a string, not an object"),
        ({"input": [{"content": "x"}]}, r"input\[0\] has type None; allowed are message"),
        ({"input": [{"role": "robot", "content": "x"}]}, r"input\[0\].role is 'robot'; allowed are user, system"),
        ({"input": [{"type": ["x"]}]}, r"input\[0\] has type \['x'\]; allowed are message, reasoning"),
        ({"input": [{"type": "custom_tool_call", "input": ""}]}, r"input\[0\].name is null"),
        ({"input": [{"type": "custom_tool_call", "name": "f", "input": 5}]}, r"input\[0\].input is a number"),
        ({"input": "x", "tools": [{"type": "custom"}]}, r"tools\[0\] is a custom tool without a name"),
        ({"input": "x", "tools": [{"type": "namespace", "tools": []}]}, r"tools\[0\].name is missing"),
        (
            {"input": "x", "tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function"}]}]},
            r"tools\[0\].tools\[0\] is a function without a name",
        ),
        ({"input": [{"type": "function_call", "arguments": "{}"}]}, r"input\[0\].name is null"),
        ({"input": [{"type": "function_call_output", "output": {}}]}, r"input\[0\].output is an object"),
        ({"input": [{"type": "reasoning", "summary": "x"}]}, r"input\[0\].summary is a string; send a list"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, r"content\[0\] has type 'input_file'"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]}, "with an image_url"),
        ({"input": [{"role": "system", "content": [{"type": "input_image", "image_url": "u"}]}]}, "input_image"),
        ({"input": "x", "tools": [{"type": "function"}]}, r"tools\[0\] is a function without a name"),
        ({"input": "x", "background": True}, "background is not supported"),
        ({"input": "x", "instructions": ["x"]}, "instructions is a list; send a string"),
    ],
)
def test_bad_input_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        parse(**fields)
    assert caught.value.status < 500


def test_plain_reply() -> None:
    request = parse(input="hi", metadata={"a": "b"}, tools=[{"type": "web_search"}], instructions="be brief")
    answer = openai_responses.reply(reply(REPLY), request)
    Response.model_validate(answer)
    assert answer["output"] == [
        {
            "id": "rs_7",
            "type": "reasoning",
            "summary": [{"type": "summary_text", "text": "think"}],
            "encrypted_content": "rs_7",
        },
        {
            "id": "msg_7",
            "type": "message",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": " hm\n", "annotations": [], "logprobs": []}],
        },
        {
            "id": "fc_7_0",
            "type": "function_call",
            "status": "completed",
            "call_id": "call_7_0",
            "name": "bash",
            "arguments": '{"command":"ls"}',
        },
    ]
    assert (answer["id"], answer["object"], answer["created_at"], answer["model"]) == (
        *("resp_7", "response", 123),
        "policy",
    )
    assert (answer["status"], answer["incomplete_details"], answer["error"]) == ("completed", None, None)
    assert (answer["metadata"], answer["tools"], answer["instructions"]) == (
        *({"a": "b"}, [{"type": "web_search"}]),
        "be brief",
    )
    assert answer["usage"] == {
        "input_tokens": 10,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 15,
    }


def test_a_reply_comes_back_as_it_was() -> None:
    """Also an empty one."""
    for message in (
        REPLY,
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": "", "tool_calls": [TOOL_CALL, {**TOOL_CALL, "id": "call_7_1"}]},
        {"role": "assistant", "content": "", "reasoning_content": "r"},
    ):
        items = openai_responses.reply(reply(message), REQUEST)["output"]
        assert messages(*items, call=NO_CALL) == [message]


@pytest.mark.parametrize(
    "message",
    [{"content": "cut"}, {"content": "", "tool_calls": [TOOL_CALL]}, {"content": "", "reasoning_content": "r"}],
)
def test_a_cut_reply_is_incomplete_even_with_tool_calls(message: dict[str, Any]) -> None:
    answer = openai_responses.reply(reply(message, FinishReason.LENGTH), REQUEST)
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert answer["output"][-1]["status"] == "incomplete"
    last = events(reply(message, FinishReason.LENGTH))[-1]
    assert (last["type"], last["response"]) == ("response.incomplete", answer)


def test_stream_events() -> None:
    parsed = events(reply(REPLY))
    for data in parsed:
        TypeAdapter[AnyEvent](AnyEvent).validate_python(data)
    assert [data["sequence_number"] for data in parsed] == list(range(len(parsed)))
    assert [data["type"].removeprefix("response.") for data in parsed] == [
        *("created", "in_progress"),
        *("output_item.added", "reasoning_summary_part.added", "reasoning_summary_text.delta"),
        *("reasoning_summary_text.done", "reasoning_summary_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done"),
        "output_item.done",
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    begun = parsed[0]["response"]
    assert (begun["status"], begun["output"], begun["usage"]) == ("in_progress", [], None)
    done = [data["item"] for data in parsed if data["type"] == "response.output_item.done"]
    assert done == parsed[-1]["response"]["output"]
    added = [data["item"] for data in parsed if data["type"] == "response.output_item.added"]
    assert [(item["id"], item.get("status")) for item in added] == [
        *(("rs_7", None), ("msg_7", "in_progress")),
        ("fc_7_0", "in_progress"),
    ]
    assert (added[0]["summary"], added[1]["content"], added[2]["arguments"]) == ([], [], "")


def test_errors() -> None:
    problem = BudgetExceeded("too long", param="input", code="context_length_exceeded")
    body = {
        "message": "too long",
        "type": "invalid_request_error",
        "param": "input",
        "code": "context_length_exceeded",
    }
    assert openai_responses.error(problem) == {"error": body}
    first, second, rest = openai_responses.stream_error(problem).decode().split("\n\n")
    assert rest == ""
    assert orjson.loads(first.removeprefix("event: error\ndata: ")) == {
        "type": "error",
        "sequence_number": 0,
        "error": body,
    }
    failed = orjson.loads(second.removeprefix("event: response.failed\ndata: "))
    Response.model_validate(failed["response"] | {"error": None})
    assert failed["response"]["error"] == {"code": "context_length_exceeded", "message": "too long"}
    other = openai_responses.stream_error(RequestError("no", code="capture_failed"))
    assert b'"error":{"code":"invalid_prompt","message":"no"}' in other


def test_custom_tools_and_those_of_a_namespace_are_functions_of_the_model() -> None:
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /x/"}
    tools = [
        {"type": "custom", "name": "apply_patch", "description": "Edit files.", "format": grammar},
        {
            "type": "namespace",
            "name": "mcp__crm",
            "description": "d",
            "tools": [
                {"type": "function", "name": "find", "parameters": {"type": "object"}},
                {"type": "custom", "name": "ask"},
            ],
        },
    ]
    functions = [tool["function"] for tool in parse(input="x", tools=tools).tools]
    assert [function["name"] for function in functions] == ["apply_patch", "mcp__crm__find", "mcp__crm__ask"]
    assert functions[0]["description"] == "Edit files.\n\nThe input follows this grammar (lark):\nstart: /x/"
    assert functions[0]["parameters"]["required"] == ["input"]
    assert functions[1]["parameters"] == {"type": "object"}


def test_items_that_say_nothing_to_another_model_are_skipped_and_counted() -> None:
    """As in the history of a conversation that OpenAI's model began."""
    skipped = [
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "x"}},
        {"type": "compaction", "encrypted_content": "x"},
        {"type": "local_shell_call", "call_id": "c", "status": "completed", "action": {"type": "exec", "command": []}},
        {"type": "local_shell_call_output", "id": "c", "output": "x"},
        {"type": "brand_new"},
    ]
    request = parse(input=[{"role": "user", "content": "a"}, *skipped, {"role": "user", "content": "b"}])
    assert [message["content"] for message in request.messages] == ["a", "b"]
    assert request.ignored == tuple(f"items.{item['type']}" for item in skipped)
    assert request.unmet[-2:] == ("items.local_shell_call_output", "items.other")


def test_the_output_of_a_tool_that_failed_may_be_an_object() -> None:
    output = {"type": "function_call_output", "call_id": "c", "output": {"content": "no", "success": False}}
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    assert parse(input=[call, output]).messages[-1] == {"role": "tool", "content": "no", "tool_call_id": "c"}
