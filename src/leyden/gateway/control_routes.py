"""The routes of the control API. `OPERATIONS` says what each takes, and from whom."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from leyden.config import RunConfig
from leyden.errors import InternalError, RequestError, Unprocessable
from leyden.gateway.auth import authenticate
from leyden.gateway.control_api import ARROW, GZIP, ControlApi
from leyden.gateway.control_bodies import (
    SEND_REWARD,
    Body,
    CancelBody,
    ClaimBody,
    ControlCall,
    CreateGroups,
    EventBody,
    EventQuery,
    ExitBody,
    FailureBody,
    FinishBody,
    GroupIds,
    GroupQuery,
    ModelBody,
    Query,
    Recover,
    RewardBody,
    RolloutIds,
    RolloutQuery,
    TakeOverBody,
    VoidBody,
    read,
)
from leyden.gateway.http import ClientGone, JsonResponse, content_encoding, decoded, log_bug, parse_object, read_body
from leyden.protocols.checks import big_integer
from leyden.types import Claims, Scope

log = logging.getLogger(__name__)
Handler = Callable[[ControlApi, ControlCall], Awaitable[Any]]
CONTROL = frozenset({Scope.CONTROL})
JSON = "application/json"
MOST_EVENT_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Operation:
    """One route: what it takes, who may call it, what it answers. `most_bytes` bounds the body more than usual.

    Where there is no `body` to be read, `takes` is the type of one that the handler reads itself. `hint` ends what is
    said of a body that is refused. `by_harness`: an agent's key may as well where the harness grades itself.
    """

    method: str
    path: str
    handler: Handler
    body: type[Body] | None = None
    query: type[Query] | None = None
    scopes: frozenset[Scope] = CONTROL
    answers: str = JSON
    takes: str | None = None
    most_bytes: int | None = None
    hint: str = ""
    by_harness: bool = False

    def allowed(self, config: RunConfig) -> frozenset[Scope]:
        """Whose keys a run takes."""
        return self.scopes | {Scope.AGENT} if self.by_harness and config.grader.harness else self.scopes


_ROLLOUT = "/api/rollouts/{rollout_id}"
OPERATIONS: tuple[Operation, ...] = (
    Operation("POST", "/api/groups", ControlApi.create_groups, CreateGroups),
    Operation("GET", "/api/groups", ControlApi.list_groups, query=GroupQuery),
    Operation("POST", "/api/groups/consume", ControlApi.consume, GroupIds),
    Operation("POST", "/api/recover", ControlApi.recover, Recover),
    Operation("GET", "/api/rollouts", ControlApi.list_rollouts, query=RolloutQuery),
    Operation("GET", _ROLLOUT, ControlApi.get_rollout),
    Operation("POST", f"{_ROLLOUT}/claim", ControlApi.claim, ClaimBody),
    Operation("POST", f"{_ROLLOUT}/take-over", ControlApi.take_over, TakeOverBody),
    Operation("GET", "/api/controllers", ControlApi.list_controllers),
    Operation("POST", f"{_ROLLOUT}/exit", ControlApi.exit, ExitBody),
    Operation("POST", f"{_ROLLOUT}/finish", ControlApi.finish, FinishBody),
    Operation("POST", f"{_ROLLOUT}/infrastructure", ControlApi.infrastructure, VoidBody),
    Operation("POST", f"{_ROLLOUT}/give-back", ControlApi.give_back, FailureBody),
    Operation("POST", f"{_ROLLOUT}/cancel", ControlApi.cancel, CancelBody),
    Operation(
        "POST",
        "/api/reward",
        ControlApi.reward,
        RewardBody,
        scopes=CONTROL | {Scope.GRADER},
        by_harness=True,
        hint=SEND_REWARD,
    ),
    Operation("PUT", "/api/workspace", ControlApi.put_workspace, scopes=frozenset({Scope.WORKSPACE}), takes=GZIP),
    Operation("GET", "/api/workspace", ControlApi.get_workspace, scopes=frozenset({Scope.GRADER}), answers=GZIP),
    Operation(
        "POST",
        "/api/events",
        ControlApi.add_event,
        EventBody,
        scopes=CONTROL | {Scope.AGENT},
        most_bytes=MOST_EVENT_BYTES,
    ),
    Operation("GET", "/api/events", ControlApi.list_events, query=EventQuery),
    Operation("PUT", "/api/models/{name}", ControlApi.put_model, ModelBody),
    Operation("GET", "/api/models", ControlApi.list_models),
    Operation("POST", "/api/pause", ControlApi.pause),
    Operation("POST", "/api/resume", ControlApi.resume),
    Operation("POST", "/api/turns", ControlApi.read_turns, RolloutIds, answers=ARROW),
    Operation("GET", "/api/unmet", ControlApi.list_unmet),
    Operation("GET", "/metrics", ControlApi.read_metrics, answers="text/plain"),
)


def starlette_routes(api: ControlApi) -> list[Route]:
    return [Route(op.path, _endpoint(api, op), methods=[op.method]) for op in OPERATIONS]


def _endpoint(api: ControlApi, operation: Operation) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        try:
            claims = authenticate(request.headers, api.secret, operation.allowed(api.config))
            answer = await operation.handler(api, await _call(api, operation, request, claims))
        except (ClientGone, ClientDisconnect):
            return Response()
        except RequestError as error:
            return _refusal(error)
        except Exception as error:
            log_bug(log, f"{operation.method} {operation.path}", error)
            return _refusal(InternalError(f"the gateway failed on this call ({type(error).__name__}); see its log"))
        return answer if isinstance(answer, Response) else JsonResponse(answer)

    return endpoint


async def _call(api: ControlApi, operation: Operation, request: Request, claims: Claims) -> ControlCall:
    query = read(operation.query, dict(request.query_params)) if operation.query else None
    body = None
    if operation.body is not None:
        limit = operation.most_bytes or api.config.max_body_bytes
        raw = await read_body(request.scope, request.receive, limit)
        raw = decoded(raw, content_encoding(request.scope), limit)
        try:
            given = parse_object(raw or b"{}", api.metrics)
            if integer := big_integer(raw):
                raise Unprocessable(f"the integer {integer:.40} has more than 64 bits; send it as text")
            body = read(operation.body, given)
        except RequestError as error:
            raise type(error)(f"{error}{operation.hint}", param=error.param, code=error.code) from None
    return ControlCall(request, claims, body, query)


def _refusal(error: RequestError) -> Response:
    content = {"error": {"message": str(error), "code": error.code, "param": error.param}}
    return JsonResponse(content, status_code=error.status)
