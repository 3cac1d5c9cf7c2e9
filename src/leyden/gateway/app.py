"""The gateway as an ASGI application, built from a run file."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, cast

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from leyden.client.proof import gateways_proof
from leyden.config import RunConfig
from leyden.gateway.admission import Admission, InFlight
from leyden.gateway.calls import EngineCalls
from leyden.gateway.control_api import ControlApi
from leyden.gateway.control_routes import starlette_routes
from leyden.gateway.engine_rendered import EngineRendered
from leyden.gateway.engines import ChatEngine, Engine, EngineHttp, Evidence, LeydenEngine, VllmEngine
from leyden.gateway.feed import Feed
from leyden.gateway.gateway_rendered import GatewayRendered
from leyden.gateway.health_checks import Watch
from leyden.gateway.http import JsonResponse
from leyden.gateway.metrics import Metrics
from leyden.gateway.model_routes import KEEP_ALIVE_S, CountEndpoint, Entry, ModelEndpoint, ModelList
from leyden.gateway.models import Models
from leyden.gateway.prompt import Prompter
from leyden.gateway.render import ModelRenderer, load_renderer
from leyden.gateway.sampling import of_training
from leyden.gateway.turn import TurnService
from leyden.gateway.ways import Way
from leyden.gateway.workers import Workers
from leyden.protocols import COUNT_ROUTES, LIST_ROUTES, ROUTES
from leyden.store import Outage, Store

log = logging.getLogger(__name__)


def build(
    config: RunConfig,
    secret: bytes,
    *,
    renderer: ModelRenderer | None = None,
    engine: Engine | None = None,
    engine_key: str | None = None,
    keep_alive_s: float = KEEP_ALIVE_S,
) -> Starlette:
    """The ASGI application on the run folder's store. Tests inject an engine, a renderer or a shorter keep-alive."""
    feed = Feed()
    store = Store(config.run_dir / "store.sqlite", feed.notify)
    _settle(store.come_back())
    metrics = Metrics()
    side = _EngineSide(config, store, engine, engine_key, metrics)
    turns = TurnService(config, store, side.way(renderer), metrics, side.workers)
    api = ControlApi(config, secret, store, turns, side.admission, side.models, side.watch, feed, metrics)
    entry = Entry(secret, config.max_body_bytes, keep_alive_s, turns, metrics, side.workers)

    @contextlib.asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        watching = asyncio.create_task(side.watch.run())
        watching.add_done_callback(app.state.unwatched)
        looking = asyncio.create_task(side.workers.watch_loop(turns.attempts.stalled))
        yield
        looking.cancel()
        watching.cancel()
        await side.http.close()
        side.workers.close()
        store.close()

    app = _App(
        {path: ModelEndpoint(protocol, entry) for path, protocol in ROUTES if "{" not in path},
        routes=[
            *_model_routes(entry, config.model.name),
            *(Route(path, _health(secret), methods=["GET"]) for path in ("/health", "/", "/rollouts/{rollout_id}")),
            *starlette_routes(api),
        ],
        exception_handlers={404: _no_route, 405: _no_route},
        lifespan=lifespan,
    )
    app.state.turns = turns
    app.state.unwatched = _log_failure
    app.state.feed = feed
    return app


def _health(secret: bytes) -> Callable[[Request], Awaitable[Response]]:
    async def health(request: Request) -> Response:
        """Also answers harnesses that look at their base URL first (Claude Code: HEAD, without a key)."""
        nonce = request.query_params.get("nonce")
        if nonce is None:
            return JsonResponse({"status": "ok"})
        proof = gateways_proof(secret, nonce, request.query_params.get("claims", ""))
        return JsonResponse({"status": "ok"} | ({"proof": proof} if proof else {}))

    return health


def _settle(outage: Outage) -> None:
    """Say what became of the attempts that ran while no gateway did."""
    if outage.void or outage.survivors:
        log.warning(
            "the gateway was away for %.0f s while %d attempts ran (%d model calls were open): %d are run again now, "
            "and so is each of the others that ends without going on with its conversation",
            *(outage.seconds, outage.void + outage.survivors, outage.lost_calls, outage.void),
        )


class _App(Starlette):
    """Calls of the model on `straight` paths meet neither routing nor middleware: they are a tenth of a call's cost."""

    def __init__(self, straight: Mapping[str, ASGIApp], **options: Any) -> None:
        super().__init__(**options)
        self._straight = straight

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        straight = self._straight.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        await (straight or super().__call__)(scope, receive, send)


class _EngineSide:
    """What stands between the turns and the engines."""

    def __init__(
        self, config: RunConfig, store: Store, engine: Engine | None, key: str | None, metrics: Metrics
    ) -> None:
        self._config = config
        self._metrics = metrics
        self.models = Models(store, config.model.name, config.model.context_tokens, metrics)
        if config.engine.urls:
            self.models.adopt(config.engine.urls, lineage=config.run_dir.name)
        in_flight = InFlight(metrics)
        self.admission = Admission(in_flight, config.engine.drain_limit_s, ready=self.models.ready)
        self.http = EngineHttp(lambda: self.admission.period, key)
        self._engine = engine or engine_of(config, self.http)
        interval_s = min(config.engine.health_interval_s, silence_s(config))
        self.watch = Watch(self.models, self.admission, in_flight, self._engine.health, interval_s)
        give_up_s = config.engine.give_up_s
        self._calls = EngineCalls(store, self.models, self.admission, self.watch, in_flight, metrics, give_up_s)
        self.workers = Workers(self._calls.held)

    def way(self, renderer: ModelRenderer | None) -> Way:
        config = self._config
        training = of_training(config.sampling)
        if config.engine.render == "engine":
            engine, kwargs = cast(ChatEngine, self._engine), config.model.template_kwargs
            return EngineRendered(self._calls, engine, self.models, training, kwargs, self.workers)
        renderer = renderer or load_renderer(config.model)
        prompter = Prompter(renderer, self._metrics, continuity=config.model.continuity == "semantic")
        return GatewayRendered(
            self._calls, self._engine, self.models, renderer, prompter, training, self._metrics, self.workers
        )


def engine_of(config: RunConfig, http: EngineHttp) -> Engine:
    """The client of engines that speak what the run file says."""
    settings = config.engine
    evidence = Evidence(silence_s(config))
    if settings.kind == "leyden":
        return LeydenEngine(http, evidence)
    chat = settings.render == "engine"
    training = of_training(config.sampling)
    return VllmEngine(http, evidence, settings.model, training, config.model.context_tokens, chat=chat)


def silence_s(config: RunConfig) -> float:
    """How long an engine may answer none of its calls before it is asked for one token. Both waits together take half
    of what an attempt has: an engine that hangs is found before its attempts are out of time.
    """
    return config.harness.timeout_s / 4


def _log_failure(watching: asyncio.Task[None]) -> None:
    if not watching.cancelled() and (error := watching.exception()):
        log.error("%s", error)


def _model_routes(entry: Entry, model: str) -> list[Route]:
    """What harnesses call, at the root and under `/rollouts/ID`."""
    served: list[tuple[str, ASGIApp, str]] = [
        *((path, CountEndpoint(counter, entry), "POST") for path, counter in COUNT_ROUTES),
        *((path, ModelEndpoint(protocol, entry), "POST") for path, protocol in ROUTES),
        *((path, ModelList(lister, entry, model), "GET") for path, lister in LIST_ROUTES),
    ]
    return [
        Route(prefix + path, endpoint, methods=[method])
        for prefix in ("", "/rollouts/{rollout_id}")
        for path, endpoint, method in served
    ]


async def _no_route(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    message = f"{request.method} {request.url.path} is not served here; see the gateway's routes in the documentation"
    return JsonResponse({"error": {"message": message, "code": "not_found", "param": None}}, status_code=status)
