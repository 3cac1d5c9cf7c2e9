"""OpenAI chat completions: `POST /v1/chat/completions`, plain and streamed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import orjson

from leyden.errors import RequestError
from leyden.protocols.chat import ChatChoice, ChatReply, ChatRequest, HarnessSampling
from leyden.protocols.fields import check_fields
from leyden.types import FinishReason, Json

PROTOCOL = "openai-chat"
MAX_CHOICES = 128
_T = TypeVar("_T")


def parse(body: Json) -> ChatRequest:
    """The request in Leyden's words. Raises RequestError naming the field and what is allowed."""
    ignored = check_fields(PROTOCOL, body)
    messages = _field(body, "messages", list, required=True)
    if not messages:
        raise RequestError("messages is empty; send at least one message", param="messages")
    stream_options = _field(body, "stream_options", dict) or {}
    return ChatRequest(
        model=_field(body, "model", str, required=True),
        messages=[_message(item, f"messages[{i}]") for i, item in enumerate(messages)],
        tools=[_tool(item, f"tools[{i}]") for i, item in enumerate(_field(body, "tools", list) or [])],
        stop=_stop(body.get("stop")),
        max_tokens=_integer(body, "max_completion_tokens", 1) or _integer(body, "max_tokens", 1),
        n=_integer(body, "n", 1, MAX_CHOICES) or 1,
        stream=_field(body, "stream", bool) or False,
        include_usage=bool(stream_options.get("include_usage")),
        sampling=HarnessSampling(
            temperature=_number(body, "temperature", 0, 2),
            top_p=_number(body, "top_p", 0, 1),
            top_k=_integer(body, "top_k", -1),
            seed=_integer(body, "seed"),
        ),
        ignored=ignored,
    )


def reply(answer: ChatReply) -> Json:
    """The body of a plain answer."""
    return _envelope(answer, "chat.completion") | {
        "choices": [
            {
                "index": index,
                "message": {"role": "assistant", "refusal": None, **_wire_message(choice)},
                "logprobs": None,
                "finish_reason": _finish_reason(choice),
            }
            for index, choice in enumerate(answer.choices)
        ],
        "usage": _usage(answer),
    }


def stream(answer: ChatReply, *, include_usage: bool) -> Iterator[bytes]:
    """The events of a streamed answer, from the finished one."""
    head = _envelope(answer, "chat.completion.chunk")
    tail: Json = {"usage": None} if include_usage else {}
    for index, choice in enumerate(answer.choices):
        for delta, finish_reason in _deltas(choice):
            part = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
            yield event(head | {"choices": [part]} | tail)
    if include_usage:
        yield event(head | {"choices": [], "usage": _usage(answer)})
    yield b"data: [DONE]\n\n"


def event(data: Json) -> bytes:
    return b"data: " + orjson.dumps(data) + b"\n\n"


def error(problem: RequestError) -> Json:
    kind = "invalid_request_error" if problem.status < 500 else "server_error"
    return {"error": {"message": str(problem), "type": kind, "param": problem.param, "code": problem.code}}


def models(names: list[str]) -> Json:
    data = [{"id": name, "object": "model", "created": 0, "owned_by": "leyden"} for name in names]
    return {"object": "list", "data": data}


def _message(item: Any, path: str) -> Json:
    if not isinstance(item, dict):
        raise RequestError(f"{path} is {_kind(item)}, not an object", param=path)
    role = item.get("role")
    parse_role = _ROLES.get(role) if isinstance(role, str) else None
    if parse_role is None:
        allowed = ", ".join(sorted(_ROLES))
        raise RequestError(f"{path}.role is {role!r}; allowed are {allowed}", param=f"{path}.role")
    return parse_role(item, path)


def _system(item: Json, path: str) -> Json:
    return {"role": "system", "content": _text(item.get("content"), f"{path}.content")}


def _user(item: Json, path: str) -> Json:
    return {"role": "user", "content": _text(item.get("content"), f"{path}.content")}


def _assistant(item: Json, path: str) -> Json:
    message: Json = {"role": "assistant", "content": _text(item.get("content"), f"{path}.content")}
    reasoning = item.get("reasoning_content") or item.get("reasoning")
    if isinstance(reasoning, str):
        message["reasoning_content"] = reasoning
    calls = _field(item, "tool_calls", list, path=path) or []
    if calls:
        message["tool_calls"] = [_tool_call(call, f"{path}.tool_calls[{i}]") for i, call in enumerate(calls)]
    return message


def _tool_message(item: Json, path: str) -> Json:
    message: Json = {"role": "tool", "content": _text(item.get("content"), f"{path}.content")}
    for name in ("tool_call_id", "name"):
        if isinstance(item.get(name), str):
            message[name] = item[name]
    return message


_ROLES: dict[str, Callable[[Json, str], Json]] = {
    "system": _system,
    "developer": _system,
    "user": _user,
    "assistant": _assistant,
    "tool": _tool_message,
}


def _text(content: Any, path: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(_text_part(part, f"{path}[{i}]") for i, part in enumerate(content))
    raise RequestError(f"{path} is {_kind(content)}; send a string or a list of text parts", param=path)


def _text_part(part: Any, path: str) -> str:
    if isinstance(part, dict):
        if part.get("type") == "text" and isinstance(part.get("text"), str):
            return str(part["text"])
        if part.get("type") == "refusal" and isinstance(part.get("refusal"), str):
            return str(part["refusal"])
        raise RequestError(f"{path} has type {part.get('type')!r}; only text can be recorded", param=path)
    raise RequestError(f"{path} is {_kind(part)}, not a content part", param=path)


def _tool_call(call: Any, path: str) -> Json:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(f"{path} has no function with a name", param=path)
    arguments = function.get("arguments", "")
    parsed: Json = {"type": "function", "function": {"name": function["name"], "arguments": arguments_of(arguments)}}
    return parsed | ({"id": call["id"]} if isinstance(call.get("id"), str) else {})


def arguments_of(arguments: Any) -> Any:
    """The object that a JSON string holds; anything else as it is."""
    if not isinstance(arguments, str):
        return arguments
    try:
        value = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return arguments
    return value if isinstance(value, dict) else arguments


def _tool(item: Any, path: str) -> Json:
    function = item.get("function") if isinstance(item, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(f"{path} is not a function tool with a name", param=path)
    return {"type": "function", "function": function}


def _stop(stop: Any) -> tuple[str, ...]:
    strings = [stop] if isinstance(stop, str) else stop if isinstance(stop, list) else [] if stop is None else None
    if strings is None or not all(isinstance(s, str) and s for s in strings):
        raise RequestError(f"stop is {stop!r:.80}; send a string or a list of non-empty strings", param="stop")
    return tuple(strings)


def _field(body: Json, name: str, kind: type[_T], *, required: bool = False, path: str = "") -> Any:
    value = body.get(name)
    where = f"{path}.{name}" if path else name
    if value is None:
        if required:
            raise RequestError(f"{where} is missing", param=where, code="missing_required_parameter")
        return None
    if not isinstance(value, kind):
        raise RequestError(f"{where} is {_kind(value)}; send {_NAMES[kind]}", param=where, code="invalid_type")
    return value


def _number(body: Json, name: str, low: float, high: float) -> float | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(f"{name} is {_kind(value)}; send a number", param=name, code="invalid_type")
    if not low <= value <= high:
        raise RequestError(f"{name} is {value}; allowed is {low} to {high}", param=name, code="invalid_value")
    return float(value)


def _integer(body: Json, name: str, low: int = -(2**63), high: int = 2**63 - 1) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} is {_kind(value)}; send an integer", param=name, code="invalid_type")
    if not low <= value <= high:
        raise RequestError(f"{name} is {value}; allowed is {low} to {high}", param=name, code="invalid_value")
    return value


_NAMES: dict[Any, str] = {str: "a string", bool: "true or false", list: "a list", dict: "an object"}


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    return {int: "a number", float: "a number", str: "a string", list: "a list", dict: "an object"}[type(value)]


def _envelope(answer: ChatReply, kind: str) -> Json:
    return {"id": answer.reply_id, "object": kind, "created": answer.created, "model": answer.model}


def _usage(answer: ChatReply) -> Json:
    total = answer.prompt_tokens + answer.completion_tokens
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "total_tokens": total,
    }


def _wire_message(choice: ChatChoice) -> Json:
    message: Json = {"content": choice.message["content"] or (None if choice.tool_calls else "")}
    if "reasoning_content" in choice.message:
        message["reasoning_content"] = choice.message["reasoning_content"]
    if choice.tool_calls:
        message["tool_calls"] = [_wire_call(call) for call in choice.tool_calls]
    return message


def _wire_call(call: Json) -> Json:
    function = call["function"]
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else orjson.dumps(arguments).decode()
    return {"id": call["id"], "type": "function", "function": {"name": function["name"], "arguments": text}}


def _finish_reason(choice: ChatChoice) -> str:
    if choice.finish_reason is FinishReason.LENGTH:
        return "length"
    return "tool_calls" if choice.tool_calls else "stop"


def _deltas(choice: ChatChoice) -> Iterator[tuple[Json, str | None]]:
    message = _wire_message(choice)
    yield {"role": "assistant", "content": ""}, None
    if message.get("reasoning_content"):
        yield {"reasoning_content": message["reasoning_content"]}, None
    if message["content"]:
        yield {"content": message["content"]}, None
    for index, call in enumerate(message.get("tool_calls", [])):
        yield {"tool_calls": [{"index": index, **call}]}, None
    yield {}, _finish_reason(choice)
