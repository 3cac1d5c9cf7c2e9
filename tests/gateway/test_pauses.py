"""Nothing that makes an engine work reaches one between the acknowledgement of a pause and the resume."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from leyden.gateway.engines.connections import Answer, Connections, NotSent
from leyden.gateway.render import ModelRenderer
from tests.gateway.conftest import LIMIT_S, Gateway, serving, until
from tests.gateway.fake_vllm import FakeVllm, Json, chatted, generated, is_probe, listening, own
from tests.gateway.test_chat import USER, call, sdk
from tests.gateway.test_connections import Bytes
from tests.gateway.test_connections import serving as serving_bytes
from tests.gateway.test_engines import config_for

KINDS: dict[str, tuple[Json, Json]] = {
    "leyden": ({"kind": "leyden"}, own([300, 2])),
    "vllm": ({"kind": "vllm"}, generated([300, 2], weight_versions=None)),
    "vllm renders": ({"kind": "vllm", "render": "engine"}, chatted([9], [300, 2])),
}
VERSION = {"lineage": "l", "context_tokens": 2000}


@dataclass
class Watched(FakeVllm):
    """Notes what arrives while it is told to be quiet. Probes are answered once `answering` is set."""

    quiet: bool = False
    intruders: list[Json] = field(default_factory=list)
    answering: asyncio.Event = field(default_factory=asyncio.Event)
    checks: int = 0
    begun: int = 0

    async def _post(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if self.quiet:
            self.intruders.append(body)
        if is_probe(body):
            self.begun += 1
            await self.answering.wait()
        return await super()._post(request)

    async def _health(self, request: web.Request) -> web.StreamResponse:
        self.checks += 1
        return await super()._health(request)


async def checked(fake: Watched, times: int = 4) -> None:
    """Return when the engine has been asked for its health some more times."""
    before = fake.checks
    await until(lambda: fake.checks >= before + times)


async def start(gateway: Gateway) -> asyncio.Task[Any]:
    _, key = await gateway.start_rollout()
    return asyncio.create_task(call(sdk(gateway, key, max_retries=0), [USER]))


def gateway_for(folder: Path, tokenizer: Path, renderer: ModelRenderer, kind: str, *fakes: Watched) -> Any:
    settings = KINDS[kind][0] | {"health_interval_s": 0.01, "drain_limit_s": 1}
    return serving(config_for(folder, tokenizer, *fakes, engine=settings), renderer)


@pytest.fixture
async def fakes() -> AsyncIterator[list[Watched]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(listening(Watched())) for _ in range(2)]  # type: ignore[misc]


@pytest.mark.parametrize("kind", ["vllm", "vllm renders"])
async def test_a_call_that_waits_for_the_first_probe_is_held_over_an_update(
    tmp_path: Path, tokenizer_path: Path, renderer: ModelRenderer, fakes: list[Watched], kind: str
) -> None:
    """And is recorded with the version after it."""
    fake = fakes[0]
    fake.default = KINDS[kind][1]
    async with gateway_for(tmp_path, tokenizer_path, renderer, kind, fake) as gateway:
        calling = await start(gateway)
        await until(lambda: fake.begun > 0)
        await gateway.client.pause()
        fake.quiet = True
        fake.answering.set()
        await checked(fake)
        assert (fake.intruders, fake.asked, calling.done()) == ([], [], False)
        await gateway.client.put_model("policy", engines=[fake.url], version=7, **VERSION)
        fake.quiet = False
        await gateway.client.resume()
        await calling
        (rollout,), _ = await gateway.client.rollouts()
        (turn,) = await gateway.turns(rollout.rollout_id)
        assert [span.version for span in turn.spans] == [7]


@pytest.mark.parametrize("kind", KINDS)
async def test_an_engine_that_comes_back_in_a_pause_is_tried_after_it(
    tmp_path: Path, tokenizer_path: Path, renderer: ModelRenderer, fakes: list[Watched], kind: str
) -> None:
    """So is one that is registered in a pause."""
    for fake in fakes:
        fake.default = KINDS[kind][1]
        fake.answering.set()
    one, two = fakes
    async with gateway_for(tmp_path, tokenizer_path, renderer, kind, one) as gateway:
        await (await start(gateway))
        one.healthy = False
        await checked(one)
        await gateway.client.pause()
        one.quiet = two.quiet = True
        calling = await start(gateway)
        one.healthy = True
        await gateway.client.put_model("policy", engines=[one.url, two.url], version=1, **VERSION)
        await checked(one)
        await checked(two)
        assert (one.intruders, two.intruders, calling.done()) == ([], [], False)
        one.quiet = two.quiet = False
        await gateway.client.resume()
        await calling


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", KINDS)
async def test_engines_are_left_alone_in_pauses_of_any_order(
    tmp_path: Path, tokenizer_path: Path, renderer: ModelRenderer, fakes: list[Watched], kind: str, seed: int
) -> None:
    """Pauses, registrations, calls, slow probes and deaths in random order; every call is answered in the end."""
    chance = random.Random(seed)
    for fake in fakes:
        fake.default = KINDS[kind][1]
    calls: list[asyncio.Task[Any]] = []
    async with gateway_for(tmp_path, tokenizer_path, renderer, kind, *fakes) as gateway:
        for step in range(60):
            match chance.choice(["pause", "resume", "register", "call", "call", "death", "probe", "wait"]):
                case "pause":
                    await gateway.client.pause()
                    for fake in fakes:
                        fake.quiet = True
                case "resume":
                    for fake in fakes:
                        fake.quiet = False
                    await gateway.client.resume()
                case "register":
                    urls = [fake.url for fake in chance.sample(fakes, chance.randint(1, 2))]
                    await gateway.client.put_model("policy", engines=urls, version=step, **VERSION)
                case "call":
                    calls.append(await start(gateway))
                case "death":
                    fake = chance.choice(fakes)
                    fake.healthy = not fake.healthy
                case "probe":
                    fake = chance.choice(fakes)
                    fake.answering.clear() if fake.answering.is_set() else fake.answering.set()
                case "wait":
                    await asyncio.sleep(chance.random() / 20)
            assert [fake.intruders for fake in fakes] == [[], []]
        for fake in fakes:
            fake.quiet, fake.healthy = False, True
            fake.answering.set()
        await gateway.client.resume()
        async with asyncio.timeout(LIMIT_S):
            await asyncio.gather(*calls)


async def test_what_must_not_be_sent_any_more_when_the_connection_is_there_is_not() -> None:
    client = Connections(600.0)
    async with serving_bytes(Bytes([])) as server:
        with pytest.raises(NotSent):
            await client.request("POST", server.url, "/", still=lambda: False)
        assert server.requests == []
        assert await client.request("POST", server.url, "/") == Answer(200, b"ok", None)
        client.close()
    assert server.connections == 1
