"""Items of the Responses protocol, which is what conversations are made of there: input items to messages, an answer
to output items.

The items of one reply come one by one: reasoning, message, function calls. On their way back they become one assistant
message again. Ids name the turn that they come from, so a harness may send the id alone:

    rs_7     the reasoning of turn 7, also as `encrypted_content`
    msg_7    its text
    fc_7_0   its first call, of a function, whose `call_id` is call_7_0
    ctc_7_0  the same of a custom tool
    resp_7   the response

What only OpenAI's servers or models know (their own tools' calls, compactions, ...) says nothing to another model: such
an item is skipped and counted, for a harness sends its history whole or not at all.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from leyden.errors import NotFound, RequestError
from leyden.protocols.chat import ChatReply, Recall, content_of, image
from leyden.protocols.checks import arguments_of, field, kind_of, objects
from leyden.protocols.custom_tools import arguments_of_input
from leyden.protocols.files import file_text, is_file
from leyden.protocols.openai_responses_tools import Offered, call_item, shown_name
from leyden.types import FinishReason, Json

_ID = re.compile(r"(rs|msg|fc|ctc|call|resp)_(\d{1,18})(?:_(\d{1,9}))?")


@dataclass(frozen=True, slots=True)
class Handle:
    """What one of our ids names."""

    kind: str
    turn_id: int
    index: int = 0


def handle(value: Any) -> Handle | None:
    """None for an id that cannot be ours."""
    match = _ID.fullmatch(value) if isinstance(value, str) else None
    return Handle(match[1], int(match[2]), int(match[3] or 0)) if match else None


def input_messages(body: Json, recall: Recall) -> list[Json]:
    """The messages that `input` holds. Raises RequestError; NotFound for a reference to an unknown item."""
    if isinstance(body.get("input"), str):
        return [{"role": "user", "content": body["input"]}]
    messages: list[Json] = []
    open_turn: int | None = None
    for path, item in objects(body, "input"):
        message, turn_id = _message(item, path, recall)
        if message is None:
            continue
        if messages and _belongs(message, turn_id, messages[-1], open_turn):
            messages[-1] = _merged(messages[-1], message)
            open_turn = turn_id if open_turn is None else open_turn
        else:
            messages.append(message)
            open_turn = turn_id
    return messages


def skipped_items(body: Json) -> list[str]:
    """The kinds of the items that `input_messages` skips, as fields are named."""
    items = body["input"] if isinstance(body.get("input"), list) else []
    kinds = [item.get("type") for item in items if isinstance(item, dict)]
    return [f"items.{kind}" for kind in kinds if isinstance(kind, str) and kind not in _ITEMS]


def output_items(answer: ChatReply, offered: dict[str, Offered]) -> list[Json]:
    """The answer as items. The last one of an answer that was cut is `incomplete`."""
    turn_id, choice = answer.turn_id, answer.choices[0]
    message, calls = choice.message, choice.tool_calls
    items: list[Json] = []
    if reasoning := message.get("reasoning_content"):
        summary = [{"type": "summary_text", "text": reasoning}]
        items.append(
            {"id": f"rs_{turn_id}", "type": "reasoning", "summary": summary, "encrypted_content": f"rs_{turn_id}"}
        )
    if message["content"] or not calls:
        part = {"type": "output_text", "text": message["content"], "annotations": [], "logprobs": []}
        items.append(
            {"id": f"msg_{turn_id}", "type": "message", "status": "completed", "role": "assistant", "content": [part]}
        )
    for index, call in enumerate(calls):
        said = call_item(call, offered)
        prefix = "ctc" if said["type"] == "custom_tool_call" else "fc"
        items.append({"id": f"{prefix}_{turn_id}_{index}", "status": "completed", **said})
    if choice.finish_reason is FinishReason.LENGTH:
        items[-1]["status"] = "incomplete"
    return items


def item_events(index: int, item: Json) -> Iterator[Json]:
    """The events of one finished output item, without their numbers."""
    place = {"item_id": item["id"], "output_index": index}
    yield {"type": "response.output_item.added", "output_index": index, "item": _begun(item)}
    yield from _EVENTS[item["type"]](place, item)
    yield {"type": "response.output_item.done", "output_index": index, "item": item}


def _message(item: Json, path: str, recall: Recall) -> tuple[Json | None, int | None]:
    """What an item says, as a message of its own, and the turn that it names; no message for one that says nothing."""
    kind = item.get("type")
    if kind is None:
        kind = "message" if "role" in item else "item_reference" if "id" in item else None
    if not isinstance(kind, str):
        allowed = ", ".join(_ITEMS)
        raise RequestError(f"{path} has type {kind!r}; allowed are {allowed}", param=f"{path}.type")
    parse = _ITEMS.get(kind)
    return (None, None) if parse is None else parse(item, path, recall)


def _role_message(item: Json, path: str, _recall: Recall) -> tuple[Json, int | None]:
    role = item.get("role")
    name = _ROLES.get(role) if isinstance(role, str) else None
    if name is None:
        raise RequestError(f"{path}.role is {role!r}; allowed are {', '.join(_ROLES)}", param=f"{path}.role")
    content = _content(item.get("content"), f"{path}.content", images=name == "user")
    return {"role": name, "content": content}, _turn(item.get("id")) if name == "assistant" else None


def _reasoning(item: Json, path: str, recall: Recall) -> tuple[Json | None, int | None]:
    """The text where there is one, else that of the turn that the id or the encrypted content names."""
    parts = objects(item, "content", path=path) or objects(item, "summary", path=path)
    texts = [part["text"] for _, part in parts if isinstance(part.get("text"), str)]
    if any(texts):
        return {"role": "assistant", "content": "", "reasoning_content": "\n\n".join(texts)}, _turn(item.get("id"))
    for value in (item.get("encrypted_content"), item.get("id")):
        named = handle(value)
        part = _recalled(named, recall) if named and named.kind == "rs" else None
        if named and part:
            return part, named.turn_id
    return None, None


def _function_call(item: Json, path: str, recall: Recall) -> tuple[Json, int | None]:
    name, call_id = item.get("name"), item.get("call_id")
    if not isinstance(name, str):
        raise RequestError(f"{path}.name is {kind_of(name)}; send the name of a function", param=f"{path}.name")
    if item.get("type") == "custom_tool_call":
        text: str = field(item, "input", str, path=path) or ""
        arguments = arguments_of_input(text, call_id, recall)
    else:
        arguments = arguments_of(item.get("arguments"), f"{path}.arguments")
    shown = shown_name(name, item.get("namespace"))
    call: Json = {"type": "function", "function": {"name": shown, "arguments": arguments}}
    if isinstance(call_id, str):
        call["id"] = call_id
    turn_id = _turn(item.get("id"))
    return {"role": "assistant", "content": "", "tool_calls": [call]}, _turn(call_id) if turn_id is None else turn_id


def _function_call_output(item: Json, path: str, _recall: Recall) -> tuple[Json, int | None]:
    output = item.get("output")
    if isinstance(output, dict) and "content" in output:  # of older versions of Codex, where a tool failed
        output = output["content"]
    message: Json = {"role": "tool", "content": _content(output, f"{path}.output", images=True)}
    if isinstance(item.get("call_id"), str):
        message["tool_call_id"] = item["call_id"]
    return message, None


def _reference(item: Json, path: str, recall: Recall) -> tuple[Json, int | None]:
    named = handle(item.get("id"))
    message = _recalled(named, recall) if named else None
    if named is None or message is None:
        raise NotFound(
            f"Item with id {item.get('id')!r} not found: {path} must name an item of an earlier response of this "
            "attempt; send the item itself instead",
            param="input",
        )
    return message, named.turn_id


_Parse = Callable[[Json, str, Recall], tuple[Json | None, int | None]]
_ITEMS: dict[str, _Parse] = {
    "message": _role_message,
    "reasoning": _reasoning,
    "function_call": _function_call,
    "function_call_output": _function_call_output,
    "custom_tool_call": _function_call,
    "custom_tool_call_output": _function_call_output,
    "item_reference": _reference,
}
_ROLES = {"user": "user", "system": "system", "developer": "system", "assistant": "assistant"}


def _recalled(named: Handle, recall: Recall) -> Json | None:
    """The part of an earlier reply that a handle names."""
    reply = recall.reply(named.turn_id)
    if reply is None:
        return None
    if named.kind == "rs" and reply.get("reasoning_content"):
        return {"role": "assistant", "content": "", "reasoning_content": reply["reasoning_content"]}
    if named.kind == "msg":
        return {"role": "assistant", "content": reply["content"]}
    calls = reply.get("tool_calls", [])
    if named.kind in ("fc", "ctc") and named.index < len(calls):
        return {"role": "assistant", "content": "", "tool_calls": [calls[named.index]]}
    return None


def _turn(value: Any) -> int | None:
    named = handle(value)
    return named.turn_id if named else None


def _belongs(message: Json, turn_id: int | None, last: Json, last_turn: int | None) -> bool:
    """Is an item's message a part of the last message? By their turns where both are known, else by the order in which
    the items of a reply come."""
    if message["role"] != "assistant" or last["role"] != "assistant":
        return False
    if turn_id is not None and last_turn is not None:
        return turn_id == last_turn
    return _rank(message) > _rank(last) or _rank(message) == _rank(last) != 1


def _rank(message: Json) -> int:
    if "tool_calls" in message:
        return 2
    return 0 if "reasoning_content" in message and not message["content"] else 1


def _merged(message: Json, part: Json) -> Json:
    merged = {"role": "assistant", "content": message["content"] + part["content"]}
    reasoning = [m["reasoning_content"] for m in (message, part) if "reasoning_content" in m]
    if reasoning:
        merged["reasoning_content"] = "\n\n".join(reasoning)
    calls = message.get("tool_calls", []) + part.get("tool_calls", [])
    return merged | ({"tool_calls": calls} if calls else {})


def _content(content: Any, path: str, *, images: bool) -> str | list[Json]:
    return content_of(content, path, partial(_part, images=images))


def _part(part: Any, path: str, *, images: bool) -> str | Json:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise RequestError(f"{path} is {kind_of(part)}, not a content part", param=path)
    kind = part.get("type")
    text = part.get("refusal" if kind == "refusal" else "text")
    if kind in ("input_text", "output_text", "text", "refusal") and isinstance(text, str):
        return text
    if images and kind == "input_image" and isinstance(part.get("image_url"), str):
        return image(part["image_url"])
    if is_file(part):
        return file_text(part)
    allowed = "input_text, output_text, refusal" + (" and input_image with an image_url" if images else "")
    raise RequestError(f"{path} has type {kind!r}; allowed are parts of type {allowed}", param=path)


def _begun(item: Json) -> Json:
    """An item before any of its text has come."""
    if item["type"] == "reasoning":
        return item | {"summary": []}
    empty: Json = {_TEXT[item["type"]]: [] if item["type"] == "message" else ""}
    return item | empty | {"status": "in_progress"}


def _reasoning_events(place: Json, item: Json) -> Iterator[Json]:
    place = place | {"summary_index": 0}
    (part,) = item["summary"]
    yield {"type": "response.reasoning_summary_part.added", **place, "part": part | {"text": ""}}
    yield {"type": "response.reasoning_summary_text.delta", **place, "delta": part["text"]}
    yield {"type": "response.reasoning_summary_text.done", **place, "text": part["text"]}
    yield {"type": "response.reasoning_summary_part.done", **place, "part": part}


def _message_events(place: Json, item: Json) -> Iterator[Json]:
    place = place | {"content_index": 0}
    (part,) = item["content"]
    yield {"type": "response.content_part.added", **place, "part": part | {"text": ""}}
    if part["text"]:
        yield {"type": "response.output_text.delta", **place, "delta": part["text"], "logprobs": []}
    yield {"type": "response.output_text.done", **place, "text": part["text"], "logprobs": []}
    yield {"type": "response.content_part.done", **place, "part": part}


def _call_events(place: Json, item: Json) -> Iterator[Json]:
    yield {"type": "response.function_call_arguments.delta", **place, "delta": item["arguments"]}
    yield {
        "type": "response.function_call_arguments.done",
        **place,
        "name": item["name"],
        "arguments": item["arguments"],
    }


def _input_events(place: Json, item: Json) -> Iterator[Json]:
    yield {"type": "response.custom_tool_call_input.delta", **place, "delta": item["input"]}
    yield {"type": "response.custom_tool_call_input.done", **place, "input": item["input"]}


_TEXT = {"message": "content", "function_call": "arguments", "custom_tool_call": "input"}
_EVENTS: dict[str, Callable[[Json, Json], Iterator[Json]]] = {
    "reasoning": _reasoning_events,
    "message": _message_events,
    "function_call": _call_events,
    "custom_tool_call": _input_events,
}
