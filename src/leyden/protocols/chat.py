"""What every protocol parses into and replies from, and what a protocol is.

Messages have the shape that renderers take: `role` is system, user, assistant or tool; `content` is a string, or, where
a message holds an image, a list of parts `{"type": "text", "text"}` and `{"type": "image_url", "image_url": {"url"}}`;
assistant messages may hold `reasoning_content` and `tool_calls` (whose `arguments` are an object where the wire's
string parses to one, the string itself otherwise); tool messages hold `tool_call_id`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import orjson

from leyden.errors import RequestError
from leyden.protocols.checks import kind_of
from leyden.types import FinishReason, Json

_LINE_ENDS = tuple((end.encode(), b"\\u%04x" % ord(end)) for end in "\x85\u2028\u2029")


@dataclass(frozen=True, slots=True)
class HarnessSampling:
    """The distribution that the harness asks for. Training overrides it; evaluation keeps it."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One model call, in no protocol's own words.

    `prompt` (text or token ids) takes the place of `messages` where the protocol has no chat. `store` asks that later
    requests can refer to this one. `echo` holds what the reply repeats of the body. `ignored` names fields that
    have no effect here, `unmet` those of them that ask for another reply. `body_bytes` is the size of the body: what is
    large is worked on off the event loop.

    `callable_tools` names the tools whose calls may be delivered (None: all), `one_call` asks for one call at most.
    Neither changes what the model is shown; `template_kwargs`, variables of the chat template, do.
    """

    model: str
    messages: list[Json] = field(default_factory=list)
    prompt: str | list[int] | None = None
    tools: list[Json] = field(default_factory=list)
    callable_tools: tuple[str, ...] | None = None
    one_call: bool = False
    template_kwargs: Json = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    sampling: HarnessSampling = HarnessSampling()
    protocol: str = "openai-chat"
    store: bool = False
    echo: Json = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    unmet: tuple[str, ...] = ()
    body_bytes: int = 0

    def may_call(self, name: str) -> bool:
        """Whether a call of this tool may be delivered."""
        return bool(self.tools) and (self.callable_tools is None or name in self.callable_tools)

    def key(self) -> bytes:
        """Digest of all that decides the answer, so of everything but the stream flags. Equal for a retry."""
        sampling = self.sampling
        parts = (
            [self.model, self.messages, self.prompt, self.tools, self.stop, self.max_tokens, self.n],
            [self.callable_tools, self.one_call, self.template_kwargs],
            [sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed],
        )
        return digest(parts)


@dataclass(frozen=True, slots=True)
class ChatChoice:
    """One answer. `message` has the request's message shape; `stop_string` ended the text and is not part of it."""

    message: Json
    finish_reason: FinishReason
    completion_tokens: int
    stop_string: str | None = None

    @property
    def tool_calls(self) -> list[Json]:
        calls: list[Json] = self.message.get("tool_calls", [])
        return calls


@dataclass(frozen=True, slots=True)
class ChatReply:
    """A finished, committed call. Wire ids come from `turn_id`, that of its first choice, the same for a replay."""

    turn_id: int
    model: str
    created: int
    prompt_tokens: int
    choices: list[ChatChoice]

    @property
    def completion_tokens(self) -> int:
        return sum(choice.completion_tokens for choice in self.choices)


class Recall(Protocol):
    """What an attempt was answered before, by turn id; None for a turn that it does not have."""

    def reply(self, turn_id: int) -> Json | None:
        """The assistant message of a turn."""

    def messages(self, turn_id: int) -> list[Json] | None:
        """All messages that a turn was asked with, if its request was to be stored."""


@dataclass(frozen=True, slots=True)
class Call:
    """What a protocol may read beside the body: the variables of the route's path, earlier answers, the query."""

    path: Mapping[str, str]
    recall: Recall
    query: Mapping[str, str] = field(default_factory=dict)


class WireProtocol(Protocol):
    """A module of this package. Everything is pure; `parse` raises RequestError, the others nothing.

    `KEEP_ALIVE` are bytes that a client of a stream skips, also before the first event. `KEY_PARAMETER` names the
    parameter of the query that may hold the key, if there is one.
    """

    PROTOCOL: str
    KEEP_ALIVE: bytes
    KEY_PARAMETER: str | None

    def parse(self, body: Json, call: Call) -> ChatRequest: ...

    def reply(self, answer: ChatReply, request: ChatRequest) -> Json | list[Json]:
        """The body of a plain answer."""

    def stream(self, answer: ChatReply, request: ChatRequest) -> Iterator[bytes]:
        """The events of a streamed answer, made from the finished one."""

    def error(self, problem: RequestError) -> Json:
        """The body of an error answer in the protocol's own shape."""

    def stream_error(self, problem: RequestError) -> bytes:
        """An error after a stream has begun."""


class CountProtocol(WireProtocol, Protocol):
    """A protocol that also counts the tokens of a request."""

    def parse_count(self, body: Json, call: Call) -> ChatRequest:
        """The request whose prompt is counted; its body is not always that of a call."""

    def count(self, tokens: int) -> Json:
        """The body that answers a count."""


class ListProtocol(WireProtocol, Protocol):
    """A protocol that also lists models."""

    def models(self, names: list[str]) -> Json:
        """The body that answers a list."""


def refuse_prefill(request: ChatRequest) -> None:
    """Raise RequestError if the conversation ends with the assistant: nothing begins a reply but the model, whose every
    token is recorded. Answering after it, as if it were whole, would be another conversation than the one asked for.
    """
    if not request.messages or request.messages[-1]["role"] != "assistant":
        return
    name = {"gemini": "contents", "openai-responses": "input"}.get(request.protocol, "messages")
    raise RequestError(
        f"{name} ends with a message of the assistant, as the beginning of a reply, which this model does not support: "
        "a reply is a message of its own. End the conversation with a user message or a tool result",
        param=name,
        code="prefill_not_supported",
    )


def digest(value: Any) -> bytes:
    """16 bytes that are equal for equal JSON values, whatever the order of their keys."""
    return hashlib.blake2b(orjson.dumps(value, option=orjson.OPT_SORT_KEYS), digest_size=16).digest()


def event(data: Any, name: str | None = None) -> bytes:
    """One server-sent event. Line ends of Unicode are escaped: some clients end a line there too."""
    head = b"event: " + name.encode() + b"\n" if name else b""
    body = orjson.dumps(data)
    for character, escape in _LINE_ENDS:
        body = body.replace(character, escape)
    return head + b"data: " + body + b"\n\n"


def image(url: str) -> Json:
    """A message part that shows an image; `url` may be a `data:` URL."""
    return {"type": "image_url", "image_url": {"url": url}}


def content_of(content: Any, path: str, part: Callable[[Any, str], str | Json]) -> str | list[Json]:
    """A message's content from a string, null or a list, each item of which `part` reads. Raises RequestError."""
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list):
        return joined(part(item, f"{path}[{i}]") for i, item in enumerate(content))
    raise RequestError(f"{path} is {kind_of(content)}; send a string or a list of parts", param=path)


def joined(parts: Iterable[str | Json]) -> str | list[Json]:
    """A message's content: one string if all parts are text, else the parts."""
    kept = list(parts)
    if all(isinstance(part, str) for part in kept):
        return "".join(map(str, kept))
    return [{"type": "text", "text": part} if isinstance(part, str) else part for part in kept]
