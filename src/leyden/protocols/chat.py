"""What every protocol parses into and replies from.

Messages have the shape that renderers take: `role` is system, user, assistant or tool; `content` a string;
assistant messages may hold `reasoning_content` and `tool_calls` (whose `arguments` are an object where the wire's
string parses to one, the string itself otherwise); tool messages hold `tool_call_id`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import orjson

from leyden.types import FinishReason, Json


@dataclass(frozen=True, slots=True)
class HarnessSampling:
    """The distribution that the harness asks for. Training overrides it; evaluation keeps it."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One model call, in no protocol's own words. `ignored` names fields that have no effect here."""

    model: str
    messages: list[Json]
    tools: list[Json] = field(default_factory=list)
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    sampling: HarnessSampling = HarnessSampling()
    ignored: tuple[str, ...] = ()

    def key(self) -> bytes:
        """Digest of all that decides the answer, so of everything but the stream flags. Equal for a retry."""
        sampling = self.sampling
        parts = (
            [self.model, self.messages, self.tools, self.stop, self.max_tokens, self.n],
            [sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed],
        )
        return digest(parts)


@dataclass(frozen=True, slots=True)
class ChatChoice:
    """One answer. `message` has the request's message shape; `stop_string` ended the text and is not part of it."""

    message: Json
    finish_reason: FinishReason
    completion_tokens: int

    @property
    def tool_calls(self) -> list[Json]:
        calls: list[Json] = self.message.get("tool_calls", [])
        return calls


@dataclass(frozen=True, slots=True)
class ChatReply:
    """A finished, committed call. `reply_id` is the same for a replay."""

    reply_id: str
    model: str
    created: int
    prompt_tokens: int
    choices: list[ChatChoice]

    @property
    def completion_tokens(self) -> int:
        return sum(choice.completion_tokens for choice in self.choices)


def digest(value: Any) -> bytes:
    """16 bytes that are equal for equal JSON values, whatever the order of their keys."""
    return hashlib.blake2b(orjson.dumps(value, option=orjson.OPT_SORT_KEYS), digest_size=16).digest()
