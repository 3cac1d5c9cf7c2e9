"""Where a prompt stands in the attempt's tree of turns, whoever rendered it."""

from __future__ import annotations

from dataclasses import dataclass

from leyden.protocols import ChatRequest
from leyden.protocols.chat import digest
from leyden.trajectory.causes import ForkCause, sibling_cause
from leyden.trajectory.continuity import extended, find
from leyden.trajectory.meaning import prefix_keys
from leyden.trajectory.nodes import Conversations, Node
from leyden.trajectory.text import find_text, prompt_keys, root_cause
from leyden.types import Ids


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """What the model is shown, and where it stands in the attempt's tree.

    `has_reasoning` says whether reasoning stands anywhere in `ids`. `shared` counts the first messages of the request
    that `parent` knows: its own and its reply; 0 where `parent` was found by ids alone.
    """

    ids: list[int] | Ids
    parent: Node | None
    cause: ForkCause | None
    keys: list[bytes]
    tools_key: bytes
    has_reasoning: bool
    shared: int = 0


def placed(
    known: Conversations,
    parent: Node | None,
    request: ChatRequest,
    ids: list[int] | Ids,
    keys: list[bytes],
    cause: ForkCause | None,
    *,
    reasoning: bool,
    shared: int = 0,
) -> Prompt:
    """A prompt under `parent`; `cause` says why it continues no other turn. `keys` are those of the request."""
    if parent is not None:
        cause = sibling_cause(known, parent, request.messages, keys, otherwise=cause)
    return Prompt(ids, parent, cause, keys, digest(request.tools), reasoning, shared)


def place(known: Conversations, request: ChatRequest, prompt_P: Ids) -> Prompt:
    """The place of a prompt that the engine rendered: under the turn whose ids it extends."""
    text = request.prompt
    keys = prefix_keys(request.messages) if text is None else prompt_keys(text)
    parent = extended(known, prompt_P)
    meant, cause = _meant(known, request, keys)
    if meant is not None:
        cause = None if meant is parent else ForkCause.RERENDERED
    reasoning = any(message.get("reasoning_content") for message in request.messages)
    return placed(known, parent, request, prompt_P, keys, cause, reasoning=reasoning)


def _meant(known: Conversations, request: ChatRequest, keys: list[bytes]) -> tuple[Node | None, ForkCause | None]:
    """The turn that the request continues by what it says, or why it continues none."""
    if request.prompt is None:
        found = find(known, request.messages, digest(request.tools), keys)
        return found.parent, found.cause
    if isinstance(request.prompt, str):
        text = find_text(known, request.prompt)
        return text.parent, text.cause
    return None, root_cause(known, request.prompt)
