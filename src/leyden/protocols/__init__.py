"""Wire protocols: one pure file each, no I/O. `parse(body) -> ChatRequest`, `reply` and `stream` of a ChatReply."""

from leyden.protocols.chat import ChatChoice, ChatReply, ChatRequest, HarnessSampling

__all__ = ["ChatChoice", "ChatReply", "ChatRequest", "HarnessSampling"]
