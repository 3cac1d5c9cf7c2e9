"""The two ways from a request to sampled ids: `render: gateway` and `render: engine`.

gateway   the prompt's ids are made here, exactly those of the turn it continues and the new messages' after them;
          the reply is parsed from the sampled ids. An update interrupts a call, and it goes on from its ids.
engine    the messages go to the engine, which renders and parses. Which turn a call continues is seen from the ids
          that come back. An update waits for open calls, and those that take too long are made again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from leyden.gateway.attempts import Attempt
from leyden.gateway.placement import Prompt
from leyden.gateway.unmet import Wishes
from leyden.protocols import ChatRequest
from leyden.types import Generation, Json

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Sampled:
    """One answer, not yet recorded. `message` is the engine's own reading of it, where it rendered."""

    prompt: Prompt
    generation: Generation
    message: Json | None = None


class Way(Protocol):
    wishes: Wishes

    async def sample(self, attempt: Attempt, request: ChatRequest) -> list[Sampled]:
        """`request.n` answers. Raises RequestError for what cannot be answered, CaptureError for what cannot be
        recorded, EngineUnsuitable if no engine can serve the run.
        """

    def reply(self, sampled: Sampled, request: ChatRequest, turn_id: int) -> Json:
        """The assistant message of an answer. Its tool calls are named after the turn: a replay says the same."""

    async def count(self, attempt: Attempt, request: ChatRequest) -> int:
        """How many tokens the prompt of this request has now."""


async def all_of(works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """The results in order. The first error ends the others."""
    if len(works) == 1:
        return [await works[0]]
    tasks = [asyncio.create_task(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def first_call(message: Json) -> Json:
    """With one call at most, as vLLM reads a reply where no parallel calls are wanted."""
    return message | {"tool_calls": message["tool_calls"][:1]} if "tool_calls" in message else message
