"""Wire protocols: one pure file each, no I/O. `parse(body) -> ChatRequest`, `reply(ChatReply) -> JSON or SSE events`."""

from leyden.protocols.chat import ChatChoice, ChatReply, ChatRequest, HarnessSampling

__all__ = ["ChatChoice", "ChatReply", "ChatRequest", "HarnessSampling"]
