"""Requests that are almost valid: each is answered, or refused in its protocol's own words; none voids its attempt."""

from __future__ import annotations

import asyncio
import copy
import gzip
import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from leyden.client import ControlClient
from leyden.protocols import COUNT_ROUTES, ROUTES
from tests.protocols.bodies import VALID, is_error, url_of

SIDE_BY_SIDE = 16
ROLLOUTS = 64
ANSWER_S = 120.0
SERVED = [(url_of(path), protocol.PROTOCOL) for path, protocol in (*ROUTES, *COUNT_ROUTES)]
ODD: list[Any] = [
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, -(2**70), 0.0, 1e308, -1e-300, "", " ", "\x00", "\ud83d"),
    *("<|im_end|>", "</think>", "<tool_call>", "assistant", "tool_use", "system", "1e400", "x" * 5000, "é好🙂" * 50),
    *([], {}, [[]], [None], {"": None}, {"type": "text"}, {"type": "image_url", "image_url": {"url": "data:,"}}),
    *({"role": "assistant", "content": "x"}, {"role": "tool"}, {"type": "tool_result"}, [{"text": "x"}] * 50),
]
ENCODINGS = [{}, {}, {}, {}, {"content-encoding": "gzip"}, {"content-encoding": "nonsense"}]


@dataclass
class Outcome:
    """`faults` are what must not happen, in words; `statuses` how often each answer came."""

    sent: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in items:
        yield value, key
        yield from places(child)


def mutant(rng: random.Random, body: dict[str, Any]) -> dict[str, Any]:
    """`body` with one to four of its nodes changed."""
    changed = copy.deepcopy(body)
    for _ in range(rng.randint(1, 4)):
        found = list(places(changed))
        if not found:
            break
        container, key = rng.choice(found)
        how = rng.randrange(8)
        if how < 3:
            container[key] = copy.deepcopy(rng.choice(ODD))
        elif how == 3:
            del container[key]
        elif how == 4 and isinstance(container, list):
            container.insert(key, copy.deepcopy(container[key]))
        elif how == 4:
            container[str(rng.choice(ODD))[:40]] = copy.deepcopy(container[key])
        elif how == 5:
            container[key] = [container[key]]
        elif how == 6:
            container[key] = {str(rng.choice(ODD))[:40]: container[key]}
        else:
            other, place = rng.choice(found)
            container[key] = copy.deepcopy(other[place]) if place in other or isinstance(other, list) else None
    return changed


def garbled(rng: random.Random, data: bytes) -> bytes:
    """Now and then a few bytes of it are others, missing or doubled."""
    if rng.random() > 0.1 or not data:
        return data
    at = rng.randrange(len(data))
    return rng.choice(
        [data[:at], data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :], data[:at] + data, data[at:], b""]
    )


async def mutants(client: ControlClient, url: str, count: int, seed: int) -> Outcome:
    """Send `count` of them, and at the end look at what became of the attempts in whose name they came."""
    outcome = Outcome()
    (group,) = await client.create_groups([{"kind": "train", "step": 1, "slot": 0, "size": ROLLOUTS, "task": {}}])
    keys = [(await client.claim(rollout.rollout_id, "siege")).agent_key for rollout in group.rollouts]
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(ANSWER_S)) as session:

        async def sender(lane: int) -> None:
            rng = random.Random(f"{seed}/{lane}")
            for _ in range(lane, count, SIDE_BY_SIDE):
                await _send(session, url, rng, rng.choice(keys), outcome)

        await asyncio.gather(*(sender(lane) for lane in range(SIDE_BY_SIDE)))
    for rollout in group.rollouts:
        receipt = await client.exit(rollout.rollout_id, 1, exit_code=0, timed_out=False, reason=None)
        if receipt.rollout.state != "grading":
            outcome.faults.append(f"{rollout.rollout_id} is {receipt.rollout.state}: {receipt.rollout.reason}")
    return outcome


async def _send(session: aiohttp.ClientSession, url: str, rng: random.Random, key: str, outcome: Outcome) -> None:
    path, protocol = rng.choice(SERVED)
    body = mutant(rng, VALID[protocol])
    if rng.random() < 0.3:
        body["stream"] = True
        path = path.replace(":generateContent", ":streamGenerateContent")
    data = garbled(rng, json.dumps(body).encode())
    encoding = rng.choice(ENCODINGS)
    if encoding.get("content-encoding") == "gzip":
        data = garbled(rng, gzip.compress(data))
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json", **encoding}
    name = f"{path} {data[:300]!r}"
    outcome.sent += 1
    try:
        async with session.post(url + path, data=data, headers=headers) as response:
            status, answer = response.status, await response.read()
    except TimeoutError:
        outcome.faults.append(f"no answer within {ANSWER_S:g} s: {name}")
        return
    except aiohttp.ClientError as error:
        outcome.faults.append(f"{type(error).__name__}: {error}: {name}")
        return
    outcome.statuses[str(status)] += 1
    if status >= 500 or b"internal_error" in answer:
        outcome.faults.append(f"{status} {answer[:200]!r}: {name}")
    elif status >= 400 and not is_error(protocol, json.loads(answer), status):
        outcome.faults.append(f"{status}, but no error of {protocol}: {answer[:200]!r}: {name}")
