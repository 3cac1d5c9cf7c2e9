"""Which path speaks which protocol. Each is also served under `/rollouts/ID`. The first match counts."""

from __future__ import annotations

from leyden.protocols import anthropic_messages, openai_chat, openai_completions, openai_responses
from leyden.protocols.chat import CountProtocol, WireProtocol

ROUTES: tuple[tuple[str, WireProtocol], ...] = (
    ("/v1/chat/completions", openai_chat),
    ("/v1/completions", openai_completions),
    ("/v1/responses", openai_responses),
    ("/v1/messages", anthropic_messages),
)
COUNT_ROUTES: tuple[tuple[str, CountProtocol], ...] = (("/v1/messages/count_tokens", anthropic_messages),)
