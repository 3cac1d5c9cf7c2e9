"""OpenAI Responses: `POST /v1/responses`, plain and streamed. Its items are in `openai_responses_items`."""

from __future__ import annotations

from collections.abc import Iterator

from leyden.errors import RequestError
from leyden.protocols import openai_chat
from leyden.protocols.chat import Call, ChatReply, ChatRequest, HarnessSampling, Recall, event
from leyden.protocols.checks import field, integer, number
from leyden.protocols.choice import of_openai
from leyden.protocols.fields import check_fields
from leyden.protocols.files import unshown
from leyden.protocols.openai_responses_items import (
    handle,
    input_messages,
    item_events,
    output_items,
    skipped_items,
)
from leyden.protocols.openai_responses_tools import Offered, offered_tools
from leyden.protocols.wishes import unmet
from leyden.types import FinishReason, Json

PROTOCOL = "openai-responses"
KEEP_ALIVE = b": keep-alive\n\n"
KEY_PARAMETER: str | None = None
error = openai_chat.error

_ENCRYPTED = "reasoning.encrypted_content"
_ECHO: Json = {
    "background": False,
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "reasoning": {"effort": None, "summary": None},
    "safety_identifier": None,
    "service_tier": "default",
    "store": True,
    "temperature": 1.0,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": 1.0,
    "truncation": "disabled",
    "user": None,
}


def parse(body: Json, call: Call) -> ChatRequest:
    """The request in Leyden's words. Raises RequestError naming the field and what is allowed."""
    ignored = check_fields(PROTOCOL, body)
    offered, left_out = offered_tools(body)
    include = [str(name) for name in field(body, "include", list) or []]
    store = field(body, "store", bool)
    tool_choice = of_openai(body)
    ignored += ("tool_choice",) if tool_choice.forced else ()
    ignored += (*left_out, *skipped_items(body), *unshown(body.get("input")))
    ignored += tuple(f"include.{name}" for name in include if name != _ENCRYPTED)
    return ChatRequest(
        model=field(body, "model", str, required=True),
        messages=_messages(body, call.recall),
        tools=[{"type": "function", "function": tool.function} for tool in offered],
        callable_tools=tool_choice.callable_tools,
        one_call=tool_choice.one_call,
        template_kwargs=field(body, "chat_template_kwargs", dict) or {},
        max_tokens=integer(body, "max_output_tokens", 1),
        stream=field(body, "stream", bool) or False,
        sampling=HarnessSampling(temperature=number(body, "temperature", 0, 2), top_p=number(body, "top_p", 0, 1)),
        protocol=PROTOCOL,
        store=True if store is None else store,
        echo={name: body[name] for name in _ECHO if body.get(name) is not None},
        ignored=ignored,
        unmet=unmet(PROTOCOL, body, ignored),
    )


def reply(answer: ChatReply, request: ChatRequest) -> Json:
    """The body of a plain answer. Reasoning is given whole, as its own summary."""
    cut = answer.choices[0].finish_reason is FinishReason.LENGTH
    return _response(answer, request) | {
        "status": "incomplete" if cut else "completed",
        "completed_at": None if cut else answer.created,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": output_items(answer, _named(request)),
        "usage": _usage(answer),
    }


def stream(answer: ChatReply, request: ChatRequest) -> Iterator[bytes]:
    """The events of a streamed answer, from the finished one."""
    for number_, data in enumerate(_events(answer, request)):
        yield event(data | {"sequence_number": number_}, data["type"])


def stream_error(problem: RequestError) -> bytes:
    """Twice, as OpenAI says it: most clients raise at the `error`, Codex only at the failed response.

    `invalid_prompt` is the code there that clients do not retry.
    """
    said = error(problem)["error"]
    code = problem.code if problem.code == "context_length_exceeded" else "invalid_prompt"
    failed = _ECHO | {
        "id": "resp_failed",
        "object": "response",
        "created_at": 0,
        "model": "",
        "status": "failed",
        "error": {"code": code, "message": str(problem)},
        "incomplete_details": None,
        "output": [],
        "usage": None,
    }
    return event({"type": "error", "sequence_number": 0, "error": said}, "error") + event(
        {"type": "response.failed", "sequence_number": 1, "response": failed}, "response.failed"
    )


def _messages(body: Json, recall: Recall) -> list[Json]:
    """The conversation: instructions, what the previous response was asked with and answered, then the input."""
    previous = field(body, "previous_response_id", str)
    if body.get("input") is None and previous is None:
        raise RequestError("input is missing", param="input", code="missing_required_parameter")
    instructions = field(body, "instructions", str)
    messages = [] if instructions is None else [_instructions(instructions)]
    if previous is not None:
        messages += _previous(previous, recall)
    messages += input_messages(body, recall)
    if not messages:
        raise RequestError("input is empty; send a string or at least one item", param="input")
    return messages


def _instructions(text: str) -> Json:
    """Marked, because the next response does not inherit them."""
    return {"role": "system", "content": text, "instructions": True}


def _previous(response_id: str, recall: Recall) -> list[Json]:
    named = handle(response_id)
    known = named is not None and named.kind == "resp"
    answered = recall.reply(named.turn_id) if named and known else None
    asked = recall.messages(named.turn_id) if named and answered else None
    if answered is None or asked is None:
        why = "it was asked with `store: false`" if answered else "this attempt has no such response"
        raise RequestError(
            f"Previous response with id {response_id!r} not found: {why}; send the whole conversation as `input`",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    return [*(message for message in asked if not message.get("instructions")), answered]


def _named(request: ChatRequest) -> dict[str, Offered]:
    """The tools of the request by the names that the model knows. Of equal ones the first counts."""
    offered, _ = offered_tools(request.echo)
    return {tool.function["name"]: tool for tool in reversed(offered)}


def _response(answer: ChatReply, request: ChatRequest) -> Json:
    """A Response object that has just begun."""
    return {
        "id": f"resp_{answer.turn_id}",
        "object": "response",
        "created_at": answer.created,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "model": answer.model,
        "output": [],
        "usage": None,
        **_ECHO,
        **request.echo,
    }


def _usage(answer: ChatReply) -> Json:
    return {
        "input_tokens": answer.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": answer.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
    }


def _events(answer: ChatReply, request: ChatRequest) -> Iterator[Json]:
    begun = _response(answer, request)
    yield {"type": "response.created", "response": begun}
    yield {"type": "response.in_progress", "response": begun}
    done = reply(answer, request)
    for index, item in enumerate(done["output"]):
        yield from item_events(index, item)
    yield {"type": f"response.{done['status']}", "response": done}
