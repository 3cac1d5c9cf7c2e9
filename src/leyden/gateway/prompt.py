"""From a conversation to prompt ids: an exact extension of a recorded turn where there is one, else rendered afresh."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from leyden.errors import RequestError
from leyden.gateway.render import ModelRenderer
from leyden.protocols import ChatRequest
from leyden.protocols.chat import digest
from leyden.trajectory.continuity import (
    Continuation,
    Conversations,
    ForkCause,
    Node,
    extended,
    find,
    has_reasoning,
    prefix_keys,
    sibling_cause,
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the model is shown, and where it stands in the attempt's tree.

    `shared` counts the first messages of the request that `parent` knows: its own and its reply; 0 where `parent` was
    found by ids alone.
    """

    ids: list[int]
    parent: Node | None
    cause: ForkCause | None
    keys: list[bytes]
    tools_key: bytes
    has_reasoning: bool
    shared: int = 0


class Prompter:
    """Makes the prompts of one model. Holds no state of its own."""

    def __init__(self, renderer: ModelRenderer, *, continuity: bool) -> None:
        self._renderer = renderer
        self._continuity = continuity

    def prompt(self, known: Conversations, request: ChatRequest) -> Prompt:
        """Raises RequestError for content that this renderer cannot show."""
        _check_text_only(request)
        keys = prefix_keys(request.messages)
        tools_key = digest(request.tools)
        reasoning = has_reasoning(request.messages)
        found = self._find(known, request, tools_key, keys)
        if found.parent is not None:
            parent = found.parent
            ids = self._renderer.bridge(
                parent.prompt_ids(),
                parent.sampled_T.tolist(),
                found.new_messages,
                request.tools,
                reasoning=reasoning,
            )
            if ids is not None:
                cause = sibling_cause(known, parent, request.messages, keys)
                shared = len(request.messages) - len(found.new_messages)
                return Prompt(ids, parent, cause, keys, tools_key, reasoning, shared)
            found = Continuation(None, [], ForkCause.TEMPLATE)
        ids = self._renderer.render(request.messages, request.tools)
        if found.cause is not ForkCause.CONTINUITY_OFF:
            parent_by_ids = extended(known, np.asarray(ids, dtype=np.int32))
            if parent_by_ids is not None:
                cause = sibling_cause(known, parent_by_ids, request.messages, keys)
                return Prompt(ids, parent_by_ids, cause, keys, tools_key, reasoning)
        return Prompt(ids, None, found.cause, keys, tools_key, reasoning)

    def _find(self, known: Conversations, request: ChatRequest, tools_key: bytes, keys: list[bytes]) -> Continuation:
        if not self._continuity:
            return Continuation(None, [], ForkCause.CONTINUITY_OFF if known.nodes else None)
        return find(known, request.messages, tools_key, keys)


def _check_text_only(request: ChatRequest) -> None:
    for index, message in enumerate(request.messages):
        if not isinstance(message["content"], str):
            where = f"messages[{index}].content"
            raise RequestError(
                f"{where} holds an image, which the gateway's renderer cannot show; set engine.render: engine in the "
                "run file, or leave the image out",
                param=where,
                code="image_not_supported",
            )
