"""An inference engine over HTTP that speaks the gateway's contract and says what a script says."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

from aiohttp import web
from tokenizers import Tokenizer

from tests.harnesses.script import Says, read
from tests.harnesses.spelling import Speller

Fault = Literal["429", "503", "cut"]
STOP = "<|im_end|>"


class Engine:
    """Answers `POST /generate`. The first calls of each prompt end in `faults`, in that order.

    `answered` is set once a reply was given; `answered_with` has the ids given to each prompt.
    """

    def __init__(self, tokenizer: Tokenizer, says: Says, faults: Sequence[Fault] = ()) -> None:
        self._tokenizer = tokenizer
        self._speller = Speller(tokenizer)
        self._says = says
        self._faults = faults
        self._asked: Counter[tuple[int, ...]] = Counter()
        self.faults_given = 0
        self.answered_with: dict[tuple[int, ...], list[int]] = {}
        self.answered = asyncio.Event()

    async def generate(self, request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        prompt = tuple(asked["prompt_ids"])
        self._asked[prompt] += 1
        answer = self.answer(asked)
        if self._asked[prompt] <= len(self._faults):
            self.faults_given += 1
            return await self._fail(request, self._faults[self._asked[prompt] - 1], answer)
        self.answered_with[prompt] = answer["token_ids"]
        self.answered.set()
        return web.json_response(answer)

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Sampled ids with made-up log-probs; they end at the first stop string, or else with the stop token."""
        text = self._says(read(self._tokenizer.decode(asked["prompt_ids"], skip_special_tokens=False)))
        ids = [*self._speller.ids(text), self._tokenizer.token_to_id(STOP)]
        stop_string = None
        for length in range(1, len(ids)):
            spelled = self._tokenizer.decode(ids[:length], skip_special_tokens=False) if asked["stop"] else ""
            stop_string = next((stop for stop in asked["stop"] if stop in spelled), None)
            if stop_string is not None:
                ids = ids[:length]
                break
        ids = ids[: asked["max_tokens"]]
        return {
            "token_ids": ids,
            "logprobs": [-0.01 * (1 + i % 100) for i in range(len(ids))],
            "finish_reason": "stop",
            "spans": [[0, len(ids)]],
            "stop_string": stop_string,
        }

    async def _fail(self, request: web.Request, fault: Fault, answer: dict[str, Any]) -> web.StreamResponse:
        if fault == "429":
            return web.Response(status=429, headers={"Retry-After": "2"}, text="too many requests")
        if fault == "503":
            return web.Response(status=503, text="overloaded")
        body = json.dumps(answer).encode()
        response = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": str(len(body))})
        await response.prepare(request)
        await response.write(body[: len(body) // 2])
        assert request.transport is not None
        request.transport.close()
        return response


@asynccontextmanager
async def serving(engine: Engine) -> AsyncIterator[str]:
    """The base URL of the engine while the block runs."""
    app = web.Application(client_max_size=1 << 30)
    app.router.add_post("/generate", engine.generate)
    app.router.add_get("/health", _health)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def _health(_request: web.Request) -> web.Response:
    return web.json_response({"status": "ok"})


def load(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))
