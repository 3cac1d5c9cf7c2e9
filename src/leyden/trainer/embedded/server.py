"""The engine contract over HTTP: POST /generate, GET /health and GET /progress, in front of a `Sampler`.

A caller that hangs up cancels its request: the handler waits for the answer and for the end of the connection,
whichever comes first.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from leyden.errors import EngineError, EngineRejected, EngineUnavailable
from leyden.trainer.embedded.requests import GenerateRequest
from leyden.trainer.embedded.sampler import Sampler
from leyden.types import Generation, Json

CLIENT_CLOSED_REQUEST = 499


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


def parse(body: bytes) -> GenerateRequest:
    """Body of /generate -> request. Raises EngineRejected naming the field and what was found."""
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise EngineRejected(f"the body is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise EngineRejected(f"the body is {type(data).__name__}, not an object")
    fields = {**_DEFAULTS, **data}
    if unknown := sorted(data.keys() - _KINDS.keys()):
        raise EngineRejected(f"unknown field {unknown[0]!r}; fields are {', '.join(_KINDS)}")
    for name, (wanted, fits) in _KINDS.items():
        if name not in fields:
            raise EngineRejected(f"{name} is missing; it must be {wanted}")
        if not fits(fields[name]):
            raise EngineRejected(f"{name} is {_short(fields[name])}; it must be {wanted}")
    return GenerateRequest(**fields)


def reply(generation: Generation) -> Json:
    return {
        "token_ids": generation.token_ids_T,
        "logprobs": generation.logprobs_T,
        "finish_reason": generation.finish_reason,
        "spans": [list(span) for span in generation.spans],
        "stop_string": generation.stop_string,
    }


def _is_int(value: Any) -> bool:
    return type(value) is int


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _are_ints(value: Any) -> bool:
    return isinstance(value, list) and all(type(v) is int for v in value)


def _are_strings(value: Any) -> bool:
    return isinstance(value, list) and all(type(v) is str for v in value)


_KINDS = {
    "prompt_ids": ("a list of integers", _are_ints),
    "max_tokens": ("an integer", _is_int),
    "temperature": ("a number", _is_number),
    "top_p": ("a number", _is_number),
    "top_k": ("an integer", _is_int),
    "stop_token_ids": ("a list of integers", _are_ints),
    "stop": ("a list of strings", _are_strings),
    "seed": ("an integer or null", lambda v: v is None or _is_int(v)),
}
_DEFAULTS = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "stop_token_ids": [], "stop": [], "seed": None}


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


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "..."
