"""What the engine contract asks for, and a request on its way through the sampler."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from pydantic import ConfigDict, with_config

from leyden.errors import EngineRejected
from leyden.trainer.embedded.stopping import StopStrings
from leyden.types import FinishReason, Generation, VersionSpan


@with_config(ConfigDict(strict=True, extra="forbid"))
@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One request of the engine contract. `top_k` 0 is off, `temperature` 0 greedy; `seed` None takes the next one."""

    prompt_ids: Sequence[int]
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: Sequence[int] = ()
    stop: Sequence[str] = ()
    seed: int | None = None


@dataclass(slots=True, eq=False)
class Active:
    """A request on its way. `marks` are (version, number of tokens sampled before it)."""

    request: SampleRequest
    prompt: list[int]
    rng: random.Random
    stop_ids: frozenset[int]
    stop_strings: StopStrings | None
    future: Future[Generation] = field(default_factory=Future)
    sampled: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    marks: list[tuple[int, int]] = field(default_factory=list)
    slot: int = -1

    def generation(self, reason: FinishReason, stop_string: str | None) -> Generation:
        ends = [start for _, start in self.marks[1:]] + [len(self.sampled)]
        spans = (VersionSpan(v, end - start) for (v, start), end in zip(self.marks, ends, strict=True))
        return Generation(self.sampled, self.logprobs, reason, tuple(s for s in spans if s.length), stop_string)

    def end(self, context_tokens: int) -> tuple[FinishReason, str | None] | None:
        """Whether the token that was added last ends the request: (reason, stop string), or None to go on."""
        if self.sampled[-1] in self.stop_ids:
            return FinishReason.STOP, None
        if self.stop_strings is not None and (stop := self.stop_strings.find(self.sampled)) is not None:
            return FinishReason.STOP, stop
        if len(self.sampled) >= self.request.max_tokens:
            return FinishReason.LENGTH, None
        if len(self.prompt) + len(self.sampled) >= context_tokens:
            return FinishReason.LENGTH, None
        return None


def check(r: SampleRequest, *, context_tokens: int, vocabulary: int, has_text: bool) -> None:
    """Raises EngineRejected naming the value and the limit."""
    if not r.prompt_ids:
        raise EngineRejected("prompt_ids is empty; at least one token is needed")
    if len(r.prompt_ids) >= context_tokens:
        raise EngineRejected(
            f"the prompt has {len(r.prompt_ids)} tokens; with context_tokens {context_tokens} it may have "
            f"{context_tokens - 1} at most, which leaves room for one sampled token"
        )
    low, high = min(r.prompt_ids), max(r.prompt_ids)
    if low < 0 or high >= vocabulary:
        wrong = low if low < 0 else high
        raise EngineRejected(f"prompt_ids holds {wrong}; ids are 0 to {vocabulary - 1}")
    if r.max_tokens < 1:
        raise EngineRejected(f"max_tokens is {r.max_tokens}; it must be at least 1")
    if not (math.isfinite(r.temperature) and r.temperature >= 0):
        raise EngineRejected(f"temperature is {r.temperature}; it must be finite and at least 0")
    if not 0 < r.top_p <= 1:
        raise EngineRejected(f"top_p is {r.top_p}; it must be above 0 and at most 1")
    if r.top_k < 0:
        raise EngineRejected(f"top_k is {r.top_k}; it must be at least 0 (0 is off)")
    if "" in r.stop:
        raise EngineRejected("stop holds an empty string, which every text contains; remove it")
    if r.stop and not has_text:
        raise EngineRejected("stop strings need a tokenizer, and this engine has none")
