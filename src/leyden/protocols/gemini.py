"""Gemini: `POST /v1beta/models/NAME:generateContent`, `:streamGenerateContent` and `:countTokens`.

Field names come in camelCase or snake_case, and a list of one may come as its item, as Google's API accepts them.
Model contents in a row are one assistant message: SDKs keep one content per chunk of a stream. A `functionResponse`
becomes a tool message: the text of `output` or `result` where that is the whole response, else the response as JSON.
It answers the call with its id, or else the first unanswered call with its name.

Reasoning is a thought part. A harness may drop it and keep the `thoughtSignature` of the part that follows, which
names the turn, so the reasoning is known again.
"""

from __future__ import annotations

import base64
import binascii
import itertools
import re
from collections.abc import Iterable, Iterator
from typing import Any

import orjson

from leyden.errors import NotFound, RequestError
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
from leyden.protocols.checks import arguments_object, field, integer, number, objects, stop_strings
from leyden.protocols.choice import of_gemini
from leyden.protocols.fields import check_fields
from leyden.protocols.files import decoded, placeholder
from leyden.protocols.wishes import unmet
from leyden.types import FinishReason, Json

PROTOCOL = "gemini"
# No SSE comment: @google/genai for JavaScript takes anything but blanks before `data:` for a broken event.
KEEP_ALIVE = b"\n\n"
KEY_PARAMETER: str | None = "key"
MAX_CANDIDATES = 128
ROLES = {"user": False, "function": False, "tool": False, "model": True}
STATUS = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    409: "ABORTED",
    429: "RESOURCE_EXHAUSTED",
    503: "UNAVAILABLE",
}
_FUNCTIONS = "functionDeclarations"
_PLAIN_ALPHABET = str.maketrans("-_", "+/")
LONGEST_FIELD = 100  # characters; a longer name is no field's, and `re` would keep the interpreter for all of it
_SNAKE = re.compile(r"(?<=[a-zA-Z0-9])_([a-z0-9])")
_SIGNATURE = re.compile(rb"leyden-turn-(\d{1,18})")


def parse(body: Json, call: Call) -> ChatRequest:
    """The request in Leyden's words. Raises RequestError naming the field and what is allowed."""
    method = call.path["method"]
    if method not in ("generateContent", "streamGenerateContent"):
        raise NotFound(
            f"{method} is not served here; call generateContent, streamGenerateContent or countTokens", param="method"
        )
    streamed = method == "streamGenerateContent"
    events = streamed and call.query.get("alt") == "sse"
    return _request(_named(body), call, stream=events, as_list=streamed and not events)


def parse_count(body: Json, call: Call) -> ChatRequest:
    """`contents` alone, or a whole request as `generateContentRequest`."""
    named = _named(body)
    whole = field(named, "generateContentRequest", dict)
    return _request(named if whole is None else _named(whole), call)


def count(tokens: int) -> Json:
    return {"totalTokens": tokens}


def reply(answer: ChatReply, request: ChatRequest) -> Json | list[Json]:
    """The body of a plain answer; without `alt=sse` also of a streamed one, as a list of one chunk."""
    candidates = [
        _candidate(index, _parts(choice, answer.turn_id + index), choice) for index, choice in enumerate(answer.choices)
    ]
    whole = _envelope(answer, candidates) | {"usageMetadata": _usage(answer)}
    return [whole] if request.echo.get("as_list") else whole


def stream(answer: ChatReply, _request: ChatRequest) -> Iterator[bytes]:
    """The events of a streamed answer, one for each part."""
    for index, choice in enumerate(answer.choices):
        *first, last = _parts(choice, answer.turn_id + index)
        for part in first:
            yield event(_envelope(answer, [_candidate(index, [part])]))
        yield event(_envelope(answer, [_candidate(index, [last], choice)]) | {"usageMetadata": _usage(answer)})


def error(problem: RequestError) -> Json:
    status = STATUS.get(problem.status, "INVALID_ARGUMENT" if problem.status < 500 else "INTERNAL")
    return {"error": {"code": problem.status, "message": str(problem), "status": status}}


def stream_error(problem: RequestError) -> bytes:
    """A bare object, as Google's API sends it: both official SDKs raise it, which they would not for an event."""
    return orjson.dumps(error(problem))


def models(names: list[str]) -> Json:
    methods = ["generateContent", "streamGenerateContent", "countTokens"]
    listed = [{"name": f"models/{n}", "displayName": n, "supportedGenerationMethods": methods} for n in names]
    return {"models": listed}


def _request(body: Json, call: Call, *, stream: bool = False, as_list: bool = False) -> ChatRequest:
    config = _named(field(body, "generationConfig", dict) or {})
    given = {name: value for name, value in body.items() if name != "generationConfig"}
    given |= {f"generationConfig.{name}": value for name, value in config.items()}
    ignored = check_fields(PROTOCOL, given)
    path = "generationConfig"
    top_k = number(config, "topK", 0, 2**31, path=path)
    if top_k is not None and not top_k.is_integer():
        raise RequestError(f"{path}.topK is {top_k}; send an integer", param=f"{path}.topK", code="invalid_type")
    tool_config = _named(field(body, "toolConfig", dict) or {})
    tool_choice = of_gemini(_named(field(tool_config, "functionCallingConfig", dict, path="toolConfig") or {}))
    ignored += tuple(f"tools.{name}" for _, tool in _each(body, "tools") for name in tool if name != _FUNCTIONS)
    ignored += _unshown(body)
    ignored += ("toolConfig",) if tool_choice.forced else ()
    return ChatRequest(
        protocol=PROTOCOL,
        model=call.path["model"],
        messages=[*_system(body), *_conversation(body, call.recall)],
        tools=[_tool(declared, where) for where, declared in _declarations(body)],
        callable_tools=tool_choice.callable_tools,
        stop=stop_strings(config, "stopSequences"),
        max_tokens=integer(config, "maxOutputTokens", 1, path=path),
        n=integer(config, "candidateCount", 1, MAX_CANDIDATES, path=path) or 1,
        stream=stream,
        echo={"as_list": as_list},
        sampling=HarnessSampling(
            temperature=number(config, "temperature", 0, 2, path=path),
            top_p=number(config, "topP", 0, 1, path=path),
            top_k=None if top_k is None else int(top_k),
            seed=integer(config, "seed", path=path),
        ),
        ignored=ignored,
        unmet=unmet(PROTOCOL, given, ignored),
    )


def _named(item: Json) -> Json:
    """With camelCase names, one level deep."""
    return {
        name if len(name) > LONGEST_FIELD else _SNAKE.sub(lambda match: match[1].upper(), name): value
        for name, value in item.items()
    }


def _each(body: Json, name: str, path: str = "", *, required: bool = False) -> list[tuple[str, Json]]:
    """As `objects`, for a list or one item of it, with camelCase names."""
    listed = {name: [body[name]]} if isinstance(body.get(name), dict) else body
    return [(where, _named(item)) for where, item in objects(listed, name, required=required, path=path)]


def _system(body: Json) -> list[Json]:
    instruction = body.get("systemInstruction")
    if isinstance(instruction, str):
        return [{"role": "system", "content": instruction}]
    content = _named(field(body, "systemInstruction", dict) or {})
    parts = _each(content, "parts", "systemInstruction")
    return [{"role": "system", "content": joined(_text(part, path) for path, part in parts)}] if parts else []


def _conversation(body: Json, recall: Recall) -> list[Json]:
    contents = _each(body, "contents", required=True)
    messages: list[Json] = []
    unanswered: list[Json] = []
    numbers = itertools.count()
    for by_model, group in itertools.groupby(contents, key=lambda item: _by_model(item[1], item[0])):
        parts = [_each(content, "parts", path) for path, content in group]
        if by_model:
            message = _assistant([part for one in parts for part in one], recall, numbers)
            unanswered = list(message.get("tool_calls", []))
            messages.append(message)
        else:
            for one in parts:
                messages += _user(one, unanswered)
    if not messages:
        raise RequestError("contents is empty; send at least one content with a part", param="contents")
    return messages


def _by_model(content: Json, path: str) -> bool:
    role = content.get("role") or "user"
    if not isinstance(role, str) or role not in ROLES:
        raise RequestError(f"{path}.role is {role!r:.80}; allowed are {', '.join(ROLES)}", param=f"{path}.role")
    return ROLES[role]


def _user(parts: list[tuple[str, Json]], unanswered: list[Json]) -> Iterator[Json]:
    """User and tool messages in the order of the parts. Takes the calls that are answered out of `unanswered`."""
    shown: list[str | Json] = []
    for path, part in parts:
        response = field(part, "functionResponse", dict, path=path)
        if response is None:
            shown.append(_shown(part, path))
            continue
        if shown:
            yield {"role": "user", "content": joined(shown)}
            shown = []
        yield _tool_message(_named(response), unanswered, f"{path}.functionResponse")
    if shown:
        yield {"role": "user", "content": joined(shown)}


def _tool_message(response: Json, unanswered: list[Json], path: str) -> Json:
    name = field(response, "name", str, path=path)
    call_id = field(response, "id", str, path=path)
    of_name = [call for call in unanswered if call["function"]["name"] == name]
    answered = next((call for call in unanswered if call["id"] == call_id), of_name[0] if of_name else None)
    if answered is not None:
        unanswered.remove(answered)
        call_id = answered["id"]
    images = [_shown(part, where) for where, part in _each(response, "parts", path)]
    content = joined([_response_text(field(response, "response", dict, path=path)), *images])
    message: Json = {"role": "tool", "content": content}
    return message | {key: value for key, value in (("tool_call_id", call_id), ("name", name)) if value}


def _response_text(response: Json | None) -> str:
    for name in ("output", "result"):
        if response is not None and list(response) == [name] and isinstance(response[name], str):
            return str(response[name])
    return orjson.dumps(response or {}).decode()


def _assistant(parts: Iterable[tuple[str, Json]], recall: Recall, numbers: Iterator[int]) -> Json:
    """One message. Its reasoning is that of the thought parts, or else of the turn that a signature names."""
    thoughts: list[str] = []
    texts: list[str] = []
    calls: list[Json] = []
    signed: int | None = None
    for path, part in parts:
        signed = signed or _signed_turn(part.get("thoughtSignature"))
        call = field(part, "functionCall", dict, path=path)
        if call is not None:
            calls.append(_call(_named(call), f"{path}.functionCall", numbers))
        elif "text" in part or "thoughtSignature" not in part:
            (thoughts if part.get("thought") is True else texts).append(_text(part, path))
    message: Json = {"role": "assistant", "content": "".join(texts)}
    known = None if thoughts or signed is None else recall.reply(signed)
    reasoning = "".join(thoughts) or (known or {}).get("reasoning_content")
    return message | ({"reasoning_content": reasoning} if reasoning else {}) | ({"tool_calls": calls} if calls else {})


def _call(call: Json, path: str, numbers: Iterator[int]) -> Json:
    name = field(call, "name", str, required=True, path=path)
    arguments = field(call, "args", dict, path=path) or {}
    call_id = field(call, "id", str, path=path) or f"call_{next(numbers)}"
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _unshown(body: Json) -> tuple[str, ...]:
    """`content.file` for each file that has only a placeholder in the conversation."""
    parts = [_named(part) for _, content in _each(body, "contents") for _, part in _each(content, "parts")]
    parts += [
        _named(inner)
        for part in parts
        if isinstance(part.get("functionResponse"), dict)
        for _, inner in _each(_named(part["functionResponse"]), "parts")
    ]
    found = [
        (name, _named(part[name]))
        for part in parts
        for name in ("inlineData", "fileData")
        if isinstance(part.get(name), dict)
    ]
    others = [(name, media) for name, media in found if not str(media.get("mimeType")).startswith("image/")]
    return ("content.file",) * sum(
        name == "fileData" or decoded(media.get("data"), media.get("mimeType")) is None for name, media in others
    )


def _text(part: Json, path: str) -> str:
    text = part.get("text")
    if not isinstance(text, str):
        allowed = "text, functionCall of the model, functionResponse and images of the user"
        raise RequestError(f"{path} holds {', '.join(part) or 'nothing'}; allowed are {allowed}", param=path)
    return text


def _shown(part: Json, path: str) -> str | Json:
    """Text, or an image by its data or address."""
    for name, source in (("inlineData", "data"), ("fileData", "fileUri")):
        media = field(part, name, dict, path=path)
        if media is None:
            continue
        named = _named(media)
        kind, value = named.get("mimeType"), field(named, source, str, required=True, path=f"{path}.{name}")
        if not isinstance(kind, str) or not kind.startswith("image/"):
            text = decoded(value, kind) if name == "inlineData" else None
            return placeholder("file", named | {"data": None}) if text is None else text
        return image(value if name == "fileData" else f"data:{kind};base64,{value.translate(_PLAIN_ALPHABET)}")
    return _text(part, path)


def _declarations(body: Json) -> Iterator[tuple[str, Json]]:
    for path, tool in _each(body, "tools"):
        yield from _each(tool, _FUNCTIONS, path)


def _tool(declared: Json, path: str) -> Json:
    function: Json = {"name": field(declared, "name", str, required=True, path=path)}
    if description := field(declared, "description", str, path=path):
        function["description"] = description
    schema = field(declared, "parametersJsonSchema", dict, path=path)
    own = field(declared, "parameters", dict, path=path)
    function["parameters"] = schema or _json_schema(own or {}) or {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


def _json_schema(schema: Any) -> Any:
    """Google's schema with JSON schema's names of types: `OBJECT` is `object`."""
    if isinstance(schema, list):
        return [_json_schema(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    made: Json = {}
    for name, value in _named(schema).items():
        if name == "type" and isinstance(value, str):
            made[name] = value.lower()
        elif name == "properties" and isinstance(value, dict):
            made[name] = {key: _json_schema(item) for key, item in value.items()}
        else:
            made[name] = _json_schema(value) if name in ("items", "anyOf", "additionalProperties") else value
    return made


def _envelope(answer: ChatReply, candidates: list[Json]) -> Json:
    return {"candidates": candidates, "modelVersion": answer.model, "responseId": f"{answer.turn_id}"}


def _candidate(index: int, parts: list[Json], ended: ChatChoice | None = None) -> Json:
    candidate: Json = {"content": {"role": "model", "parts": parts}, "index": index}
    if ended is not None:
        candidate["finishReason"] = "MAX_TOKENS" if ended.finish_reason is FinishReason.LENGTH else "STOP"
    return candidate


def _parts(choice: ChatChoice, turn_id: int) -> list[Json]:
    """The parts of an answer, at least one. The signature is on the first call, or else on the text.

    `turn_id` is the choice's own: turns of one request are numbered in a row.
    """
    thought = choice.message.get("reasoning_content")
    text = choice.message["content"]
    parts: list[Json] = [{"text": text}] if text or not choice.tool_calls else []
    signed = len(parts) if choice.tool_calls else 0
    for call in choice.tool_calls:
        function = call["function"]
        arguments = arguments_object(function["arguments"])
        parts.append({"functionCall": {"id": call["id"], "name": function["name"], "args": arguments}})
    if not thought:
        return parts
    parts[signed]["thoughtSignature"] = base64.b64encode(b"leyden-turn-%d" % turn_id).decode()
    return [{"text": thought, "thought": True}, *parts]


def _signed_turn(signature: Any) -> int | None:
    """The turn that one of our signatures names; None for any other. SDKs write base64 in both alphabets."""
    try:
        text = base64.b64decode(signature.translate(_PLAIN_ALPHABET)) if signature else b""
    except (binascii.Error, ValueError, AttributeError):
        return None
    match = _SIGNATURE.fullmatch(text)
    return int(match[1]) if match else None


def _usage(answer: ChatReply) -> Json:
    return {
        "promptTokenCount": answer.prompt_tokens,
        "candidatesTokenCount": answer.completion_tokens,
        "totalTokenCount": answer.prompt_tokens + answer.completion_tokens,
    }
