"""The inference engines of the run file, asked as the gateway will ask them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from leyden.config import RunConfig
from leyden.doctor.findings import Finding, ok, problem
from leyden.errors import CaptureError, ConfigError, EngineError
from leyden.gateway.app import engine_of
from leyden.gateway.engines import EngineHttp, engine_key


async def check_engines(config: RunConfig, environment: Mapping[str, str]) -> list[Finding]:
    """One finding for each engine; without any, the trainer samples by itself."""
    try:
        key = engine_key(config.engine.api_key_env, environment)
    except ConfigError as error:
        return [problem("engine", str(error), "the gateway reads it where it starts: export it there")]
    if not config.engine.urls:
        return [ok("engine", f"none in the run file: `leyden train` samples by itself on {config.embedded.device}")]
    http = EngineHttp(key=key)
    try:
        health = engine_of(config, http).health
        return [await check_engine(url, config.engine.kind, health) for url in config.engine.urls]
    finally:
        await http.close()


async def check_engine(url: str, kind: str, health: Callable[[str], Awaitable[None]]) -> Finding:
    """`health` raises EngineError or CaptureError for an engine that does not work or cannot serve this run."""
    try:
        await health(url)
    except (EngineError, CaptureError) as error:
        said = str(error)
        what = said if url in said else f"{url}: {said}"
        return problem("engine", what, f"engine.urls must name running engines of kind {kind}")
    served = "answers, and gives ids and log-probs as this run needs them" if kind == "vllm" else "answers"
    return ok("engine", f"{url} {served}")
