"""Inference engines behind one contract: `generate(prompt ids) -> token ids, log-probs, finish reason, versions`."""

from leyden.gateway.engines.base import (
    ChatAnswer,
    ChatCall,
    ChatEngine,
    Engine,
    GenerateRequest,
    Sampling,
    engine_key,
    joined,
)
from leyden.gateway.engines.connections import NotSent
from leyden.gateway.engines.engine_http import EngineHttp
from leyden.gateway.engines.evidence import Evidence
from leyden.gateway.engines.leyden import LeydenEngine
from leyden.gateway.engines.vllm import VllmEngine

__all__ = [
    "ChatAnswer",
    "ChatCall",
    "ChatEngine",
    "Engine",
    "EngineHttp",
    "Evidence",
    "GenerateRequest",
    "LeydenEngine",
    "NotSent",
    "Sampling",
    "VllmEngine",
    "engine_key",
    "joined",
]
