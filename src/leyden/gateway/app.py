"""The gateway as a program: build the application from a run file, listen, say where."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import gc
import json
import logging
import os
import resource
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import uvicorn
import uvloop
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from leyden.client import read_or_create_secret
from leyden.client.proof import gateways_proof
from leyden.config import RunConfig
from leyden.errors import ConfigError, LeydenError
from leyden.gateway.admission import Admission, InFlight
from leyden.gateway.bounded_http import BoundedHttp
from leyden.gateway.calls import EngineCalls
from leyden.gateway.control_routes import ControlApi, starlette_routes
from leyden.gateway.engines import ChatEngine, Engine, EngineHttp, Evidence, LeydenEngine, VllmEngine
from leyden.gateway.feed import Feed
from leyden.gateway.http import JsonResponse
from leyden.gateway.metrics import Metrics
from leyden.gateway.model_routes import KEEP_ALIVE_S, CountEndpoint, Entry, ModelEndpoint, ModelList
from leyden.gateway.models import Models
from leyden.gateway.ports import owner
from leyden.gateway.prompt import Prompter
from leyden.gateway.render import ModelRenderer, load_renderer
from leyden.gateway.sampling import of_training
from leyden.gateway.turn import TurnService
from leyden.gateway.watch import Watch
from leyden.gateway.ways import EngineRendered, GatewayRendered, Way
from leyden.gateway.workers import Workers
from leyden.protocols import COUNT_ROUTES, LIST_ROUTES, ROUTES
from leyden.store import Outage, Store

log = logging.getLogger(__name__)
LOCK_WAIT_S = 20.0
IDLE_CONNECTION_S = 3600
BACKLOG = 2048
SWITCH_S = 0.0005  # how long a worker thread keeps the interpreter from the loop that wants it; 5 ms by default


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

    async def health(request: Request) -> Response:
        """Also answers harnesses that look at their base URL first (Claude Code: HEAD, without a key)."""
        nonce = request.query_params.get("nonce")
        if nonce is None:
            return JsonResponse({"status": "ok"})
        proof = gateways_proof(secret, nonce, request.query_params.get("claims", ""))
        return JsonResponse({"status": "ok"} | ({"proof": proof} if proof else {}))

    app = _App(
        {path: ModelEndpoint(protocol, entry) for path, protocol in ROUTES if "{" not in path},
        routes=[
            *_model_routes(entry, config.model.name),
            *(Route(path, health, methods=["GET"]) for path in ("/health", "/", "/rollouts/{rollout_id}")),
            *starlette_routes(api),
        ],
        exception_handlers={404: _no_route, 405: _no_route},
        lifespan=lifespan,
    )
    app.state.turns = turns
    app.state.unwatched = _log_failure
    app.state.feed = feed
    return app


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


def serve(
    config: RunConfig, *, with_parent: bool = False, secret: bytes | None = None, engine_key: str | None = None
) -> None:
    """Run the gateway until it is told to stop. Writes `gateway.json` in the run folder once it listens.

    `with_parent` ends it when standard input closes. Raises ConfigError for an open address without a secret.
    """
    check_address(config, secret)
    _allow_many_connections()
    config.run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _lock(config.run_dir / "gateway.lock"):
        app = build(config, secret or read_or_create_secret(config.run_dir), engine_key=engine_key)
        listener = listen(config)
        host, port = listener.getsockname()[:2]
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        server = _Server(app)
        if with_parent:
            threading.Thread(target=_stop_with_parent, args=(server,), daemon=True).start()
        _announce(config.run_dir, url)
        sys.setswitchinterval(SWITCH_S)
        gc.freeze()  # what is there now stays: collections need not look at it
        log.info("gateway listens on %s", url)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(server.serve(sockets=[listener]))
        if server.failure is not None:
            raise server.failure


class _Server(uvicorn.Server):
    """Calls cut off by a stop are lost, not abandoned: their attempts are run again."""

    def __init__(self, app: Starlette) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=BoundedHttp,
                ws="none",
                access_log=False,
                proxy_headers=False,
                log_config=None,
                timeout_keep_alive=IDLE_CONNECTION_S,
                timeout_graceful_shutdown=1,
                backlog=4096,
            )
        )
        self._app = app
        self.failure: BaseException | None = None
        app.state.unwatched = self._stop_without_engines

    def _stop_without_engines(self, watching: asyncio.Task[None]) -> None:
        """No engine can ever serve this run: better no gateway than a step without a turn."""
        if not watching.cancelled() and (error := watching.exception()):
            self.failure = error
            self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._app.state.turns.closing = True
        self._app.state.feed.close()
        await super().shutdown(sockets)


def _allow_many_connections() -> None:
    """A call in flight holds two descriptors; many systems allow 1,024 unless one asks for more."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def check_address(config: RunConfig, secret: bytes | None) -> None:
    host = config.gateway.host
    if host not in ("127.0.0.1", "::1", "localhost") and secret is None:
        raise ConfigError(
            "gateway.host",
            f"{host!r} can be reached from other machines; set LEYDEN_SECRET to a secret of at least 32 bytes, "
            "or listen on 127.0.0.1",
        )


def check_port(config: RunConfig) -> None:
    """Raises ConfigError where the gateway could not listen. The run's own gateway, if it runs, is no obstacle."""
    with contextlib.suppress(OSError), (config.run_dir / "gateway.lock").open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
    listen(config).close()


def listen(config: RunConfig) -> socket.socket:
    """Bind the configured port, else the port of the last start, else any free one."""
    host = "127.0.0.1" if config.gateway.host == "localhost" else config.gateway.host
    last = _last_port(config.run_dir)
    for port in [config.gateway.port] if config.gateway.port else [last, 0]:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            listener.listen(BACKLOG)  # until then another process may bind the same port
            return listener
        except OSError as error:
            listener.close()
            if port == config.gateway.port:
                key = "gateway.port" if error.errno in (errno.EADDRINUSE, errno.EACCES) else "gateway.host"
                raise ConfigError(key, _taken(host, port, error)) from error
    raise AssertionError("port 0 always binds or raises")


def _taken(host: str, port: int, error: OSError) -> str:
    holder = f" by {owner(port)}; give another, or 0 for any" if error.errno == errno.EADDRINUSE else ""
    return f"cannot listen on {host}:{port}: {error.strerror}{holder}"


def _last_port(run_dir: Path) -> int:
    try:
        return urlsplit(json.loads((run_dir / "gateway.json").read_text())["url"]).port or 0
    except (OSError, ValueError, KeyError):
        return 0


def _announce(run_dir: Path, url: str) -> None:
    temporary = run_dir / "gateway.json.new"
    temporary.unlink(missing_ok=True)
    temporary.touch(mode=0o600)
    temporary.write_text(json.dumps({"url": url, "pid": os.getpid()}))
    temporary.replace(run_dir / "gateway.json")


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """One gateway per store. A predecessor that is still stopping is waited for."""
    with path.open("a+") as file:
        deadline = time.monotonic() + LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise LeydenError(f"another gateway holds {path}; stop it first") from None
                time.sleep(0.05)
        yield


def _stop_with_parent(server: uvicorn.Server) -> None:
    while os.read(0, 4096):  # not sys.stdin: its lock, held by this thread, would abort an exit that comes first
        pass
    server.should_exit = True


async def _no_route(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    message = f"{request.method} {request.url.path} is not served here; see the gateway's routes in the documentation"
    return JsonResponse({"error": {"message": message, "code": "not_found", "param": None}}, status_code=status)
