"""Inference engines behind one contract: `generate(prompt ids) -> token ids, log-probs, finish reason, versions`."""

from leyden.gateway.engines.base import GenerateRequest
from leyden.gateway.engines.http import HttpEngine

__all__ = ["GenerateRequest", "HttpEngine"]
