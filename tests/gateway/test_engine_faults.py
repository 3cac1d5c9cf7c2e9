"""What engines do wrong, and what a harness sees of it: nothing that another try can cure."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from aiohttp import web

from leyden.gateway.render import ModelRenderer
from tests.gateway.conftest import LIMIT_S, Gateway, serving, until
from tests.gateway.fake_vllm import FakeVllm, Json, cut_before, cut_within, generated, listening, raw, refused
from tests.gateway.test_chat import SYSTEM, USER, call, sdk
from tests.gateway.test_engines import config_for, metric, one_call, refusal


@pytest.fixture
async def vllm() -> AsyncIterator[FakeVllm]:
    async with listening(FakeVllm()) as fake:
        yield fake


@pytest.fixture
async def gateway(
    tmp_path: Path, tokenizer_path: Path, renderer: ModelRenderer, vllm: FakeVllm
) -> AsyncIterator[Gateway]:
    async with serving(config_for(tmp_path, tokenizer_path, vllm), renderer) as running:
        yield running


async def held_s(gateway: Gateway) -> float:
    rollouts, _ = await gateway.client.rollouts()
    return sum(rollout.held_s for rollout in rollouts)


@pytest.mark.parametrize("status", [400, 401, 403, 404, 422])
async def test_what_cannot_succeed_is_asked_once(gateway: Gateway, vllm: FakeVllm, status: int) -> None:
    """The engine's words and status go to the harness, and into an event of the rollout."""
    vllm.script = [generated([300, 2]), refused(status, "Expecting value")]
    rollout_id, key = await gateway.start_rollout()
    client = sdk(gateway, key)
    await call(client, [SYSTEM, USER])
    with pytest.raises(openai.APIStatusError) as caught:
        await call(client, [USER])
    assert (caught.value.status_code, "Expecting value" in caught.value.message) == (status, True)
    assert len(vllm.asked) == 2
    assert len(await gateway.turns(rollout_id)) == 1
    (event,) = await gateway.client.events(rollout_id)
    assert (event["kind"], event["data"]["status"]) == ("engine_error", status)
    assert "Expecting value" in event["data"]["message"]
    receipt = await gateway.client.exit(rollout_id, 1, exit_code=0, timed_out=False, reason=None)
    assert receipt.rollout.reason is None


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(refused(429, "busy"), id="429"),
        pytest.param(refused(503, "loading"), id="503"),
        pytest.param(cut_before, id="cut before a byte"),
        pytest.param(cut_within, id="cut within the answer"),
    ],
)
async def test_faults_between_gateway_and_engine_stay_there(gateway: Gateway, vllm: FakeVllm, fault: Any) -> None:
    """The call is held and tried again; the wait is not the rollout's."""
    vllm.script = [fault, fault, generated([300, 2])]
    turn = await one_call(gateway)
    assert turn.sampled_T.tolist() == [300, 2]
    assert len(vllm.asked) == 3
    assert vllm.bodies[0] == vllm.bodies[2]
    assert await held_s(gateway) >= 0.15
    assert await metric(gateway, "leyden_engine_errors_total") == 2
    assert len(await gateway.client.events(turn.rollout_id)) == 1


async def test_retry_after_is_a_minimum(gateway: Gateway, vllm: FakeVllm) -> None:
    vllm.script = [refused(429, "busy", **{"retry-after": "0.3"}), generated([300, 2])]
    await one_call(gateway)
    assert await held_s(gateway) >= 0.3


@pytest.mark.parametrize("fault", [refused(500, "boom"), raw("<html>")], ids=["500", "no JSON"])
async def test_a_call_that_breaks_is_tried_again_on_nobodys_time(gateway: Gateway, vllm: FakeVllm, fault: Any) -> None:
    """After the engine has shown that it samples."""
    vllm.script = [fault, fault, generated([300, 2])]
    assert (await one_call(gateway)).sampled_T.tolist() == [300, 2]
    assert (len(vllm.asked), vllm.probes) == (3, 3)
    assert await held_s(gateway) >= 0.15


async def test_no_read_time_out(gateway: Gateway, vllm: FakeVllm, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer takes many times as long as anything else may."""
    await one_call(gateway)
    monkeypatch.setattr("leyden.gateway.engines.connections.CONNECT_S", 0.05)
    monkeypatch.setattr("leyden.gateway.engines.vllm.HEALTH_S", 0.05)

    async def slow(_request: web.Request, _body: Json) -> web.StreamResponse:
        await asyncio.sleep(0.5)
        return web.json_response(generated([300, 2]))

    vllm.script = [slow]
    assert (await one_call(gateway)).sampled_T.tolist() == [300, 2]
    assert len(vllm.asked) == 2


async def test_three_hundred_calls_reach_the_engine_at_once(gateway: Gateway, vllm: FakeVllm) -> None:
    """The engine answers none before all have come; 100 are of one rollout's sub-agents."""
    everybody = asyncio.Event()

    async def gathering(_request: web.Request, _body: Json) -> web.StreamResponse:
        if vllm.open == 300:
            everybody.set()
        await everybody.wait()
        return web.json_response(generated([300, 2]))

    vllm.default = gathering
    keys = [(await gateway.start_rollout())[1] for _ in range(3)]
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:

        async def post(key: str) -> int:
            body = {"model": "m", "messages": [USER]}
            headers = {"authorization": f"Bearer {key}"}
            async with session.post(f"{gateway.url}/v1/chat/completions", json=body, headers=headers) as response:
                return response.status

        assert set(await asyncio.gather(*map(post, keys * 100))) == {200}
    assert (vllm.peak, len(vllm.asked)) == (300, 300)


async def test_idle_connections_that_the_engine_closes(
    tmp_path: Path, tokenizer_path: Path, renderer: ModelRenderer
) -> None:
    """Calls about as far apart as the engine keeps connections; each is generated once, none fails."""
    async with (
        listening(FakeVllm(), idle_s=0.02) as vllm,
        serving(config_for(tmp_path, tokenizer_path, vllm), renderer) as gateway,
    ):
        rollout_id, key = await gateway.start_rollout()
        client = sdk(gateway, key, max_retries=0)
        for number in range(60):
            await call(client, [SYSTEM, {"role": "user", "content": str(number)}])
            await asyncio.sleep(0.016 + number % 10 / 1000)
        assert len(await gateway.turns(rollout_id)) == 60
    assert len(vllm.asked) == 60


async def test_a_caller_that_hangs_up_cancels_the_engine_call(gateway: Gateway, vllm: FakeVllm) -> None:
    """The turn is abandoned, and the engine sees its connection close."""

    async def never(_request: web.Request, _body: Json) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError

    vllm.script = [never]
    rollout_id, key = await gateway.start_rollout()
    calling = asyncio.create_task(call(sdk(gateway, key), [SYSTEM, USER]))
    await vllm.arrived.wait()
    calling.cancel()
    await until(lambda: vllm.cancelled == 1)
    assert await metric(gateway, 'leyden_turns_total{state="abandoned"}') == 1
    assert await gateway.turns(rollout_id) == []
    assert await metric(gateway, "leyden_engine_calls{") == 0


@pytest.fixture
async def pair(
    tmp_path: Path, tokenizer_path: Path, renderer: ModelRenderer
) -> AsyncIterator[tuple[Gateway, list[FakeVllm], list[AsyncExitStack]]]:
    """A gateway with two engines, each of which can be closed by its stack."""
    stacks = [AsyncExitStack(), AsyncExitStack()]
    fakes = [await stack.enter_async_context(listening(FakeVllm())) for stack in stacks]
    config = config_for(tmp_path, tokenizer_path, *fakes, engine={"health_interval_s": 0.05})
    try:
        async with serving(config, renderer) as gateway:
            yield gateway, fakes, stacks
    finally:
        for stack in stacks:
            await stack.aclose()


async def works(gateway: Gateway) -> list[bool]:
    (model,) = await gateway.client.models()
    return [state.works for state in model.engine_states]


async def until_works(gateway: Gateway, *wanted: bool) -> None:
    async with asyncio.timeout(LIMIT_S):
        while await works(gateway) != list(wanted):  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_a_rollout_stays_with_its_engine(pair: Any) -> None:
    """All turns of one rollout meet one prefix cache; rollouts spread."""
    gateway, fakes, _ = pair
    rollouts = 0
    while rollouts < 12 or not all(fake.asked for fake in fakes):
        rollouts += 1
        _, key = await gateway.start_rollout()
        before = [len(fake.asked) for fake in fakes]
        for text in ("a", "b", "c"):
            await call(sdk(gateway, key), [{"role": "user", "content": text}])
        grown = [len(fake.asked) - count for fake, count in zip(fakes, before, strict=True)]
        assert sorted(grown) == [0, 3]
    assert await works(gateway) == [True, True]
    assert await metric(gateway, "leyden_engine_up{") == 2


async def test_a_dead_engine_is_left_and_taken_back(pair: Any) -> None:
    """Calls go on at another engine, those in flight too; only the dead engine's rollouts move."""
    gateway, fakes, stacks = pair
    homes: dict[str, int] = {}
    while len(homes) < 12 or len({*homes.values()}) < 2:
        _, key = await gateway.start_rollout()
        before = len(fakes[0].asked)
        await call(sdk(gateway, key), [USER])
        homes[key] = 0 if len(fakes[0].asked) > before else 1

    async def never(_request: web.Request, _body: Json) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError

    fakes[0].default = never
    fakes[0].arrived.clear()
    keys = list(homes)
    lost = next(key for key in keys if homes[key] == 0)
    in_flight = asyncio.create_task(call(sdk(gateway, lost, max_retries=0), [SYSTEM]))
    await fakes[0].arrived.wait()
    port = int(fakes[0].url.rsplit(":", 1)[1])
    await stacks[0].aclose()
    assert (await in_flight).choices[0].finish_reason == "stop"
    await until_works(gateway, False, True)
    count = len(fakes[1].asked)
    for key in keys:
        await call(sdk(gateway, key, max_retries=0), [SYSTEM, USER])
    assert len(fakes[1].asked) == count + len(keys)
    assert await metric(gateway, "leyden_engine_up{") == 1

    back = FakeVllm()
    await stacks[0].enter_async_context(listening(back, port=port))
    await until_works(gateway, True, True)
    for key in keys:
        await call(sdk(gateway, key, max_retries=0), [USER, USER])
    assert len(back.asked) == sum(1 for home in homes.values() if home == 0)


async def test_an_engine_that_comes_back_elsewhere_is_registered_anew(pair: Any) -> None:
    """Ten rollouts at the one that lives; the old address is not asked again, the new one is."""
    gateway, fakes, stacks = pair
    await stacks[0].aclose()
    keys = [(await gateway.start_rollout())[1] for _ in range(10)]
    for key in keys:
        await call(sdk(gateway, key, max_retries=0), [USER])
    assert len(fakes[1].asked) == 10
    back = await stacks[0].enter_async_context(listening(FakeVllm()))
    model = {"version": 0, "lineage": "run", "context_tokens": 2000}
    await gateway.client.put_model("policy", engines=[back.url, fakes[1].url], **model)
    await until_works(gateway, True, True)
    for _ in range(40):
        await one_call(gateway)
    assert (len(fakes[0].asked), len(back.asked) + len(fakes[1].asked)) == (0, 50)
    assert back.asked


async def test_without_any_engine_calls_are_held(pair: Any) -> None:
    gateway, fakes, _ = pair
    for fake in fakes:
        fake.healthy = False
    await until_works(gateway, False, False)
    rollout_id, key = await gateway.start_rollout()
    calling = asyncio.create_task(call(sdk(gateway, key, max_retries=0), [USER]))
    while (await gateway.client.rollout(rollout_id)).held_s == 0:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    assert not calling.done()
    fakes[1].healthy = True
    await calling
    assert (len(fakes[0].asked), len(fakes[1].asked)) == (0, 1)


async def test_a_call_on_an_engine_that_hangs_goes_on_elsewhere(pair: Any) -> None:
    """Nothing is heard of the engine: after several failed checks its calls are made again at another one."""
    gateway, fakes, _ = pair

    async def never(_request: web.Request, _body: Json) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError

    for fake in fakes:
        fake.default = never
    _, key = await gateway.start_rollout()
    calling = asyncio.create_task(call(sdk(gateway, key, max_retries=0), [USER]))
    await until(lambda: any(fake.asked for fake in fakes))
    hung, other = fakes if fakes[0].asked else reversed(fakes)
    other.default = generated([300, 2])
    hung.healthy = False
    await calling
    assert (len(hung.asked), len(other.asked)) == (1, 1)
    assert await metric(gateway, "leyden_interrupted_calls_total") == 1


async def test_one_unsuitable_engine_does_not_stop_the_other(
    tmp_path: Path, tokenizer_path: Path, renderer: ModelRenderer
) -> None:
    async with (
        listening(FakeVllm(missing={"/inference/v1/generate", "/v1/completions"})) as unsuitable,
        listening(FakeVllm()) as good,
        serving(config_for(tmp_path, tokenizer_path, unsuitable, good), renderer) as gateway,
    ):
        for _ in range(8):
            await one_call(gateway)
        assert (len(unsuitable.asked), len(good.asked)) == (0, 8)
        await until_works(gateway, False, True)


async def test_an_engine_that_refuses_the_gateway_is_named(
    tmp_path: Path, tokenizer_path: Path, renderer: ModelRenderer
) -> None:
    """Before the first turn."""
    async with (
        listening(FakeVllm(denied=401)) as vllm,
        serving(config_for(tmp_path, tokenizer_path, vllm), renderer) as gateway,
    ):
        status, message, _ = await refusal(gateway)
    assert (status in (400, 401), "answered 401: Unauthorized" in message) == (True, True)
