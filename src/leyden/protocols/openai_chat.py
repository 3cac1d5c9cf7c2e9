"""OpenAI chat completions: `POST /v1/chat/completions`, plain and streamed.

Reasoning goes out as `reasoning_content`, the name that every harness we ran reads, and comes back under that name or
as `reasoning`. Messages of the time before tools (`function_call`, role `function`) are read as tool calls and results.
A `name` of a user or an assistant is left out, as chat templates do. Custom tools are `custom_tools`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from leyden.errors import RequestError
from leyden.protocols.chat import (
    Call,
    ChatChoice,
    ChatReply,
    ChatRequest,
    HarnessSampling,
    Recall,
    content_of,
    event,
    image,
)
from leyden.protocols.checks import arguments_of, arguments_text, field, integer, kind_of, number, objects, stop_strings
from leyden.protocols.choice import of_openai
from leyden.protocols.custom_tools import arguments_of_input, custom_function, grammar_of, input_of
from leyden.protocols.fields import check_fields
from leyden.protocols.files import file_text, is_file, unshown
from leyden.protocols.wishes import unmet
from leyden.types import FinishReason, Json

PROTOCOL = "openai-chat"
KEEP_ALIVE = b": keep-alive\n\n"
KEY_PARAMETER: str | None = None
MAX_CHOICES = 128


def parse(body: Json, call: Call) -> ChatRequest:
    """The request in Leyden's words. Raises RequestError naming the field and what is allowed."""
    ignored = check_fields(PROTOCOL, body)
    messages = objects(body, "messages", required=True)
    if not messages:
        raise RequestError("messages is empty; send at least one message", param="messages")
    tool_choice = of_openai(body)
    ignored += tuple(unshown(body.get("messages")))
    ignored += ("tool_choice",) if tool_choice.forced else ()
    custom = [tool["custom"] for _, tool in objects(body, "tools") if isinstance(tool.get("custom"), dict)]
    ignored += ("tools.grammar",) * any(grammar_of(tool.get("format")) for tool in custom)
    return ChatRequest(
        model=field(body, "model", str, required=True),
        messages=[_message(item, path, call.recall) for path, item in messages],
        tools=[_tool(item, path) for path, item in objects(body, "tools")],
        callable_tools=tool_choice.callable_tools,
        one_call=tool_choice.one_call,
        template_kwargs=field(body, "chat_template_kwargs", dict) or {},
        stop=stop_strings(body, "stop"),
        max_tokens=integer(body, "max_completion_tokens", 1) or integer(body, "max_tokens", 1),
        n=integer(body, "n", 1, MAX_CHOICES) or 1,
        stream=field(body, "stream", bool) or False,
        include_usage=wants_usage(body),
        sampling=harness_sampling(body),
        echo={"custom": [tool.get("name") for tool in custom]},
        ignored=ignored,
        unmet=unmet(PROTOCOL, body, ignored),
    )


def reply(answer: ChatReply, request: ChatRequest) -> Json:
    """The body of a plain answer."""
    return _envelope(answer, "chat.completion") | {
        "choices": [
            {
                "index": index,
                "message": {"role": "assistant", "refusal": None, **_reply_message(choice, request)},
                "logprobs": None,
                "finish_reason": _finish_reason(choice),
            }
            for index, choice in enumerate(answer.choices)
        ],
        "usage": usage(answer),
    }


def stream(answer: ChatReply, request: ChatRequest) -> Iterator[bytes]:
    """The events of a streamed answer, from the finished one."""
    head = _envelope(answer, "chat.completion.chunk")
    tail: Json = {"usage": None} if request.include_usage else {}
    for index, choice in enumerate(answer.choices):
        for delta, finish_reason in _deltas(choice, request):
            part = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
            yield event(head | {"choices": [part]} | tail)
    if request.include_usage:
        yield event(head | {"choices": [], "usage": usage(answer)})
    yield b"data: [DONE]\n\n"


def error(problem: RequestError) -> Json:
    kind = "invalid_request_error" if problem.status < 500 else "server_error"
    return {"error": {"message": str(problem), "type": kind, "param": problem.param, "code": problem.code}}


def stream_error(problem: RequestError) -> bytes:
    return event(error(problem))


def models(names: list[str]) -> Json:
    data = [{"id": name, "object": "model", "created": 0, "owned_by": "leyden"} for name in names]
    return {"object": "list", "data": data}


def _message(item: Json, path: str, recall: Recall) -> Json:
    role = item.get("role")
    parse_role = _ROLES.get(role) if isinstance(role, str) else None
    if parse_role is None:
        allowed = ", ".join(sorted(_ROLES))
        raise RequestError(f"{path}.role is {role!r:.80}; allowed are {allowed}", param=f"{path}.role")
    return parse_role(item, path, recall)


def _system(item: Json, path: str, _recall: Recall) -> Json:
    return {"role": "system", "content": _content(item.get("content"), f"{path}.content")}


def _user(item: Json, path: str, _recall: Recall) -> Json:
    return {"role": "user", "content": _content(item.get("content"), f"{path}.content", images=True)}


def _assistant(item: Json, path: str, recall: Recall) -> Json:
    content = _content(item.get("content"), f"{path}.content") or _content(item.get("refusal"), f"{path}.refusal")
    message: Json = {"role": "assistant", "content": content}
    reasoning = item.get("reasoning_content") or item.get("reasoning")
    if isinstance(reasoning, str):
        message["reasoning_content"] = reasoning
    if calls := objects(item, "tool_calls", path=path):
        message["tool_calls"] = [_tool_call(call, where, recall) for where, call in calls]
    elif item.get("function_call") is not None:
        message["tool_calls"] = [_tool_call({"function": item["function_call"]}, f"{path}.function_call", recall)]
    return message


def _tool_message(item: Json, path: str, _recall: Recall) -> Json:
    message: Json = {"role": "tool", "content": _content(item.get("content"), f"{path}.content", images=True)}
    for name in ("tool_call_id", "name"):
        if isinstance(item.get(name), str):
            message[name] = item[name]
    return message


_ROLES: dict[str, Callable[[Json, str, Recall], Json]] = {
    "system": _system,
    "developer": _system,
    "user": _user,
    "assistant": _assistant,
    "tool": _tool_message,
    "function": _tool_message,
}


def _content(content: Any, path: str, *, images: bool = False) -> str | list[Json]:
    return content_of(content, path, partial(_part, images=images))


def _part(part: Any, path: str, *, images: bool) -> str | Json:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise RequestError(f"{path} is {kind_of(part)}, not a content part", param=path)
    kind = part.get("type")
    if kind in ("text", "refusal") and isinstance(part.get(kind), str):
        return str(part[kind])
    url = part.get("image_url")
    if images and kind == "image_url" and isinstance(url, dict) and isinstance(url.get("url"), str):
        return image(url["url"])
    if is_file(part):
        return file_text(part)
    allowed = "text and image_url" if images else "text"
    raise RequestError(f"{path} has type {kind!r:.80}; allowed are parts of type {allowed}", param=path)


def _tool_call(call: Json, path: str, recall: Recall) -> Json:
    if isinstance(custom := call.get("custom"), dict):
        text = field(custom, "input", str, path=f"{path}.custom") or ""
        call = call | {"function": custom | {"arguments": arguments_of_input(text, call.get("id"), recall)}}
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(f"{path} has no function with a name", param=path)
    arguments = arguments_of(function.get("arguments"), f"{path}.function.arguments")
    parsed: Json = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return parsed | ({"id": call["id"]} if isinstance(call.get("id"), str) else {})


def _tool(item: Json, path: str) -> Json:
    if item.get("type") == "custom":
        return {"type": "function", "function": _custom(item, path)}
    function = item.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(f"{path} is not a function tool with a name", param=path)
    field(function, "description", str, path=f"{path}.function")
    field(function, "parameters", dict, path=f"{path}.function")
    return {"type": "function", "function": function}


def _custom(item: Json, path: str) -> Json:
    where = f"{path}.custom"
    custom = field(item, "custom", dict, required=True, path=path)
    name = field(custom, "name", str, required=True, path=where)
    form = field(custom, "format", dict, path=where) or {}
    return custom_function(name, field(custom, "description", str, path=where), form)


def _envelope(answer: ChatReply, kind: str) -> Json:
    return {"id": f"chatcmpl-{answer.turn_id}", "object": kind, "created": answer.created, "model": answer.model}


def harness_sampling(body: Json) -> HarnessSampling:
    return HarnessSampling(
        temperature=number(body, "temperature", 0, 2),
        top_p=number(body, "top_p", 0, 1),
        top_k=integer(body, "top_k", -1),
        seed=integer(body, "seed"),
    )


def wants_usage(body: Json) -> bool:
    """Whether a stream ends with a chunk of usage."""
    return bool((field(body, "stream_options", dict) or {}).get("include_usage"))


def usage(answer: ChatReply) -> Json:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
    }


def _reply_message(choice: ChatChoice, request: ChatRequest) -> Json:
    message: Json = {"content": choice.message["content"] or (None if choice.tool_calls else "")}
    if "reasoning_content" in choice.message:
        message["reasoning_content"] = choice.message["reasoning_content"]
    if choice.tool_calls:
        message["tool_calls"] = [_reply_call(call, request) for call in choice.tool_calls]
    return message


def _reply_call(call: Json, request: ChatRequest) -> Json:
    function = call["function"]
    if function["name"] in request.echo.get("custom", ()):
        custom = {"name": function["name"], "input": input_of(function["arguments"])}
        return {"id": call["id"], "type": "custom", "custom": custom}
    text = arguments_text(function["arguments"])
    return {"id": call["id"], "type": "function", "function": {"name": function["name"], "arguments": text}}


def _finish_reason(choice: ChatChoice) -> str:
    if choice.finish_reason is FinishReason.LENGTH:
        return "length"
    return "tool_calls" if choice.tool_calls else "stop"


def _deltas(choice: ChatChoice, request: ChatRequest) -> Iterator[tuple[Json, str | None]]:
    message = _reply_message(choice, request)
    yield {"role": "assistant", "content": ""}, None
    if message.get("reasoning_content"):
        yield {"reasoning_content": message["reasoning_content"]}, None
    if message["content"]:
        yield {"content": message["content"]}, None
    for index, call in enumerate(message.get("tool_calls", [])):
        yield {"tool_calls": [{"index": index, **call}]}, None
    yield {}, _finish_reason(choice)
