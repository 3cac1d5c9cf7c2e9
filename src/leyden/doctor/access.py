"""Who may call what: a gateway must take the run's own keys, and refuse every other key and every other use of them.

The calls change nothing on a gateway in use: each of them is to be refused, or only reads.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp
import orjson

from leyden.client import mint
from leyden.client.keys import control_key
from leyden.client.proof import UnprovenGateway, prove
from leyden.doctor.findings import Finding, ok, problem
from leyden.types import Claims, Scope

CALL_S = 10.0
KEY_S = 300.0
MOST_CHARS = 300
ANOTHER_SECRET = b"another secret, of another run.."
NOBODY = "doctor"


@dataclass(frozen=True, slots=True)
class Trial:
    """A request and the only status it may be answered with. `key` says in words which key it carries."""

    key: str
    method: str
    path: str
    status: int


@dataclass(frozen=True, slots=True)
class TrialResult:
    """`status` is None without an answer, `text` then says why: nobody answers, or a `stranger` does."""

    call: Trial
    status: int | None
    text: str = ""
    stranger: bool = False


HEALTH = Trial("no", "GET", "/health", 200)
READS = Trial("control", "GET", "/api/models", 200)
REFUSALS = (
    *(Trial(key, "GET", "/api/models", 401) for key in ("no", "forged", "expired")),
    *(Trial(key, "POST", "/v1/chat/completions", 401) for key in ("no", "forged", "expired")),
    *(
        Trial(key, method, path, 403)
        for key, method, path in (
            ("agent", "GET", "/api/models"),
            ("agent", "GET", "/api/rollouts"),
            ("agent", "POST", "/api/reward"),
            ("agent", "PUT", "/api/workspace"),
            ("agent", "GET", "/metrics"),
            ("workspace", "POST", "/v1/chat/completions"),
            ("workspace", "GET", "/api/workspace"),
            ("workspace", "GET", "/api/rollouts"),
            ("grader", "POST", "/v1/chat/completions"),
            ("grader", "PUT", "/api/workspace"),
            ("grader", "GET", "/api/rollouts"),
        )
    ),
)


def keys(secret: bytes, now: float) -> dict[str, str]:
    """By their names in `Trial.key`: one key of each scope, and some that are none."""
    scoped = {scope.value: mint(secret, Claims(scope, NOBODY, 1, now + KEY_S)) for scope in Scope}
    expired = mint(secret, Claims(Scope.CONTROL, "", 0, now - 1))
    forged = control_key(ANOTHER_SECRET, now=now)
    return {**scoped, "control": control_key(secret, now=now), "expired": expired, "forged": forged, "no": ""}


async def ask(url: str, calls: Sequence[Trial], secret: bytes) -> list[TrialResult]:
    """The answers, one after the other, until there is none. No key is sent before the gateway has proved itself."""
    known = keys(secret, time.time())
    answers = []
    proven = False
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=CALL_S), trust_env=False) as http:
        for call in calls:
            headers = {"authorization": f"Bearer {known[call.key]}"} if known[call.key] else {}
            data = b"{}" if call.method == "POST" else None
            try:
                if headers and not proven:
                    await prove(http, url.rstrip("/"), known["control"])
                    proven = True
                async with http.request(call.method, url + call.path, headers=headers, data=data) as response:
                    body = await response.read()
                    answers.append(TrialResult(call, response.status, error_text(body)))
            except UnprovenGateway as error:
                answers.append(TrialResult(call, None, str(error), stranger=True))
                break
            except (TimeoutError, aiohttp.ClientError, OSError) as error:
                answers.append(TrialResult(call, None, str(error) or type(error).__name__))
                break
    return answers


def judge_gateway(url: str, answers: Sequence[TrialResult]) -> Finding:
    """From the answers to HEALTH and READS at a gateway that the run file names."""
    for answer in answers:
        if answer.stranger:
            return problem("gateway", answer.text, "set LEYDEN_SECRET to the secret that the gateway was started with")
        if answer.status is None:
            what = f"{url} does not answer: {answer.text}"
            advice = "start it, or correct gateway.url; where only the cluster reaches it, run the doctor in there"
            return problem("gateway", what, advice)
        if answer.call == HEALTH and answer.status != HEALTH.status:
            what = f"{url} answers {answer.status} to GET /health: {answer.text}"
            return problem("gateway", what, "gateway.url must be the base URL of `leyden gateway`")
        if answer.status != answer.call.status:
            what = f"{url} answers {answer.status} to {answer.call.method} {answer.call.path}: {answer.text}"
            return problem("gateway", what, "is it a gateway of this version?")
    return ok("gateway", f"{url} answers and takes this run's control key")


def judge_keys(answers: Sequence[TrialResult]) -> Finding:
    """From the answers to REFUSALS."""
    for answer in answers:
        call = answer.call
        if answer.status == call.status:
            continue
        got = f"answers {answer.status}" if answer.status else f"gives no answer ({answer.text})"
        what = f"{call.method} {call.path} with {call.key} key {got} instead of {call.status}"
        advice = "let nothing but the gateway of this run, in this version, answer there: no proxy that adds a key"
        return problem("keys", what, advice)
    return ok("keys", f"{len(answers)} calls without a key, with a wrong one or one of another scope are refused")


def error_text(body: bytes) -> str:
    """`error.message` of a refusal, as all protocols have it, or its text."""
    try:
        return str(orjson.loads(body)["error"]["message"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return body[:MOST_CHARS].decode("utf-8", "replace")
