"""One task through a gateway, a controller and its backend as they will be, with a model that says one sentence.

`Rehearsal` serves a gateway of its own in a folder of its own, so that nothing of a run is touched; `run` lets the
configured backend run the harness and the grader on one task; `judge_harness` and `judge_grader` say what came of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from leyden.client import ControlClient
from leyden.client.keys import control_key
from leyden.config import EngineConfig, RunConfig
from leyden.controller.last_words import last_lines
from leyden.controller.launch import BASE_URL_VARIABLES
from leyden.controller.paths import attempt_paths
from leyden.controller.reconcile import run_controller
from leyden.doctor.access import error_text
from leyden.doctor.address import GatewayAddress, free_port
from leyden.doctor.findings import Finding, ok, problem, skipped, warning
from leyden.doctor.scripted_engine import ScriptedEngine
from leyden.gateway.app import build
from leyden.gateway.render import ModelRenderer
from leyden.records import Rollout
from leyden.trainer.serving import serve
from leyden.types import Json, RolloutState

CONTROLLER = "doctor"
GRADING, SUCCEEDED = RolloutState.GRADING, RolloutState.SUCCEEDED
MOST_TURNS = 3
"""Enough to see a conversation; a harness that is never done ends with an error then."""
STOP_S = 20.0
POLL_S = 10.0
LOG_LINES = 8
MOST_REFUSED = 50
MOST_REPLY_BYTES = 8192


@dataclass(frozen=True, slots=True)
class Refused:
    """A call that the gateway did not serve, and what it said."""

    method: str
    path: str
    status: int
    text: str

    def __str__(self) -> str:
        return f"{self.method} {self.path}: {self.status} {self.text}"


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """How it went. `error` says why the rehearsal itself ended before the rollout was over."""

    rollout: Rollout
    protocols: dict[str, int]
    refused: tuple[Refused, ...]
    error: str | None
    harness_log: tuple[str, ...]
    grader_log: tuple[str, ...]
    unmet: Mapping[str, int] = field(default_factory=dict)


class Rehearsal:
    """A gateway at `url`, for pods at `pods_url`, with the keys of `secret`."""

    def __init__(self, config: RunConfig, url: str, pods_url: str, secret: bytes, refusals: Refusals) -> None:
        self.url = url
        self.pods_url = pods_url
        self.secret = secret
        self._config = config
        self._refusals = refusals

    async def run(self, task: Json, limit_s: float) -> Rehearsed:
        """Harness and grader on one task; whatever is not over after `limit_s` is ended."""
        self._refusals.seen.clear()
        async with ControlClient(self.url, control_key(self.secret)) as client:
            spec = {"kind": "eval", "step": 0, "slot": 0, "size": 1, "task": task}
            (group,) = await client.create_groups([spec])
            rollout_id = group.rollouts[0].rollout_id
            stop = asyncio.Event()
            work = run_controller(self._config, self.url, control_key(self.secret), CONTROLLER, stop=stop)
            controller = asyncio.create_task(work)
            try:
                error = await _over(client, rollout_id, controller, limit_s)
                rollout = await client.rollout(rollout_id)
                turns = await client.turns([rollout_id])
                unmet = await client.unmet()
            finally:
                stop.set()
                await asyncio.wait({controller}, timeout=STOP_S)
                controller.cancel()
                await asyncio.gather(controller, return_exceptions=True)
        paths = attempt_paths(self._config.run_dir, rollout_id, max(1, rollout.attempt))
        return Rehearsed(
            rollout=rollout,
            protocols=dict(Counter(turn.protocol for turn in turns)),
            refused=tuple(self._refusals.seen),
            error=error,
            harness_log=last_lines(paths.harness_log, LOG_LINES),
            grader_log=last_lines(paths.grade_log, LOG_LINES),
            unmet=unmet,
        )


async def _over(client: ControlClient, rollout_id: str, controller: asyncio.Task[None], limit_s: float) -> str | None:
    """Wait until the rollout is over, and answer None; or until something else ended the wait, and say what."""
    waiting = asyncio.create_task(_wait_until_over(client, rollout_id))
    await asyncio.wait({controller, waiting}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
    if waiting.done():
        await waiting
        return None
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    if not controller.done():
        return f"it was not over after {limit_s:g} s"
    return str(controller.exception() or "the controller ended")


async def _wait_until_over(client: ControlClient, rollout_id: str) -> None:
    cursor = 0
    while True:
        rollouts, cursor = await client.rollouts(after=cursor, wait_s=POLL_S)
        if any(r.rollout_id == rollout_id and r.state.terminal for r in rollouts):
            return


@contextlib.asynccontextmanager
async def rehearsal(
    config: RunConfig, renderer: ModelRenderer | None, folder: Path, limit_s: float, address: GatewayAddress
) -> AsyncIterator[Rehearsal]:
    """A gateway of the run file's settings in `folder`, with a stand-in for the engine."""
    settings = rehearsed(config, folder, limit_s)
    secret = secrets.token_bytes(32)
    app = build(settings, secret, renderer=renderer, engine=ScriptedEngine(renderer))
    refusals = Refusals(app)
    async with serve(refusals, address.host, free_port(address.host, address.port)) as url:
        async with ControlClient(url, control_key(secret)) as client:
            model = settings.model
            await client.put_model(
                model.name, engines=["stand-in"], version=0, lineage="doctor", context_tokens=model.context_tokens
            )
        try:
            pods_url = address.url(urlsplit(url).port or 0)
            own = settings.kubernetes.model_copy(update={"gateway_url": pods_url})
            yield Rehearsal(settings.model_copy(update={"kubernetes": own}), url, pods_url, secret, refusals)
        finally:
            app.state.turns.closing = True
            app.state.feed.close()


def rehearsed(config: RunConfig, folder: Path, limit_s: float) -> RunConfig:
    """The settings of a rehearsal: one attempt at a time, a few turns, no engine, nothing written elsewhere."""
    harness = config.harness
    fewer = {
        "max_attempts": 1,
        "max_turns": min(harness.max_turns, MOST_TURNS),
        "timeout_s": min(harness.timeout_s, limit_s / 2),
    }
    grader, one_at_a_time = config.grader, {"start": True, "concurrency": 1, "start_timeout_s": limit_s}
    return config.model_copy(
        update={
            "run_dir": folder,
            "harness": harness.model_copy(update=fewer),
            "grader": grader.model_copy(update={"max_tries": 1, "timeout_s": min(grader.timeout_s, limit_s / 2)}),
            "gateway": config.gateway.model_copy(update={"url": None}),
            "engine": EngineConfig(kind=config.engine.kind, render=config.engine.render),
            "controller": config.controller.model_copy(update=one_at_a_time),
            "workspace": config.workspace.model_copy(update={"keep": "all"}),
        }
    )


def judge_harness(seen: Rehearsed) -> Finding:
    """It must have been served at least one model call. How it takes the answer is its own affair."""
    rollout = seen.rollout
    if seen.protocols:
        spoken = ", ".join(f"{n} {protocol}" for protocol, n in seen.protocols.items())
        return ok("harness", f"model calls: {spoken}; {_end(seen)}")
    model_calls = [r for r in seen.refused if not r.path.startswith("/api/")]
    if model_calls:
        what = f"none of its {len(model_calls)} calls was served; the first: {model_calls[0]}"
        return problem("harness", what, advice_for(model_calls[0]), seen.harness_log)
    if not _ended(rollout):
        return problem("harness", f"it did not run to its end: {_end(seen)}", "", seen.harness_log)
    advice = (
        f"let it take its base URL from {', '.join(BASE_URL_VARIABLES)}, or put {{{{ url }}}} into harness.command or "
        "harness.env"
    )
    return problem("harness", f"it made no model call; {_end(seen)}", advice, seen.harness_log)


def judge_wishes(seen: Rehearsed) -> list[Finding]:
    """A warning of what the harness asked for and did not get, if there is anything."""
    if not seen.unmet:
        return []
    advice = "docs/protocols.md says what has effect; model.template_kwargs sets variables of the chat template"
    return [warning("wishes", f"the harness asks for what it does not get: {', '.join(sorted(seen.unmet))}", advice)]


def judge_grader(seen: Rehearsed, *, by_harness: bool) -> Finding:
    """It must have posted a number for what the harness left."""
    rollout = seen.rollout
    if rollout.reward is not None:
        return ok("grader", f"reward {rollout.reward:g} for what the harness left")
    if not _ended(rollout):
        return skipped("grader", "the harness did not run to its end")
    log = seen.harness_log if by_harness else seen.grader_log
    refused = [r for r in seen.refused if r.path == "/api/reward"]
    said = str(refused[-1]) if refused else seen.error or rollout.reason or "it posted nothing"
    advice = "it must post one finite number to LEYDEN_REWARD_URL with LEYDEN_KEY as Bearer, or return it"
    return problem("grader", f"no reward: {said}", advice, log)


def _ended(rollout: Rollout) -> bool:
    """Whether the harness's end was reported."""
    return rollout.exit_code is not None or rollout.timed_out or rollout.state in (GRADING, SUCCEEDED)


def _end(seen: Rehearsed) -> str:
    """How the harness ended, in words."""
    rollout = seen.rollout
    if rollout.timed_out:
        return "it was ended at its time limit"
    if rollout.exit_code is not None:
        return f"exit {rollout.exit_code}" if rollout.exit_code >= 0 else f"killed by signal {-rollout.exit_code}"
    return seen.error or rollout.reason or f"its rollout is {rollout.state}"


def advice_for(refused: Refused) -> str:
    """What to do about a call that was not served."""
    if refused.status in (404, 405):
        return "its base URL must be one of the variables that Leyden sets, as it is, with nothing added"
    if refused.status in (401, 403):
        return "its key must be that of OPENAI_API_KEY, ANTHROPIC_API_KEY, GEMINI_API_KEY or LEYDEN_KEY"
    if "maximum context length" in refused.text:
        return "raise model.context_tokens, or shorten the harness's prompt"
    return "docs/protocols.md says what is served"


class Refusals:
    """An ASGI application with note of the calls that it refuses."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.seen: list[Refused] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, body = 0, b""

        async def noting(message: Message) -> None:
            nonlocal status, body
            status = message.get("status", status)
            if status >= 400 and len(body) < MOST_REPLY_BYTES:
                body += message.get("body", b"")
            await send(message)

        await self._app(scope, receive, noting)
        if status >= 400 and len(self.seen) < MOST_REFUSED:
            self.seen.append(Refused(scope["method"], scope["path"], status, error_text(body)))
