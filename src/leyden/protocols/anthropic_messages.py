"""Anthropic Messages: `POST /v1/messages`, plain and streamed, and `POST /v1/messages/count_tokens`.

Content becomes messages as vLLM's endpoint of the same name makes them:

- Text blocks of `system` are joined without a separator, those of a `tool_result` with a newline.
- A block that begins with `x-anthropic-billing-header` says which client calls, differs from prompt to prompt, and is
  left out.
- The `tool_result` blocks of a user message come first, one tool message each; the rest is one user message.
- `is_error`, `citations` and `cache_control` are not shown to the model.

Consecutive assistant messages are one turn, as the API defines. A tool without an `input_schema` is one that
Anthropic's servers run or know the schema of: it is not offered to the model.

The `signature` of a thinking block names the turn that sampled it, so that a harness which keeps only the signature
gets its reasoning back.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Set
from typing import Any

from leyden.errors import RequestError
from leyden.protocols.chat import (
    Call,
    ChatChoice,
    ChatReply,
    ChatRequest,
    HarnessSampling,
    Recall,
    event,
    image,
    joined,
)
from leyden.protocols.checks import (
    arguments_object,
    arguments_text,
    field,
    integer,
    kind_of,
    number,
    objects,
    stop_strings,
)
from leyden.protocols.choice import of_anthropic
from leyden.protocols.fields import check_fields
from leyden.protocols.files import file_text, is_file, unshown
from leyden.protocols.wishes import unmet
from leyden.types import FinishReason, Json

PROTOCOL = "anthropic-messages"
KEEP_ALIVE = event({"type": "ping"}, "ping")
KEY_PARAMETER: str | None = None
CLIENT_METADATA = "x-anthropic-billing-header"
SIGNATURE = re.compile(r"leyden-turn-(\d{1,18})")
# What Anthropic's servers ran in a turn of their own model: it says nothing to another, and is skipped.
_SERVERS = frozenset(
    {
        *("server_tool_use", "web_search_tool_result", "web_fetch_tool_result", "code_execution_tool_result"),
        *("bash_code_execution_tool_result", "text_editor_code_execution_tool_result", "tool_search_tool_result"),
        *("mcp_tool_use", "mcp_tool_result", "container_upload", "compaction"),
    }
)
_VERSION = re.compile(r"_\d{8}$")
ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}
# What the SDK's tool runner, which asks for a thread first, takes as the sign to send whole conversations.
NO_THREADS = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


def parse(body: Json, call: Call) -> ChatRequest:
    """The request in Leyden's words. Raises RequestError naming the field and what is allowed."""
    ignored = check_fields(PROTOCOL, body)
    tool_choice = of_anthropic(body)
    ignored += (*_left_out(body), *unshown(body.get("messages")))
    ignored += ("tool_choice",) if tool_choice.forced else ()
    return ChatRequest(
        model=field(body, "model", str, required=True),
        messages=_conversation(body, call.recall),
        tools=_tools(body),
        callable_tools=tool_choice.callable_tools,
        one_call=tool_choice.one_call,
        template_kwargs=field(body, "chat_template_kwargs", dict) or {},
        stop=stop_strings(body, "stop_sequences"),
        max_tokens=integer(body, "max_tokens", 1, required=True),
        stream=field(body, "stream", bool) or False,
        sampling=HarnessSampling(
            temperature=number(body, "temperature", 0, 2),
            top_p=number(body, "top_p", 0, 1),
            top_k=integer(body, "top_k", -1),
        ),
        protocol=PROTOCOL,
        ignored=ignored,
        unmet=unmet(PROTOCOL, body, ignored),
    )


def parse_count(body: Json, call: Call) -> ChatRequest:
    """What `count_tokens` counts: the same conversation and tools, without `max_tokens`."""
    return ChatRequest(
        model=field(body, "model", str, required=True),
        messages=_conversation(body, call.recall),
        tools=_tools(body),
        template_kwargs=field(body, "chat_template_kwargs", dict) or {},
        protocol=PROTOCOL,
    )


def count(tokens: int) -> Json:
    return {"input_tokens": tokens}


def reply(answer: ChatReply, request: ChatRequest) -> Json:
    """The body of a plain answer."""
    choice = answer.choices[0]
    content = [block | delta for block, delta in _blocks(answer)]
    usage = _usage(answer, choice.completion_tokens)
    return _envelope(answer, request) | {"content": content, **_stop(choice), "usage": usage}


def stream(answer: ChatReply, request: ChatRequest) -> Iterator[bytes]:
    """The events of a streamed answer, from the finished one."""
    choice = answer.choices[0]
    start: Json = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": _usage(answer, 0)}
    yield _event("message_start", message=_envelope(answer, request) | start)
    for index, (block, full) in enumerate(_blocks(answer)):
        yield _event("content_block_start", index=index, content_block=block | _EMPTY[block["type"]])
        for name, value in full.items():
            yield _event("content_block_delta", index=index, delta=_delta(name, value))
        yield _event("content_block_stop", index=index)
    yield _event("message_delta", delta=_stop(choice), usage=_usage(answer, choice.completion_tokens))
    yield _event("message_stop")


def error(problem: RequestError) -> Json:
    kind = ERROR_TYPES.get(problem.status, "invalid_request_error" if problem.status < 500 else "api_error")
    message = str(problem)
    if problem.code == "context_length_exceeded":
        message = f"prompt is too long: {message}"
    details = {"details": NO_THREADS} if problem.param == "thread" else {}
    return {"type": "error", "error": {"type": kind, "message": message, **details}}


def stream_error(problem: RequestError) -> bytes:
    return event(error(problem), "error")


def _conversation(body: Json, recall: Recall) -> list[Json]:
    items = objects(body, "messages", required=True)
    if not items:
        raise RequestError("messages is empty; send at least one message", param="messages")
    system = body.get("system")
    messages = _system({"content": system}, "system", recall) if system is not None else []
    for path, item in items:
        role = item.get("role")
        parse_role = _ROLES.get(role) if isinstance(role, str) else None
        if parse_role is None:
            allowed = ", ".join(sorted(_ROLES))
            raise RequestError(f"{path}.role is {role!r}; allowed are {allowed}", param=f"{path}.role")
        new = parse_role(item, f"{path}.content", recall)
        if new and messages and new[0]["role"] == messages[-1]["role"] == "assistant":
            messages[-1] = _one_turn(messages[-1], new[0])
        else:
            messages += new
    return messages


def _system(item: Json, path: str, _recall: Recall) -> list[Json]:
    content = item.get("content")
    if isinstance(content, str):
        text = content
    else:
        texts = [_text(block, where) for where, block in _content_blocks(content, path, {"text"})]
        text = "".join(text for text in texts if not text.startswith(CLIENT_METADATA))
    return [{"role": "system", "content": text}] if text else []


def _user(item: Json, path: str, _recall: Recall) -> list[Json]:
    blocks = _content_blocks(item.get("content"), path, {"text", "image", "tool_result"})
    results = [_tool_result(block, where) for where, block in blocks if block["type"] == "tool_result"]
    parts = [_part(block, where) for where, block in blocks if block["type"] != "tool_result"]
    return [*results, {"role": "user", "content": joined(parts)}] if parts or not results else results


def _assistant(item: Json, path: str, recall: Recall) -> list[Json]:
    allowed = {"text", "thinking", "redacted_thinking", "tool_use"}
    blocks = [
        named for named in _content_blocks(item.get("content"), path, allowed | _SERVERS) if named[1]["type"] in allowed
    ]
    of_type: dict[str, list[tuple[str, Json]]] = {name: [] for name in allowed}
    for where, block in blocks:
        of_type[block["type"]].append((where, block))
    message: Json = {"role": "assistant", "content": "".join(_text(block, where) for where, block in of_type["text"])}
    if reasoning := "".join(_thinking(block, where, recall) for where, block in of_type["thinking"]):
        message["reasoning_content"] = reasoning
    if calls := [_tool_use(block, where) for where, block in of_type["tool_use"]]:
        message["tool_calls"] = calls
    return [message]


_ROLES: dict[str, Callable[[Json, str, Recall], list[Json]]] = {
    "system": _system,
    "user": _user,
    "assistant": _assistant,
}


def _one_turn(first: Json, second: Json) -> Json:
    """Two assistant messages in a row as one."""
    merged: Json = {"role": "assistant"}
    for name in ("content", "reasoning_content", "tool_calls"):
        if name in first and name in second:
            merged[name] = first[name] + second[name]
        elif name in first or name in second:
            merged[name] = first[name] if name in first else second[name]
    return merged


def _content_blocks(content: Any, path: str, allowed: Set[str]) -> list[tuple[str, Json]]:
    """The blocks of `content`, each with its path; a string is one block of text."""
    if isinstance(content, str):
        return [(path, {"type": "text", "text": content})]
    if not isinstance(content, list):
        raise RequestError(f"{path} is {kind_of(content)}; send a string or a list of blocks", param=path)
    parent, _, name = path.rpartition(".")
    blocks = objects({name: content}, name, path=parent)
    for where, block in blocks:
        kind = block.get("type")
        if not isinstance(kind, str) or (kind not in allowed and not ("image" in allowed and is_file(block))):
            names = ", ".join(sorted(allowed - _SERVERS))
            raise RequestError(f"{where} has type {kind!r}; allowed are blocks of type {names}", param=where)
    return blocks


def _text(block: Json, path: str) -> str:
    text: str = field(block, "text", str, required=True, path=path)
    return text


def _part(block: Json, path: str) -> str | Json:
    if is_file(block):
        return file_text(block)
    return _text(block, path) if block["type"] == "text" else _image(block, path)


def _image(block: Json, path: str) -> Json:
    source = field(block, "source", dict, required=True, path=path)
    where = f"{path}.source"
    if source.get("type") == "url":
        return image(field(source, "url", str, required=True, path=where))
    if source.get("type") == "base64":
        media_type = field(source, "media_type", str, required=True, path=where)
        data = field(source, "data", str, required=True, path=where)
        return image(f"data:{media_type};base64,{data}")
    raise RequestError(f"{where} has type {source.get('type')!r}; allowed are base64 and url", param=where)


def _tool_result(block: Json, path: str) -> Json:
    call_id = field(block, "tool_use_id", str, required=True, path=path)
    return {"role": "tool", "content": _result_content(block.get("content"), path), "tool_call_id": call_id}


def _result_content(content: Any, path: str) -> str | list[Json]:
    if content is None:
        return ""
    blocks = _content_blocks(content, f"{path}.content", {"text", "image", "tool_reference"})
    parts = [
        field(block, "tool_name", str, required=True, path=where)
        if block["type"] == "tool_reference"
        else _part(block, where)
        for where, block in blocks
    ]
    texts = [part for part in parts if isinstance(part, str)]
    return "\n".join(texts) if len(texts) == len(parts) else joined(parts)


def _thinking(block: Json, path: str, recall: Recall) -> str:
    """The text of a thinking block, or of the turn that its signature names where the harness dropped the text."""
    text: str = field(block, "thinking", str, path=path) or ""
    if text:
        return text
    named = SIGNATURE.fullmatch(field(block, "signature", str, path=path) or "")
    recalled = recall.reply(int(named[1])) if named else None
    return str(recalled.get("reasoning_content", "")) if recalled else ""


def _tool_use(block: Json, path: str) -> Json:
    return {
        "id": field(block, "id", str, required=True, path=path),
        "type": "function",
        "function": {
            "name": field(block, "name", str, required=True, path=path),
            "arguments": field(block, "input", dict, path=path) or {},
        },
    }


def _tools(body: Json) -> list[Json]:
    return [_tool(item, path) for path, item in objects(body, "tools") if not _known_to_anthropic_alone(item)]


def _left_out(body: Json) -> tuple[str, ...]:
    """The kinds of tools that the model is not shown, without the dates of their versions."""
    kinds = [str(item["type"]) for _, item in objects(body, "tools") if _known_to_anthropic_alone(item)]
    return tuple(f"tools.{_VERSION.sub('', kind)}" for kind in kinds)


def _known_to_anthropic_alone(tool: Json) -> bool:
    """Web search, bash and their like come with a type of their own and no schema."""
    return tool.get("type", "custom") != "custom" and "input_schema" not in tool


def _tool(item: Json, path: str) -> Json:
    function: Json = {"name": field(item, "name", str, required=True, path=path)}
    if description := field(item, "description", str, path=path):
        function["description"] = description
    function["parameters"] = field(item, "input_schema", dict, required=True, path=path)
    return {"type": "function", "function": function}


def _envelope(answer: ChatReply, request: ChatRequest) -> Json:
    """Names the model that was asked for: Claude Code drops the thinking of messages that name another."""
    return {"id": f"msg_{answer.turn_id}", "type": "message", "role": "assistant", "model": request.model}


def _usage(answer: ChatReply, output_tokens: int) -> Json:
    return {
        "input_tokens": answer.prompt_tokens,
        "output_tokens": output_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
    }


def _stop(choice: ChatChoice) -> Json:
    """`max_tokens` wins over everything, and complete tool calls over a stop string."""
    if choice.finish_reason is FinishReason.LENGTH:
        reason = "max_tokens"
    elif choice.tool_calls:
        reason = "tool_use"
    else:
        reason = "end_turn" if choice.stop_string is None else "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": choice.stop_string if reason == "stop_sequence" else None}


_EMPTY: dict[str, Json] = {
    "thinking": {"thinking": "", "signature": ""},
    "text": {"text": ""},
    "tool_use": {"input": {}},
}


def _blocks(answer: ChatReply) -> Iterator[tuple[Json, Json]]:
    """The blocks of the answer: what their start says, and what their deltas add. None of them is empty."""
    message = answer.choices[0].message
    if message.get("reasoning_content"):
        signature = f"leyden-turn-{answer.turn_id}"
        yield {"type": "thinking"}, {"thinking": message["reasoning_content"], "signature": signature}
    if message["content"]:
        yield {"type": "text"}, {"text": message["content"]}
    for call in answer.choices[0].tool_calls:
        function = call["function"]
        start = {"type": "tool_use", "id": call["id"], "name": function["name"]}
        yield start, {"input": arguments_object(function["arguments"])}


def _delta(name: str, value: Any) -> Json:
    if name == "input":
        return {"type": "input_json_delta", "partial_json": arguments_text(value)}
    return {"type": f"{name}_delta", name: value}


def _event(name: str, **data: Any) -> bytes:
    return event({"type": name, **data}, name)
