"""The engine contract over HTTP: POST /generate, GET /health and GET /progress, in front of a `Sampler`.

A caller that hangs up cancels its request: the handler waits for the answer and for the end of the connection,
whichever comes first.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import Any

import orjson
from pydantic import TypeAdapter, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from leyden.errors import EngineError, EngineRejected, EngineUnavailable
from leyden.trainer.embedded.requests import SampleRequest
from leyden.trainer.embedded.sampler import Sampler
from leyden.types import Generation, Json

CLIENT_CLOSED_REQUEST = 499
_REQUEST = TypeAdapter(SampleRequest)


def build_app(sampler: Sampler) -> Starlette:
    """200 with a generation; 400 for what can never work, 503 for what may work later, 500 otherwise."""

    async def generate(request: Request) -> Response:
        try:
            future = sampler.submit(parse(await request.body()))
            generation = await _unless_hung_up(future, request)
        except EngineRejected as error:
            return _json({"error": str(error)}, 400)
        except EngineUnavailable as error:
            return _json({"error": str(error)}, 503)
        except EngineError as error:
            return _json({"error": str(error)}, 500)
        if generation is None:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        return _json(reply(generation))

    async def health(_: Request) -> Response:
        return _json({"version": sampler.version, "lineage": sampler.lineage})

    async def progress(_: Request) -> Response:
        return _json({"sampled": sampler.stats.sampled})

    return Starlette(
        routes=[
            Route("/generate", generate, methods=["POST"]),
            Route("/health", health, methods=["GET"]),
            Route("/progress", progress, methods=["GET"]),
        ]
    )


def parse(body: bytes) -> SampleRequest:
    """Body of /generate -> request. Raises EngineRejected naming the field and what was found."""
    try:
        return _REQUEST.validate_json(body)
    except ValidationError as error:
        found = error.errors(include_url=False)[0]
        field = ".".join(map(str, found["loc"])) or "the body"
        raise EngineRejected(f"{field} is {repr(found['input'])[:60]}: {found['msg']}") from None


def reply(generation: Generation) -> Json:
    return {
        "token_ids": generation.token_ids_T,
        "logprobs": generation.logprobs_T,
        "finish_reason": generation.finish_reason,
        "spans": [list(span) for span in generation.spans],
        "stop_string": generation.stop_string,
    }


async def _unless_hung_up(future: Future[Generation], request: Request) -> Generation | None:
    """The result, or None (and the future cancelled) if the connection ends first."""
    answer = asyncio.wrap_future(future)
    hung_up = asyncio.ensure_future(_end_of_connection(request))
    try:
        either: set[asyncio.Future[Any]] = {answer, hung_up}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        return answer.result() if answer.done() else None
    finally:
        hung_up.cancel()
        answer.cancel()


async def _end_of_connection(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _json(value: Json, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json")
