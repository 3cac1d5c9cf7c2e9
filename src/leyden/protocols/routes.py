"""Which path speaks which protocol. Each is also served under `/rollouts/ID`. The first match counts."""

from __future__ import annotations

from leyden.protocols import anthropic_messages, gemini, openai_chat, openai_completions, openai_responses
from leyden.protocols.chat import CountProtocol, ListProtocol, WireProtocol

ROUTES: tuple[tuple[str, WireProtocol], ...] = (
    ("/v1/chat/completions", openai_chat),
    ("/v1/completions", openai_completions),
    ("/v1/responses", openai_responses),
    ("/v1/messages", anthropic_messages),
    ("/v1beta/models/{model:path}:{method}", gemini),
    ("/v1/models/{model:path}:{method}", gemini),
)
COUNT_ROUTES: tuple[tuple[str, CountProtocol], ...] = (
    ("/v1/messages/count_tokens", anthropic_messages),
    ("/v1beta/models/{model:path}:countTokens", gemini),
    ("/v1/models/{model:path}:countTokens", gemini),
)
LIST_ROUTES: tuple[tuple[str, ListProtocol], ...] = (("/v1/models", openai_chat), ("/v1beta/models", gemini))
