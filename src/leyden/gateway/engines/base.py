"""The engine contract and its check: nothing enters the record that contradicts itself."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from leyden.errors import CaptureError
from leyden.types import FinishReason, Generation, Json, VersionSpan

LOWEST_LOGPROB = -9000.0


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One call of an engine. `top_k` 0 means all tokens; stop strings end the text but keep their tokens."""

    prompt_ids: list[int]
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    seed: int | None = None

    def to_json(self) -> Json:
        return {
            "prompt_ids": self.prompt_ids,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "stop_token_ids": list(self.stop_token_ids),
            "stop": list(self.stop),
            "seed": self.seed,
        }


def generation(body: Any, request: GenerateRequest) -> Generation:
    """The engine's answer, checked. Log-probs that are missing, of another length or not finite become None.

    Raises CaptureError when ids are missing, too many, or contradicted by the version spans.
    """
    ids = body.get("token_ids") if isinstance(body, dict) else None
    if not isinstance(ids, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise CaptureError("the engine's answer has no token_ids; it must return the ids it sampled")
    if len(ids) > request.max_tokens:
        raise CaptureError(f"the engine sampled {len(ids)} tokens where max_tokens was {request.max_tokens}")
    spans = tuple(VersionSpan(int(version), int(length)) for version, length in body.get("spans") or ())
    if sum(span.length for span in spans) != len(ids):
        raise CaptureError(f"the engine's version spans {list(spans)} do not cover its {len(ids)} tokens")
    try:
        finish_reason = FinishReason(body.get("finish_reason"))
    except ValueError:
        raise CaptureError(f"the engine ended with {body.get('finish_reason')!r}, not stop or length") from None
    return Generation(ids, _logprobs(body.get("logprobs"), len(ids)), finish_reason, spans, body.get("stop_string"))


def _logprobs(values: Any, length: int) -> list[float] | None:
    if not isinstance(values, list) or len(values) != length:
        return None
    for value in values:
        if not isinstance(value, int | float) or not math.isfinite(value) or not LOWEST_LOGPROB < value <= 1e-6:
            return None
    return values
