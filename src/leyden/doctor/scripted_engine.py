"""A model that says one sentence, for a gateway without an engine."""

from __future__ import annotations

import numpy as np

from leyden.gateway.engines import ChatAnswer, ChatCall, GenerateRequest
from leyden.gateway.render import ModelRenderer
from leyden.types import FinishReason, Generation, VersionSpan

SENTENCE = "There is nothing to do."
LOGPROB = -0.1
# Without a tokenizer any ids will do: nothing of a rehearsal is trained.
PROMPT_ID = 1


class ScriptedEngine:
    """`gateway.engines.ChatEngine`. Without a renderer it spells its sentence in ids that mean nothing."""

    def __init__(self, renderer: ModelRenderer | None) -> None:
        self._ids = [0]
        if renderer is not None:
            self._ids = [*renderer.encode(SENTENCE, add_special_tokens=False), renderer.stop_token_ids[0]]

    async def generate(self, url: str, request: GenerateRequest) -> Generation:
        return _generation(self._ids[: request.max_tokens])

    async def chat(self, url: str, call: ChatCall) -> ChatAnswer:
        prompt = np.full(await self.count(url, call), PROMPT_ID, np.int32)
        return ChatAnswer(prompt, _generation(self._ids), {"role": "assistant", "content": SENTENCE})

    async def count(self, url: str, call: ChatCall) -> int:
        return 1 + len(call.messages)

    async def health(self, url: str) -> None:
        """It works."""


def _generation(ids: list[int]) -> Generation:
    return Generation(ids, [LOGPROB] * len(ids), FinishReason.STOP, (VersionSpan(0, len(ids)),))
