"""What harnesses speak: one pure file per protocol, no I/O. `chat.WireProtocol` says what a file has to offer."""

from leyden.protocols.chat import Call, ChatChoice, ChatReply, ChatRequest, HarnessSampling, Recall, WireProtocol
from leyden.protocols.routes import COUNT_ROUTES, LIST_ROUTES, ROUTES

__all__ = [
    "COUNT_ROUTES",
    "LIST_ROUTES",
    "ROUTES",
    "Call",
    "ChatChoice",
    "ChatReply",
    "ChatRequest",
    "HarnessSampling",
    "Recall",
    "WireProtocol",
]
