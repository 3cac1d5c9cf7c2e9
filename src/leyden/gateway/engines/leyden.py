"""The client of an engine that speaks Leyden's own contract over HTTP (the embedded one does)."""

from __future__ import annotations

from typing import Any

from leyden.gateway.engines.base import (
    Ends,
    GenerateRequest,
    as_promised,
    covering,
    finish_reason,
    finite,
    sampled_ids,
    within,
)
from leyden.gateway.engines.http import EngineHttp
from leyden.types import Generation, VersionSpan

HEALTH_S = 10.0


class LeydenEngine:
    """`POST /generate` takes ids and answers ids, log-probs and the version of each token."""

    def __init__(self, http: EngineHttp) -> None:
        self._http = http
        self._ends = Ends()

    async def generate(self, url: str, request: GenerateRequest) -> Generation:
        answer = await self._http.post(url, "/generate", body(request))
        with as_promised():
            generation = within(read(answer), request.max_tokens)
            self._ends.note(url, answer["finish_reason"])
        return generation

    async def health(self, url: str) -> None:
        await self._http.alive(url, HEALTH_S)


def body(request: GenerateRequest) -> dict[str, Any]:
    return {
        "prompt_ids": request.prompt_ids,
        "max_tokens": request.max_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "stop_token_ids": list(request.stop_token_ids),
        "stop": list(request.stop),
        "seed": request.seed,
    }


def read(answer: Any) -> Generation:
    """The engine's answer, checked. Raises CaptureError when ids are missing or contradicted by spans or log-probs."""
    answer = answer if isinstance(answer, dict) else {}
    ids = sampled_ids(answer.get("token_ids"))
    spans = covering(
        (VersionSpan(int(version), int(length)) for version, length in answer.get("spans") or ()), len(ids)
    )
    logprobs = finite(answer.get("logprobs"), len(ids))
    return Generation(ids, logprobs, finish_reason(answer.get("finish_reason")), spans, answer.get("stop_string"))
