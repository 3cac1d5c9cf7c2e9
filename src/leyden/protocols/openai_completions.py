"""OpenAI completions: `POST /v1/completions`, a prompt as text or as token ids, plain and streamed.

A list that holds one prompt is that prompt. Without `max_tokens` a call samples up to 16 tokens, the protocol's own
default; with `max_tokens: null`, up to the context. The text of the reply is what was sampled, without special tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from leyden.errors import RequestError
from leyden.protocols import openai_chat
from leyden.protocols.chat import Call, ChatChoice, ChatReply, ChatRequest, event
from leyden.protocols.checks import field, integer, kind_of, stop_strings
from leyden.protocols.fields import check_fields
from leyden.protocols.wishes import unmet
from leyden.types import FinishReason, Json

PROTOCOL = "openai-completions"
KEEP_ALIVE = openai_chat.KEEP_ALIVE
KEY_PARAMETER: str | None = None
DEFAULT_TOKENS = 16
LARGEST_ID = 2**31 - 1

error = openai_chat.error
stream_error = openai_chat.stream_error


def parse(body: Json, _call: Call) -> ChatRequest:
    """The request in Leyden's words. Raises RequestError naming the field and what is allowed."""
    n = integer(body, "n", 1, openai_chat.MAX_CHOICES) or 1
    ignored = check_fields(PROTOCOL, {k: v for k, v in body.items() if (k, v) != ("best_of", n)})
    return ChatRequest(
        protocol=PROTOCOL,
        model=field(body, "model", str, required=True),
        prompt=_prompt(body.get("prompt")),
        stop=stop_strings(body, "stop"),
        max_tokens=integer(body, "max_tokens", 1) if "max_tokens" in body else DEFAULT_TOKENS,
        n=n,
        stream=field(body, "stream", bool) or False,
        include_usage=openai_chat.wants_usage(body),
        sampling=openai_chat.harness_sampling(body),
        ignored=ignored,
        unmet=unmet(PROTOCOL, body, ignored),
    )


def reply(answer: ChatReply, _request: ChatRequest) -> Json:
    """The body of a plain answer."""
    choices = [
        _choice(index, choice.message["content"], _finish_reason(choice)) for index, choice in enumerate(answer.choices)
    ]
    return _envelope(answer) | {"choices": choices, "usage": openai_chat.usage(answer)}


def stream(answer: ChatReply, request: ChatRequest) -> Iterator[bytes]:
    """The events of a streamed answer, from the finished one."""
    head = _envelope(answer)
    tail: Json = {"usage": None} if request.include_usage else {}
    for index, choice in enumerate(answer.choices):
        if choice.message["content"]:
            yield event(head | {"choices": [_choice(index, choice.message["content"], None)]} | tail)
        yield event(head | {"choices": [_choice(index, "", _finish_reason(choice))]} | tail)
    if request.include_usage:
        yield event(head | {"choices": [], "usage": openai_chat.usage(answer)})
    yield b"data: [DONE]\n\n"


def _prompt(prompt: Any) -> str | list[int]:
    if prompt is None:
        raise RequestError("prompt is missing", param="prompt", code="missing_required_parameter")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        if len(prompt) > 1:
            raise RequestError(
                f"prompt holds {len(prompt)} prompts; one call is recorded as one turn, so send them one by one",
                param="prompt",
            )
        (prompt,) = prompt
    if not prompt and isinstance(prompt, str | list):
        raise RequestError("prompt is empty; send at least one token", param="prompt")
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, list):
        raise RequestError(f"prompt is {kind_of(prompt)}; send a string or a list of token ids", param="prompt")
    for index, token_id in enumerate(prompt):
        if type(token_id) is not int or not 0 <= token_id <= LARGEST_ID:
            where = f"prompt[{index}]"
            raise RequestError(f"{where} is {token_id!r:.80}; token ids are 0 to {LARGEST_ID}", param=where)
    return prompt


def _envelope(answer: ChatReply) -> Json:
    return {
        "id": f"cmpl-{answer.turn_id}",
        "object": "text_completion",
        "created": answer.created,
        "model": answer.model,
    }


def _choice(index: int, text: str, finish_reason: str | None) -> Json:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}


def _finish_reason(choice: ChatChoice) -> str:
    return "length" if choice.finish_reason is FinishReason.LENGTH else "stop"
