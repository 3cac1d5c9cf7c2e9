"""The control API: groups, rollouts, rewards, events, models, turns. `ROUTES` says who may call what."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from leyden.client import encode, mint
from leyden.config import RunConfig, SamplingConfig, engine_url
from leyden.errors import Conflict, RequestError, Unprocessable
from leyden.gateway.admission import Admission
from leyden.gateway.auth import authenticate
from leyden.gateway.feed import Feed
from leyden.gateway.http import JsonResponse, parse_object, read_body
from leyden.gateway.metrics import Metrics
from leyden.gateway.models import Models
from leyden.gateway.turn import TurnService
from leyden.gateway.watch import Watch
from leyden.gateway.workspaces import Workspaces
from leyden.store import Store, reward_value
from leyden.types import Claims, Json, RolloutState, Scope

LONGEST_POLL_S = 60.0
MOST_ROLLOUTS = 5000
KEY_GRACE_S = 24 * 3600.0
MOST_EVENT_BYTES = 64 * 1024


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


_T = TypeVar("_T", bound=_Body)


class GroupSpec(_Body):
    kind: str = Field(pattern="^(train|eval)$")
    step: int = Field(ge=0, le=10**9)
    slot: int = Field(ge=0, le=10**6)
    size: int = Field(ge=1, le=10_000)
    task: dict[str, Any]
    sampling: SamplingConfig | None = None


class CreateGroups(_Body):
    groups: list[GroupSpec] = Field(max_length=10_000)


class GroupIds(_Body):
    group_ids: list[str]


class Recover(_Body):
    step: int = Field(ge=0)
    version: int = Field(ge=0)


class ClaimBody(_Body):
    controller: str = Field(min_length=1, max_length=200)


class TakeOverBody(ClaimBody):
    attempt: int = Field(ge=1)


class ExitBody(_Body):
    attempt: int
    exit_code: int | None = None
    timed_out: bool = False
    reason: str | None = None


class FinishBody(_Body):
    attempt: int
    reason: str | None = None


class FailureBody(_Body):
    attempt: int
    reason: str = Field(min_length=1, max_length=4000)


class CancelBody(_Body):
    reason: str = "cancelled"


class RewardBody(_Body):
    value: Any = None
    rollout_id: str | None = None
    attempt: int | None = None


class EventBody(_Body):
    kind: str = Field(min_length=1, max_length=200)
    data: dict[str, Any] = {}
    rollout_id: str | None = None
    attempt: int | None = None


class ModelBody(_Body):
    engines: list[str]
    version: int = Field(ge=0)
    lineage: str
    context_tokens: int = Field(ge=1)


class RolloutIds(_Body):
    rollout_ids: list[str]


@dataclass(frozen=True, slots=True)
class ControlApi:
    """The handlers. Each takes the request and the caller's claims and answers a response or plain JSON."""

    config: RunConfig
    secret: bytes
    store: Store
    turns: TurnService
    admission: Admission
    models: Models
    watch: Watch
    feed: Feed
    metrics: Metrics

    async def create_groups(self, request: Request, _: Claims) -> Json:
        body = await self._body(request, CreateGroups)
        return {"groups": self.store.rollouts.create_groups([spec.model_dump() for spec in body.groups])}

    async def list_groups(self, request: Request, _: Claims) -> Json:
        query = request.query_params
        step = _integer(query.get("step"), "step")
        return {"groups": self.store.rollouts.groups(kind=query.get("kind"), step=step, state=query.get("state"))}

    async def consume(self, request: Request, _: Claims) -> Json:
        self.store.rollouts.consume((await self._body(request, GroupIds)).group_ids)
        return {}

    async def recover(self, request: Request, _: Claims) -> Json:
        body = await self._body(request, Recover)
        discarded, reopened = self.store.rollouts.recover(body.step, body.version)
        return {"discarded": discarded, "reopened": reopened}

    async def list_rollouts(self, request: Request, _: Claims) -> Json:
        """Long-poll: answers at once when there is a change after the cursor, else at the next one or in the end."""
        query = request.query_params
        after = _integer(query.get("after"), "after") or 0
        limit = min(_integer(query.get("limit"), "limit") or 1000, MOST_ROLLOUTS)
        states = _states(query.get("states"))
        deadline = time.monotonic() + min(_number(query.get("wait_s"), "wait_s"), LONGEST_POLL_S)
        if controller := query.get("controller"):
            self.store.controllers.renew(controller)
        while True:
            newest = self.store.rollouts.cursor()
            rows = self.store.rollouts.after(after, states, limit, tasks=query.get("tasks") != "0")
            left = deadline - time.monotonic()
            if rows or left <= 0 or self.feed.closed:
                cursor = rows[-1]["change"] if len(rows) == limit else max(newest, after)
                return {"rollouts": [self._with_hold(row) for row in rows], "cursor": cursor}
            await self.feed.wait(left)

    async def get_rollout(self, request: Request, _: Claims) -> Json:
        return self._with_hold(self.store.rollouts.get(_rollout_id(request)))

    def _with_hold(self, rollout: Json) -> Json:
        """With the hold that goes on; a controller that is told less kills the harness."""
        held_s = rollout["held_s"] + self.turns.attempts.held_now(rollout["rollout_id"], rollout["attempt"])
        return rollout | {"held_s": held_s}

    async def claim(self, request: Request, _: Claims) -> Json:
        body = await self._body(request, ClaimBody)
        self.store.controllers.renew(body.controller)
        rollout = self.store.rollouts.claim(_rollout_id(request), body.controller)
        lifetime_s = self.config.controller.start_timeout_s + self.config.harness.timeout_s
        return {
            "rollout": rollout,
            "agent_key": self._key(Scope.AGENT, rollout, lifetime_s),
            "workspace_key": self._key(Scope.WORKSPACE, rollout, lifetime_s),
        }

    async def list_controllers(self, _request: Request, _: Claims) -> Json:
        return {"controllers": self.store.controllers.listing()}

    async def take_over(self, request: Request, _: Claims) -> Json:
        body = await self._body(request, TakeOverBody)
        self.store.controllers.renew(body.controller)
        return self.store.rollouts.take_over(_rollout_id(request), body.attempt, body.controller)

    async def exit(self, request: Request, _: Claims) -> Json:
        body = await self._body(request, ExitBody)
        rollout_id = _rollout_id(request)
        incomplete = self.store.rollouts.incomplete(rollout_id, body.attempt)
        self.turns.attempts.drop(rollout_id, body.attempt)
        if incomplete:
            rollout = self._void(rollout_id, body.attempt, f"incomplete: {incomplete}")
            return {"rollout": rollout, "grader_key": None}
        rollout = self.store.rollouts.exit(
            rollout_id, body.attempt, exit_code=body.exit_code, timed_out=body.timed_out, reason=body.reason
        )
        lifetime_s = self.config.controller.start_timeout_s + self.config.grader.timeout_s
        return {"rollout": rollout, "grader_key": self._key(Scope.GRADER, rollout, lifetime_s)}

    async def finish(self, request: Request, _: Claims) -> Json:
        body = await self._body(request, FinishBody)
        rollout = self.store.rollouts.get(_rollout_id(request))
        if rollout["attempt"] == body.attempt and rollout["reward"] is None and rollout["state"] == "grading":
            reason = f"no reward: {body.reason}" if body.reason else "no reward"
            return self._void(rollout["rollout_id"], body.attempt, reason)
        return self.store.rollouts.finish(rollout["rollout_id"], body.attempt, body.reason)

    async def infrastructure(self, request: Request, _: Claims) -> Json:
        body = await self._body(request, FailureBody)
        rollout_id = _rollout_id(request)
        rollout = self._void(rollout_id, body.attempt, body.reason)
        self.turns.attempts.drop(rollout_id, body.attempt)
        return rollout

    def _void(self, rollout_id: str, attempt: int, reason: str) -> Json:
        harness = self.config.harness
        return self.store.rollouts.infrastructure(
            rollout_id, attempt, reason, harness.max_attempts, harness.retry_backoff_s
        )

    async def give_back(self, request: Request, _: Claims) -> Json:
        body = await self._body(request, FailureBody)
        rollout_id = _rollout_id(request)
        rollout = self.store.rollouts.give_back(rollout_id, body.attempt, body.reason)
        self.turns.attempts.drop(rollout_id, body.attempt)
        return rollout

    async def cancel(self, request: Request, _: Claims) -> Json:
        body = await self._body(request, CancelBody)
        rollout = self.store.rollouts.cancel(_rollout_id(request), body.reason)
        self.turns.attempts.drop(rollout["rollout_id"], rollout["attempt"])
        return rollout

    async def reward(self, request: Request, claims: Claims) -> Json:
        body = await self._body(request, RewardBody)
        rollout_id, attempt = _subject(claims, body.rollout_id, body.attempt)
        rollout = self.store.rollouts.reward(
            rollout_id, attempt, reward_value(body.value), while_running=self.config.grader.harness
        )
        return {"reward": rollout["reward"]}

    async def put_workspace(self, request: Request, claims: Claims) -> Json:
        """What the harness left, as a gzipped tar, while its attempt is the running one. The last one counts."""
        rollout = self.store.rollouts.get(claims.rollout_id)
        if (rollout["state"], rollout["attempt"]) != (RolloutState.RUNNING, claims.attempt):
            raise Conflict(f"attempt {claims.attempt} of rollout {claims.rollout_id} is not running any more")
        size = await self._workspaces().put(claims.rollout_id, claims.attempt, request.stream())
        return {"bytes": size}

    async def get_workspace(self, request: Request, claims: Claims) -> Response:
        path = self._workspaces().find(claims.rollout_id, claims.attempt)
        return FileResponse(path, media_type="application/gzip")

    def _workspaces(self) -> Workspaces:
        return Workspaces(self.config.run_dir, self.config.gateway.max_workspace_bytes)

    async def add_event(self, request: Request, claims: Claims) -> Json:
        body = await self._body(request, EventBody, limit=MOST_EVENT_BYTES)
        named = body.rollout_id if claims.scope is Scope.CONTROL else claims.rollout_id
        current = self.store.rollouts.get(named or "")["attempt"] if body.attempt is None else body.attempt
        rollout_id, attempt = _subject(claims, named, current)
        return {"seq": self.store.turns.add_event(rollout_id, attempt, body.kind, body.data)}

    async def list_events(self, request: Request, _: Claims) -> Json:
        return {"events": self.store.turns.events(request.query_params.get("rollout_id", ""))}

    async def put_model(self, request: Request, _: Claims) -> Json:
        body = await self._body(request, ModelBody)
        try:
            engines = [engine_url(engine) for engine in body.engines]
        except ValueError as error:
            raise Unprocessable(f"engines: {error}", param="engines") from error
        self.models.register(request.path_params["name"], engines, body.version, body.lineage, body.context_tokens)
        self.watch.registered()
        return {}

    async def list_models(self, _request: Request, _: Claims) -> Json:
        return {"models": self.models.listing(), "paused": self.admission.paused}

    async def pause(self, _request: Request, _: Claims) -> Json:
        await self.admission.pause()
        return {"paused": True}

    async def resume(self, _request: Request, _: Claims) -> Json:
        self.admission.resume()
        return {"paused": False}

    async def read_turns(self, request: Request, _: Claims) -> Response:
        body = await self._body(request, RolloutIds)

        def read() -> bytes:
            with self.store.turns_reader() as turns:
                return encode(turns.of_rollouts(body.rollout_ids))

        return Response(await asyncio.to_thread(read), media_type="application/vnd.apache.arrow.stream")

    async def read_metrics(self, _request: Request, _: Claims) -> Response:
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4")

    async def _body(self, request: Request, kind: type[_T], limit: int | None = None) -> _T:
        raw = await read_body(request.scope, request.receive, limit or self.config.gateway.max_body_bytes)
        try:
            return kind.model_validate(parse_object(raw or b"{}", self.metrics))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise Unprocessable(f"{where}: {first['input']!r:.200} is refused: {first['msg']}", param=where) from None

    def _key(self, scope: Scope, rollout: Json, lifetime_s: float) -> str:
        expires = time.time() + lifetime_s + KEY_GRACE_S
        return mint(self.secret, Claims(scope, rollout["rollout_id"], rollout["attempt"], expires))


Handler = Callable[[Request, Claims], Awaitable[Json | Response]]
CONTROL = frozenset({Scope.CONTROL})


def routes(api: ControlApi) -> list[tuple[str, str, Handler, frozenset[Scope]]]:
    """(method, path, handler, scopes that may call it)."""
    return [
        ("POST", "/api/groups", api.create_groups, CONTROL),
        ("GET", "/api/groups", api.list_groups, CONTROL),
        ("POST", "/api/groups/consume", api.consume, CONTROL),
        ("POST", "/api/recover", api.recover, CONTROL),
        ("GET", "/api/rollouts", api.list_rollouts, CONTROL),
        ("GET", "/api/rollouts/{rollout_id}", api.get_rollout, CONTROL),
        ("POST", "/api/rollouts/{rollout_id}/claim", api.claim, CONTROL),
        ("POST", "/api/rollouts/{rollout_id}/take-over", api.take_over, CONTROL),
        ("GET", "/api/controllers", api.list_controllers, CONTROL),
        ("POST", "/api/rollouts/{rollout_id}/exit", api.exit, CONTROL),
        ("POST", "/api/rollouts/{rollout_id}/finish", api.finish, CONTROL),
        ("POST", "/api/rollouts/{rollout_id}/infrastructure", api.infrastructure, CONTROL),
        ("POST", "/api/rollouts/{rollout_id}/give-back", api.give_back, CONTROL),
        ("POST", "/api/rollouts/{rollout_id}/cancel", api.cancel, CONTROL),
        ("POST", "/api/reward", api.reward, CONTROL | {Scope.GRADER}),
        ("PUT", "/api/workspace", api.put_workspace, frozenset({Scope.WORKSPACE})),
        ("GET", "/api/workspace", api.get_workspace, frozenset({Scope.GRADER})),
        ("POST", "/api/events", api.add_event, CONTROL | {Scope.AGENT}),
        ("GET", "/api/events", api.list_events, CONTROL),
        ("PUT", "/api/models/{name}", api.put_model, CONTROL),
        ("GET", "/api/models", api.list_models, CONTROL),
        ("POST", "/api/pause", api.pause, CONTROL),
        ("POST", "/api/resume", api.resume, CONTROL),
        ("POST", "/api/turns", api.read_turns, CONTROL),
        ("GET", "/metrics", api.read_metrics, CONTROL),
    ]


def starlette_routes(api: ControlApi) -> list[Route]:
    return [
        Route(path, _endpoint(api.secret, handler, scopes), methods=[method])
        for method, path, handler, scopes in routes(api)
    ]


def _endpoint(secret: bytes, handler: Handler, scopes: frozenset[Scope]) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        try:
            claims = authenticate(request.headers, secret, scopes)
            answer = await handler(request, claims)
        except RequestError as error:
            content = {"error": {"message": str(error), "code": error.code, "param": error.param}}
            return JsonResponse(content, status_code=error.status)
        return answer if isinstance(answer, Response) else JsonResponse(answer)

    return endpoint


def _rollout_id(request: Request) -> str:
    return str(request.path_params["rollout_id"])


def _subject(claims: Claims, rollout_id: str | None, attempt: int | None) -> tuple[str, int]:
    """The attempt a call is about: the key's own, or for control keys the one it names."""
    if claims.scope is not Scope.CONTROL:
        return claims.rollout_id, claims.attempt
    if rollout_id is None or attempt is None:
        raise Unprocessable("with a control key, name rollout_id and attempt", param="rollout_id")
    return rollout_id, attempt


def _states(text: str | None) -> list[str]:
    names = [name for name in (text or "").split(",") if name] or [state.value for state in RolloutState]
    unknown = set(names) - {state.value for state in RolloutState}
    if unknown:
        raise Unprocessable(f"states {sorted(unknown)} are unknown; known are {[s.value for s in RolloutState]}")
    return names


def _integer(text: str | None, name: str) -> int | None:
    if text is None:
        return None
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise Unprocessable(f"{name} is {text!r:.40}, not a whole number", param=name)
    return int(text)


def _number(text: str | None, name: str) -> float:
    try:
        value = float(text or 0)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise Unprocessable(f"{name} is {text!r:.40}, not a number of seconds", param=name)
    return value
