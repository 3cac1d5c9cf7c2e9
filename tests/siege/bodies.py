"""The largest bodies that are allowed, of every kind and on every route, while a small agent goes on beside them."""

from __future__ import annotations

import asyncio
import copy
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import aiohttp

from leyden.client import ControlClient
from tests.protocols.bodies import VALID, is_error
from tests.siege.mutants import ANSWER_S, SERVED, Outcome
from tests.siege.programs import Asked

PLACE: dict[str, Callable[[dict[str, Any], str], Any]] = {
    "openai-chat": lambda body, text: body.update(messages=[{"role": "user", "content": text}]),
    "openai-completions": lambda body, text: body.update(prompt=text),
    "openai-responses": lambda body, text: body.update(input=text),
    "anthropic-messages": lambda body, text: body.update(messages=[{"role": "user", "content": text}]),
    "gemini": lambda body, text: body.update(contents=[{"role": "user", "parts": [{"text": text}]}]),
}
LISTS = {
    "openai-chat": ("messages", {"role": "user", "content": "x"}),
    "openai-completions": ("prompt", 7),
    "openai-responses": ("input", {"role": "user", "content": "x"}),
    "anthropic-messages": ("messages", {"role": "user", "content": "x"}),
    "gemini": ("contents", {"role": "user", "parts": [{"text": "x"}]}),
}
TOOLS = {
    "openai-chat": {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}},
    "openai-responses": {"type": "function", "name": "f", "parameters": {"type": "object"}},
    "anthropic-messages": {"name": "f", "input_schema": {"type": "object"}},
    "gemini": {"functionDeclarations": [{"name": "f"}]},
}
TEXTS = {
    "one word": "a",
    "prose": "The quick brown fox jumps over the lazy dog. ",
    "digits": "0123456789",
    "spaces": " ",
    "new lines": "\n",
    "control tokens": "<|im_start|>",
    "emoji": "🙂",
    "escapes": "\x01",
}


def largest(protocol: str, limit: int) -> dict[str, bytes]:
    """Bodies of nearly `limit` bytes by kind."""
    found: dict[str, bytes] = {}
    room = limit - 2000
    for name, text in TEXTS.items():
        body = copy.deepcopy(VALID[protocol])
        PLACE[protocol](body, text * (room // len(json.dumps(text)[1:-1])))
        found[f"text of {name}"] = json.dumps(body).encode()
    listed, item = LISTS[protocol]
    found["a long list"] = _repeated(protocol, listed, item, room)
    if tool := TOOLS.get(protocol):
        found["many tools"] = _repeated(protocol, "tools", tool, room)
    plain = json.dumps(VALID[protocol]).encode()
    found["white space"] = plain[:-1] + b" " * (room - len(plain)) + b"}"
    found["one long key"] = plain[:-1] + b', "' + b"k" * (room - len(plain)) + b'": 1}'
    found["many keys"] = plain[:-1] + b"".join(b', "k%d": 1' % n for n in range((room - len(plain)) // 16)) + b"}"
    found["empty lists"] = plain[:-1] + b', "metadata": [' + b",".join([b"[]"] * ((room - len(plain)) // 3)) + b"]}"
    found["depth"] = plain[:-1] + b', "metadata": ' + b"[" * (room // 2) + b"]" * (room // 2) + b"}"
    found["digits of one number"] = plain[:-1] + b', "seed": ' + b"9" * (room - len(plain) - 20) + b"}"
    found["numbers"] = plain[:-1] + b', "metadata": [' + b",".join([b"1.5e3"] * ((room - len(plain)) // 6)) + b"]}"
    found["escaped text"] = plain[:-1] + b', "user": "' + rb"\u0041" * ((room - len(plain)) // 6) + b'"}'
    found["halves of pairs"] = plain[:-1] + b', "user": "' + rb"\ud83d" * ((room - len(plain)) // 6) + b'"}'
    found["no JSON"] = b"{" * room
    return found


def _repeated(protocol: str, name: str, item: Any, room: int) -> bytes:
    text = json.dumps(item)
    body = VALID[protocol] | {name: "LIST"}
    listed = "[" + ", ".join([text] * (room // (len(text) + 2))) + "]"
    return json.dumps(body).replace('"LIST"', listed).encode()


@dataclass(frozen=True)
class Open:
    """A body that was being sent or answered."""

    kind: str
    path: str
    start: float
    end: float


def beside(opened: list[Open], asked: list[Asked]) -> dict[tuple[str, str], float]:
    """By kind and path, the longest that /health took while such a body was open, the longest first."""
    worst = {
        (body.kind, body.path): max(
            (seconds for start, seconds in asked if start <= body.end and start + seconds >= body.start), default=0.0
        )
        for body in opened
    }
    return dict(sorted(worst.items(), key=lambda entry: -entry[1]))


async def bodies(client: ControlClient, url: str, limit: int, kinds: int | None) -> tuple[Outcome, float, list[Open]]:
    """Every route with each of its bodies (or the first `kinds` of them). Returns the innocent agent's longest wait,
    and when each body was open."""
    opened: list[Open] = []
    outcome, waits, over = Outcome(), [0.0], asyncio.Event()
    (group,) = await client.create_groups([{"kind": "train", "step": 2, "slot": 0, "size": 2, "task": {}}])
    hostile, innocent = [(await client.claim(r.rollout_id, "siege")).agent_key for r in group.rollouts]
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(ANSWER_S)) as session:

        async def agent() -> None:
            small = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]}
            headers = {"authorization": f"Bearer {innocent}"}
            while not over.is_set():
                start = time.perf_counter()
                async with session.post(f"{url}/v1/messages", json=small, headers=headers) as response:
                    if response.status != 200:
                        outcome.faults.append(f"an innocent call was answered {response.status}")
                waits.append(time.perf_counter() - start)
                await asyncio.sleep(0.05)

        innocents = asyncio.create_task(agent())
        for path, protocol in SERVED:
            made = await asyncio.to_thread(largest, protocol, limit)
            for name, data in list(made.items())[:kinds]:
                start = time.perf_counter()
                await _send(session, url + path, protocol, name, data, hostile, outcome)
                opened.append(Open(name, path, start, time.perf_counter()))
        over.set()
        await innocents
    return outcome, max(waits), opened


async def _send(
    session: aiohttp.ClientSession, url: str, protocol: str, name: str, data: bytes, key: str, outcome: Outcome
) -> None:
    outcome.sent += 1
    try:
        async with session.post(url, data=data, headers={"authorization": f"Bearer {key}"}) as response:
            status, answer = response.status, await response.read()
    except (TimeoutError, aiohttp.ClientError) as error:
        outcome.faults.append(f"{name} to {url}: {type(error).__name__}")
        return
    outcome.statuses[str(status)] += 1
    if status >= 500 or (status >= 400 and not is_error(protocol, json.loads(answer), status)):
        outcome.faults.append(f"{name} to {url}: {status} {answer[:200]!r}")
