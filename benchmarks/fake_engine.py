"""An engine that answers at once, with as little work as possible: `/generate` of Leyden's contract, and vLLM's
`/v1/chat/completions` with ids and log-probs.

    python fake_engine.py PORT

It samples at most 200 ids of a repeating pattern. `delay_s` in the query string delays the answer. A chat has a token
for each `CHARS` characters of its messages. GET /stats says how many calls came and how many were open at once.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any
from urllib.parse import parse_qs

import orjson
import uvicorn

CHARS = 4
GENERATE, CHAT = "/generate", "/v1/chat/completions"


class FakeEngine:
    def __init__(self) -> None:
        self.calls = self.open = self.peak = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] not in (GENERATE, CHAT):
            await reply(send, {"version": 0, "calls": self.calls, "peak": self.peak})
            return
        self.calls += 1
        self.open += 1
        self.peak = max(self.peak, self.open)
        try:
            request = orjson.loads(await body(receive))
            delay_s = float(parse_qs(scope["query_string"].decode()).get("delay_s", ["0"])[0])
            if delay_s:
                await asyncio.sleep(delay_s)
            await reply(send, answer(request) if scope["path"] == GENERATE else chat_answer(request))
        finally:
            self.open -= 1


def answer(request: dict[str, Any]) -> dict[str, Any]:
    count = min(request["max_tokens"], 200)
    ids = [300 + i % 97 for i in range(count - 1)] + request["stop_token_ids"][:1]
    return {"token_ids": ids, "logprobs": [-0.7] * count, "finish_reason": "stop", "spans": [[0, count]]}


def chat_answer(request: dict[str, Any]) -> dict[str, Any]:
    """As vLLM 0.32 writes it, with the log-prob of each sampled token."""
    count = min(request.get("max_completion_tokens") or request.get("max_tokens") or 200, 200)
    ids = [300 + i % 97 for i in range(count)]
    content = [
        {"token": f"token_id:{i}", "logprob": -0.7051262855529785, "bytes": [32, 116, 104, 101], "top_logprobs": []}
        for i in ids
    ]
    if request.get("top_k") == 1:
        content[0]["logprob"] = 0.0
    prompt = sum(len(message["content"]) for message in request["messages"]) // CHARS
    message = {"role": "assistant", "content": " the" * count, "reasoning": None}
    choice = {"index": 0, "message": message, "logprobs": {"content": content}, "finish_reason": "stop"}
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "choices": [choice | {"stop_reason": None, "token_ids": ids}],
        "usage": {"prompt_tokens": prompt or 1, "completion_tokens": count, "total_tokens": prompt + count},
        "prompt_token_ids": [5000 + i % 100_000 for i in range(prompt or 1)],
    }


async def body(receive: Any) -> bytes:
    parts, more = [], True
    while more:
        message = await receive()
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    return b"".join(parts)


async def reply(send: Any, content: dict[str, Any]) -> None:
    raw = orjson.dumps(content)
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(raw))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": raw})


if __name__ == "__main__":
    uvicorn.run(
        FakeEngine(),
        host="127.0.0.1",
        port=int(sys.argv[1]),
        http="httptools",
        loop="uvloop",
        log_level="warning",
        timeout_keep_alive=3600,
    )
