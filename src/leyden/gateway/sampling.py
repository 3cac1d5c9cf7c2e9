"""Which distribution a call samples from."""

from __future__ import annotations

from leyden.config import LOWEST_TEMPERATURE, SamplingConfig
from leyden.gateway.engines import Sampling
from leyden.protocols import ChatRequest
from leyden.types import Json

GREEDY = Sampling(temperature=0.0)


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
        own, seed = _of_harness(request) if group is None else _of_group(group), request.sampling.seed
    limits = [tokens for tokens in (request.max_tokens, own.max_tokens) if tokens is not None]
    return Sampling(own.temperature, own.top_p, own.top_k, seed, request.stop, min(limits, default=None))


def _of_group(group: Json) -> Sampling:
    return Sampling(group["temperature"], group["top_p"], group["top_k"], max_tokens=group.get("max_tokens"))


def _of_harness(request: ChatRequest) -> Sampling:
    """A `top_p` of 0 keeps the most likely token, as a temperature of 0 does. `top_k` 0 and -1 keep all tokens."""
    asked = request.sampling
    temperature = 1.0 if asked.temperature is None else asked.temperature
    if temperature == 0 or asked.top_p == 0:
        return GREEDY
    top_p = 1.0 if asked.top_p is None else asked.top_p
    return Sampling(max(temperature, LOWEST_TEMPERATURE), top_p, max(asked.top_k or 0, 0))
