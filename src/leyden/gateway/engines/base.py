"""What engines are asked and what they answer, checked: nothing enters the record that contradicts itself.

Ids that are missing, too many, or contradicted by usage, version spans or log-probs make the attempt incomplete
(CaptureError). Log-probs that are missing or not finite become None as a whole; so do those of another number than the
ids, where the engine says a second time how many ids there are. They are never padded, cut or shifted.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from leyden.errors import CaptureError, ConfigError, EngineUnavailable
from leyden.types import FinishReason, Generation, Ids, Json, VersionSpan

log = logging.getLogger(__name__)
MOST_NAMES = 50
LOWEST_LOGPROB = -9000.0
LARGEST_ID = 2**31 - 1
LARGEST_SEED = 2**63 - 1


def engine_key(name: str | None, environment: Mapping[str, str]) -> str | None:
    """The key of `engine.api_key_env`, None where none is named. Raises ConfigError."""
    if name is None:
        return None
    key = environment.get(name, "")
    if not key:
        raise ConfigError(
            "engine.api_key_env", f"the environment has no {name}; set it to the key that the engines want"
        )
    if not all("!" <= character <= "~" for character in key):
        raise ConfigError("engine.api_key_env", f"{name} holds a space, a line end or a character that is not ASCII")
    return key


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample. `top_k` 0 means all tokens; stop strings end the text but keep their tokens."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None

    @property
    def plain(self) -> bool:
        """Whether log-probs before and after temperature and truncation are the same."""
        return (self.temperature, self.top_p, self.top_k) == (1.0, 1.0, 0)


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One call by token ids. `version` is the policy version that the gateway knows of when it asks; it is recorded
    where the engine does not say one.
    """

    prompt_ids: list[int]
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    seed: int | None = None
    version: int = 0

    def after(self, sampled: Sequence[int]) -> GenerateRequest:
        """The request for what is left when `sampled` is known. A seed is moved on: it would repeat its randomness."""
        return replace(
            self,
            prompt_ids=[*self.prompt_ids, *sampled],
            max_tokens=self.max_tokens - len(sampled),
            seed=None if self.seed is None else (self.seed + len(sampled)) & LARGEST_SEED,
        )


@dataclass(frozen=True, slots=True)
class ChatCall:
    """One call by messages, which the engine renders; or by `prompt`, which it tokenises where it is text.

    `calls` says whether the reply may call tools: without, it is read as text. `template_kwargs` are variables of
    the chat template.
    """

    messages: list[Json]
    tools: list[Json]
    sampling: Sampling
    prompt: str | list[int] | None = None
    version: int = 0
    calls: bool = True
    template_kwargs: Json = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class ChatAnswer:
    """What the engine showed the model, what that sampled, and the message that the engine parsed from it."""

    prompt_P: Ids
    generation: Generation
    message: Json


class MissingIds(CaptureError):
    """There are none, where other contradictions come and go: an engine that does not know the option."""


class Engine(Protocol):
    """`url` is the base URL of one engine. Each method raises EngineUnavailable (no answer, a broken one, 429, 5xx),
    EngineRejected (another 4xx), CaptureError (an answer that cannot be recorded), or NotSent in a pause.
    """

    async def generate(self, url: str, request: GenerateRequest) -> Generation:
        """Sample. `FinishReason.ABORT` says that the engine stopped early: the ids are good, there is more to come."""

    async def health(self, url: str) -> None:
        """Return if the engine works and can do what the run needs: it answers, and where that is not known from its
        calls, it samples a token.
        """


class ChatEngine(Engine, Protocol):
    """An engine that renders messages itself."""

    async def chat(self, url: str, call: ChatCall) -> ChatAnswer: ...

    async def count(self, url: str, call: ChatCall) -> int:
        """How many tokens the prompt has. NotFound if the engine cannot say."""


@contextlib.contextmanager
def as_promised() -> Iterator[None]:
    """An answer of another shape than it should have is a CaptureError."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CaptureError(f"the engine's answer cannot be read: {type(error).__name__}: {error}") from error


def sampled_ids(value: Any) -> list[int]:
    """`value` if it is a list of ids. Raises CaptureError."""
    numbers = isinstance(value, list) and set(map(type, value)) <= {int}
    if not numbers or (value and not 0 <= min(value) <= max(value) <= LARGEST_ID):
        raise MissingIds("the engine's answer has no token_ids; it must return the ids it sampled")
    ids: list[int] = value
    return ids


def within(generation: Generation, limit: int | None) -> Generation:
    """`generation` if it is no longer than was asked for. Raises CaptureError."""
    count = len(generation.token_ids_T)
    if limit is not None and count > limit:
        raise CaptureError(f"the engine sampled {count} tokens where max_tokens was {limit}")
    return generation


def prompt_ids(value: Any) -> Ids:
    """The ids of a prompt, from a list or an array. Raises CaptureError."""
    ids = np.asarray(value)
    if ids.dtype.kind != "i" or ids.ndim != 1 or not ids.size or not 0 <= ids.min() <= ids.max() <= LARGEST_ID:
        raise MissingIds("the engine's answer has no prompt_token_ids; it must return the ids it showed the model")
    return ids.astype(np.int32, copy=False)


def finite(logprobs: Any, length: int, *, confirmed: bool = False) -> list[float] | None:
    """`logprobs` if they are `length` log-probs, else None. No tokens have none.

    `confirmed`: the engine says apart from this that there are `length` ids. Raises CaptureError where it does not and
    the log-probs are of another number: ids are missing then as likely as log-probs.
    """
    count = len(logprobs) if isinstance(logprobs, list) else None
    if count not in (None, length) and not confirmed:
        raise CaptureError(f"the engine answered {length} ids and {count} log-probs; one of them is not whole")
    if not length:
        return []
    numbers = count == length and set(map(type, logprobs)) <= {float, int}
    if not numbers or math.isnan(sum(logprobs)):
        return None
    return logprobs if LOWEST_LOGPROB < min(logprobs) <= max(logprobs) <= 1e-6 else None


def finish_reason(said: Any) -> FinishReason:
    """`tool_calls` and what vLLM may come to say, such as `repetition`, are ends that the engine chose: a stop. Raises
    EngineUnavailable for a call that broke, CaptureError for one that has not ended.
    """
    if said == "error":
        raise EngineUnavailable("the engine's answer ended with 'error'", status=500)
    if not isinstance(said, str) or not said:
        raise CaptureError(f"the engine ended with {said!r}: it does not say why, so there may be more")
    return FinishReason(said) if said in list(FinishReason) else FinishReason.STOP


class Ends:
    """Names each reason to end that is not known, once."""

    def __init__(self) -> None:
        self._named: set[str] = {*FinishReason, "tool_calls", "function_call"}

    def note(self, url: str, said: str) -> None:
        if said not in self._named and len(self._named) < MOST_NAMES:
            self._named.add(said)
            log.warning("engine %s ends with %r, which is taken as a stop", url, said[:100])


def covering(spans: Iterable[VersionSpan], length: int) -> tuple[VersionSpan, ...]:
    """Spans of `length` tokens in all, neighbours of one version joined. Raises CaptureError."""
    joined: list[VersionSpan] = []
    for span in spans:
        if joined and joined[-1].version == span.version:
            joined[-1] = VersionSpan(span.version, joined[-1].length + span.length)
        elif span.length:
            joined.append(span)
    if sum(span.length for span in joined) != length or any(span.length < 0 for span in joined):
        raise CaptureError(f"the engine's version spans {[tuple(s) for s in joined]} do not cover its {length} tokens")
    return tuple(joined)


def joined(parts: Sequence[Generation]) -> Generation:
    """One generation from parts that continue each other."""
    if len(parts) == 1:
        return parts[0]
    ids = [token for part in parts for token in part.token_ids_T]
    logprobs: list[float] | None = []
    for part in parts:
        if part.token_ids_T:
            logprobs = None if logprobs is None or part.logprobs_T is None else [*logprobs, *part.logprobs_T]
    spans = covering((span for part in parts for span in part.spans), len(ids))
    return Generation(ids, logprobs, parts[-1].finish_reason, spans, parts[-1].stop_string)
