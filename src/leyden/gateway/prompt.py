"""From a conversation to prompt ids: an exact extension of a recorded turn where there is one, else rendered afresh."""

from __future__ import annotations

import logging
import unicodedata

import numpy as np

from leyden.errors import RequestError
from leyden.gateway.metrics import Metrics
from leyden.gateway.placement import Prompt, placed
from leyden.gateway.render import ModelRenderer
from leyden.protocols import ChatRequest
from leyden.protocols.chat import digest
from leyden.trajectory.causes import ForkCause
from leyden.trajectory.continuity import Continuation, extended, find
from leyden.trajectory.meaning import prefix_keys
from leyden.trajectory.nodes import Conversations, Node
from leyden.trajectory.text import find_text, prompt_keys, root_cause
from leyden.types import Json

log = logging.getLogger(__name__)
LONGEST_DECOMPOSED = 4  # code points of one character that NFC composes
NEAR_TOKENS = 8  # of what goes before, for reading a text's continuation in its place


class Prompter:
    """Makes the prompts of one model. Its only state is whether it has warned of a doubled BOS."""

    def __init__(self, renderer: ModelRenderer, metrics: Metrics, *, continuity: bool) -> None:
        self._renderer = renderer
        self._metrics = metrics
        self._continuity = continuity
        self._bos = renderer.encode("", add_special_tokens=True)[:1]
        self._warned = False

    def of(self, renderer: ModelRenderer) -> Prompter:
        """The same for another renderer of the model."""
        if renderer is self._renderer:
            return self
        return Prompter(renderer, self._metrics, continuity=self._continuity)

    def prompt(self, known: Conversations, request: ChatRequest, context_tokens: int) -> Prompt:
        """Raises RequestError for content that cannot be shown, and for what is far longer than the context."""
        with self._renderer.at_most(context_tokens):
            return self._prompt(known, request)

    def _prompt(self, known: Conversations, request: ChatRequest) -> Prompt:
        if request.prompt is not None:
            return self._completion(known, request, request.prompt)
        _check_text_only(request)
        keys = prefix_keys(request.messages)
        tools_key = digest(request.tools)
        found = self._find(known, request, tools_key, keys)
        if found.parent is not None:
            reasoning = found.parent.has_reasoning
            ids = self._bridge(found.parent, found.new_messages, request, reasoning=reasoning)
            if ids is not None:
                shared = len(request.messages) - len(found.new_messages)
                return placed(known, found.parent, request, ids, keys, None, reasoning=reasoning, shared=shared)
            found = Continuation(None, [], self._refusal(found.parent, found.new_messages, request))
        ids = self._renderer.render(request.messages, request.tools)
        reasoning = self._shows_reasoning(ids, request.messages)
        parent = extended(known, np.asarray(ids, dtype=np.int32))
        return placed(known, parent, request, ids, keys, found.cause, reasoning=reasoning)

    def _shows_reasoning(self, ids: list[int], messages: list[Json]) -> bool:
        """Whether the template left any reasoning of these messages in the prompt that it made of them."""
        thoughts = {m["reasoning_content"].strip() for m in messages if m.get("reasoning_content")} - {""}
        if not thoughts:
            return False
        text = unicodedata.normalize("NFC", self._renderer.decode(ids))
        thoughts = {thought for thought in thoughts if len(thought) <= LONGEST_DECOMPOSED * len(text)}
        return any(unicodedata.normalize("NFC", thought) in text for thought in thoughts)

    def _bridge(
        self, parent: Node, new_messages: list[Json], request: ChatRequest, *, reasoning: bool
    ) -> list[int] | None:
        sampled = parent.sampled_T.tolist()
        return self._renderer.bridge(parent.prompt_ids(), sampled, new_messages, request.tools, reasoning=reasoning)

    def _refusal(self, parent: Node, new_messages: list[Json], request: ChatRequest) -> ForkCause:
        """Why the template does not go on from the turn's ids: if all reasoning were kept, would it?"""
        if self._renderer.moves(new_messages):
            return ForkCause.LATE_SYSTEM
        kept = self._bridge(parent, new_messages, request, reasoning=False)
        return ForkCause.NOT_CLOSED if kept is None else ForkCause.TEMPLATE

    def _completion(self, known: Conversations, request: ChatRequest, prompt: str | list[int]) -> Prompt:
        """A prompt as it is: ids themselves, text as an engine would read it, with the tokenizer's own BOS."""
        ids, parent, cause = self._continued(known, prompt)
        if not ids:
            raise RequestError("prompt has no tokens; send at least one", param="prompt")
        if self._bos and ids[:2] == self._bos * 2:
            self._metrics.double_bos.inc()
            if not self._warned:
                self._warned = True
                log.warning("a prompt of /v1/completions begins with two BOS tokens: the tokenizer adds one to a text")
        return placed(known, parent, request, ids, prompt_keys(prompt), cause, reasoning=False)

    def _continued(
        self, known: Conversations, prompt: str | list[int]
    ) -> tuple[list[int], Node | None, ForkCause | None]:
        """The ids, the turn that they continue, and the cause if there is none."""
        cause = None
        if isinstance(prompt, str) and self._continuity:
            found = find_text(known, prompt)
            cause = found.cause
            if found.parent is not None:
                exact = self._exact(found.parent, found.rest, prompt)
                if isinstance(exact, list):
                    return exact, found.parent, None
                cause = exact
        ids = self._whole(prompt) if isinstance(prompt, str) else prompt
        parent = extended(known, np.asarray(ids, dtype=np.int32))
        if not self._continuity:
            return ids, parent, ForkCause.CONTINUITY_OFF if known.nodes else None
        return ids, parent, cause or (None if parent else root_cause(known, prompt))

    def _exact(self, parent: Node, rest: str, text: str) -> list[int] | ForkCause:
        """The turn's ids and those of `rest`, if they read as `text`; else why `text` cannot go on like that."""
        before = [*parent.prompt_ids(), *parent.sampled_T.tolist()]
        after = self._renderer.encode(rest, add_special_tokens=False)
        stop = [i for i in before[-1:] if len(parent.sampled_T) and i in self._renderer.stop_token_ids]
        if after[: len(stop)] != stop:
            return ForkCause.STOP_TOKEN
        ids = before + after[len(stop) :]
        near = before[: len(before) - len(stop)][-NEAR_TOKENS:]
        decode, shown = self._renderer.decode, self._renderer.text
        if decode(near + after) == decode(near) + rest or shown(ids) == shown(self._whole(text)):
            return ids
        return ForkCause.TOKENISED_WHOLE

    def _whole(self, text: str) -> list[int]:
        return self._renderer.encode(text, add_special_tokens=True)

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
