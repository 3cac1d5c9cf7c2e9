"""Which path speaks which protocol. Each is also served under `/rollouts/ID`. The first match counts."""

from __future__ import annotations

from leyden.protocols import openai_chat, openai_completions
from leyden.protocols.chat import CountProtocol, WireProtocol

ROUTES: tuple[tuple[str, WireProtocol], ...] = (
    ("/v1/chat/completions", openai_chat),
    ("/v1/completions", openai_completions),
)
COUNT_ROUTES: tuple[tuple[str, CountProtocol], ...] = ()
