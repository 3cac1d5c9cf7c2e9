"""The client of an engine that speaks Leyden's own contract over HTTP (the embedded one does)."""

from __future__ import annotations

from typing import Any

import orjson

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
from leyden.gateway.engines.engine_http import EngineHttp
from leyden.gateway.engines.evidence import Evidence
from leyden.types import Generation, VersionSpan

HEALTH_S = 10.0
_PROBE = GenerateRequest(prompt_ids=[1], max_tokens=1)


class LeydenEngine:
    """`POST /generate` takes ids and answers ids, log-probs and the version of each token."""

    def __init__(self, http: EngineHttp, evidence: Evidence) -> None:
        self._http = http
        self._evidence = evidence
        self._sampled: dict[str, int | None] = {}
        self._ends = Ends()

    async def generate(self, url: str, request: GenerateRequest) -> Generation:
        with self._evidence.call(url):
            return await self._generate(url, request)

    async def health(self, url: str) -> None:
        await self._http.alive(url, HEALTH_S)
        if self._evidence.silent(url) and await self._samples_on(url):
            self._evidence.heard(url)
        if self._evidence.doubtful(url):
            await self._evidence.proof(url, self._generate(url, _PROBE))

    async def _samples_on(self, url: str) -> bool:
        """Whether there are more tokens than when this was asked last. All places may be taken by long answers."""
        status, body = await self._http.get(url, "/progress", HEALTH_S)
        sampled = tokens_so_far(body) if status == 200 else None
        before, self._sampled[url] = self._sampled.get(url), sampled
        return sampled is not None and sampled != before

    async def _generate(self, url: str, request: GenerateRequest) -> Generation:
        answer = await self._http.post(url, "/generate", body(request))
        with as_promised():
            generation = within(read(answer), request.max_tokens)
            self._ends.note(url, answer["finish_reason"])
        return generation


def tokens_so_far(progress: bytes) -> int | None:
    """`sampled` of an answer to GET /progress, which an engine need not serve: how many tokens it has sampled."""
    try:
        said = orjson.loads(progress)
    except orjson.JSONDecodeError:
        return None
    sampled = said.get("sampled") if isinstance(said, dict) else None
    return sampled if isinstance(sampled, int) else None


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
