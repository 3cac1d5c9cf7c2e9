"""Which distribution a call samples from."""

from __future__ import annotations

from leyden.config import SamplingConfig
from leyden.gateway.engines import Sampling
from leyden.protocols import ChatRequest
from leyden.types import Json


def of_training(config: SamplingConfig) -> Sampling:
    """The run file's."""
    return Sampling(config.temperature, config.top_p, config.top_k, max_tokens=config.max_tokens)


def of_call(training: Sampling, kind: str, group: Json | None, request: ChatRequest) -> Sampling:
    """The run file's in training; in evaluation the group's, or else the harness's own. Stop strings are always the
    harness's, a seed is only where it does not make training repeat itself.
    """
    if kind == "train":
        own, seed = training, None
    else:
        own, seed = _of_group(group) if group else _of_harness(request), request.sampling.seed
    limits = [tokens for tokens in (request.max_tokens, own.max_tokens) if tokens]
    return Sampling(own.temperature, own.top_p, own.top_k, seed, request.stop, min(limits, default=None))


def _of_group(group: Json) -> Sampling:
    return Sampling(group["temperature"], group["top_p"], group["top_k"], max_tokens=group.get("max_tokens"))


def _of_harness(request: ChatRequest) -> Sampling:
    asked = request.sampling
    temperature = 1.0 if asked.temperature is None else asked.temperature
    return Sampling(temperature, asked.top_p or 1.0, max(asked.top_k or 0, 0))
