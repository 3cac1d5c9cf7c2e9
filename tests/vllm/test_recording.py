"""What the gateway records of a real vLLM is what it sampled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from leyden.gateway.render import ModelRenderer
from leyden.types import FinishReason, VersionSpan
from tests.gateway.conftest import Gateway, make_config, serving
from tests.gateway.test_chat import BASH, SYSTEM, USER, call, sdk
from tests.gateway.test_engines import metric
from tests.vllm.conftest import Weights
from tests.vllm.model import CONTEXT_TOKENS, Reference
from tests.vllm.server import KEY, Vllm, relay

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]
SLOW = pytest.mark.slow
GENERATE = "/inference/v1/generate"
CLOSE = 1e-4


@asynccontextmanager
async def gateway_to(
    tmp_path: Path, weights: Weights, renderer: ModelRenderer, *urls: str, key: str | None = KEY, **sections: Any
) -> AsyncIterator[Gateway]:
    engine = {"kind": "vllm", "urls": list(urls)} | sections.pop("engine", {})
    model = {"context_tokens": CONTEXT_TOKENS}
    config = make_config(tmp_path, weights.first, engine=engine, model=model, **sections)
    async with serving(config, renderer, engine_key=key) as gateway:
        yield gateway


@pytest.fixture
async def gateway(tmp_path: Path, weights: Weights, renderer: ModelRenderer, vllm: Vllm) -> AsyncIterator[Gateway]:
    async with gateway_to(tmp_path, weights, renderer, vllm.url) as running:
        yield running


def differences(turn: Any, expected: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(turn.logprobs_T.tolist(), expected, strict=True))


async def test_log_probs_equal_a_forward_pass(gateway: Gateway, first: Reference) -> None:
    """16 conversations of two turns at once, so that vLLM batches them; the prompts extend sampled ids exactly."""

    async def converse(number: int) -> str:
        rollout_id, key = await gateway.start_rollout()
        client = sdk(gateway, key)
        history: list[Any] = [SYSTEM, {"role": "user", "content": f"{number} hello"}]
        for _ in range(2):
            answer = await call(client, history, max_tokens=40, tools=[BASH])
            reply = answer.choices[0].message.model_dump(exclude_none=True)
            history += [reply, {"role": "user", "content": "go on"}]
        return rollout_id

    for rollout_id in await asyncio.gather(*map(converse, range(16))):
        one, two = await gateway.turns(rollout_id)
        assert (two.parent_id, two.fork_cause) == (one.turn_id, None)
        path = [*one.delta_P, *one.sampled_T]
        assert differences(one, first.logprobs(one.delta_P.tolist(), one.sampled_T.tolist())) < CLOSE
        assert differences(two, first.logprobs([*path, *two.delta_P], two.sampled_T.tolist())) < CLOSE
        assert one.finish_reason is (FinishReason.LENGTH if len(one.sampled_T) == 40 else FinishReason.STOP)
        assert one.spans == (VersionSpan(0, len(one.sampled_T)),)


@pytest.mark.parametrize("route", ["generate", "completions", "chat"])
async def test_log_probs_are_those_of_the_distribution_sampled_from(
    tmp_path: Path, weights: Weights, renderer: ModelRenderer, vllm: Vllm, first: Reference, route: str
) -> None:
    """Temperature, top-k and top-p included; nothing of the model's own generation_config.json is."""
    sampling = {"temperature": 0.7, "top_k": 20, "top_p": 0.9}
    missing = frozenset({GENERATE} if route == "completions" else ())
    engine = {"render": "engine"} if route == "chat" else {}
    async with (
        relay(vllm.url, missing=missing) as way,
        gateway_to(tmp_path, weights, renderer, way.url, sampling=sampling, engine=engine) as gateway,
    ):
        rollout_id, key = await gateway.start_rollout()
        await call(sdk(gateway, key), [SYSTEM, USER], max_tokens=60)
        (turn,) = await gateway.turns(rollout_id)
    expected = first.logprobs(turn.delta_P.tolist(), turn.sampled_T.tolist(), **sampling)
    assert differences(turn, expected) < CLOSE
    assert min(expected) > -15


@pytest.mark.parametrize(
    "sampling",
    [{"seed": 7}, pytest.param({"temperature": 0}, marks=SLOW), pytest.param({"seed": 7, "top_p": 0.8}, marks=SLOW)],
)
@pytest.mark.parametrize("render", ["gateway", "engine"])
async def test_streamed_and_plain_recordings_are_equal(
    tmp_path: Path, weights: Weights, renderer: ModelRenderer, vllm: Vllm, render: str, sampling: dict[str, Any]
) -> None:
    """Both ways in, greedy and with a seed: the same ids, log-probs and text."""
    async with gateway_to(tmp_path, weights, renderer, vllm.url, engine={"render": render}) as gateway:
        turns, messages = [], []
        for stream in (False, True):
            rollout_id, key = await gateway.start_rollout("eval")
            answer = await call(sdk(gateway, key), [SYSTEM, USER], max_tokens=30, stream=stream, **sampling)
            parts = [chunk.choices[0].delta async for chunk in answer] if stream else [answer.choices[0].message]
            messages.append(
                [
                    "".join(getattr(part, name, None) or "" for part in parts)
                    for name in ("reasoning_content", "content")
                ]
            )
            turns += await gateway.turns(rollout_id)
        plain, streamed = turns
    assert plain.sampled_T.tolist() == streamed.sampled_T.tolist()
    assert plain.logprobs_T.tolist() == pytest.approx(streamed.logprobs_T.tolist(), abs=CLOSE)
    assert (plain.delta_P.tolist(), plain.spans) == (streamed.delta_P.tolist(), streamed.spans)
    assert messages[0] == messages[1] != ["", ""]
    assert (plain.streamed, streamed.streamed) == (False, True)


@pytest.mark.slow
async def test_completions_where_generate_is_off(
    tmp_path: Path, weights: Weights, renderer: ModelRenderer, vllm: Vllm, first: Reference
) -> None:
    async with (
        relay(vllm.url, missing=frozenset({GENERATE})) as way,
        gateway_to(tmp_path, weights, renderer, way.url) as gateway,
    ):
        rollout_id, key = await gateway.start_rollout()
        answer = await call(sdk(gateway, key), [SYSTEM, USER], max_tokens=25, stop=["zzz"])
        (turn,) = await gateway.turns(rollout_id)
    assert answer.usage.completion_tokens == len(turn.sampled_T)
    assert differences(turn, first.logprobs(turn.delta_P.tolist(), turn.sampled_T.tolist())) < CLOSE


async def test_a_stop_string_ends_the_text_and_keeps_its_tokens(gateway: Gateway) -> None:
    """The same seed without and with a stop string: the sampled ids are a prefix, the text ends before the string."""
    rollout_id, key = await gateway.start_rollout("eval")
    client = sdk(gateway, key)
    whole = (await call(client, [USER], max_tokens=40, seed=3)).choices[0].message.content
    stop = whole[len(whole) // 2 : len(whole) // 2 + 3]
    cut = (await call(client, [USER], max_tokens=40, seed=3, stop=[stop])).choices[0]
    assert (cut.message.content, cut.finish_reason) == (whole.split(stop)[0], "stop")
    one, two = await gateway.turns(rollout_id)
    assert two.sampled_T.tolist() == one.sampled_T.tolist()[: len(two.sampled_T)]
    assert stop in gateway.renderer.decode(two.sampled_T.tolist())


@pytest.mark.slow
async def test_a_caller_that_hangs_up_ends_the_request_in_vllm(gateway: Gateway, vllm: Vllm) -> None:
    """Within 2 s the number of running requests drops; the turn is abandoned."""
    rollout_id, key = await gateway.start_rollout()
    client = sdk(gateway, key)
    calling = await vllm.at_work(lambda: call(client, [USER], max_tokens=1900))
    before = len(await gateway.turns(rollout_id))
    calling.cancel()
    async with asyncio.timeout(2):
        while await vllm.running() > 0:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert len(await gateway.turns(rollout_id)) == before
    assert await metric(gateway, 'leyden_turns_total{state="abandoned"}') == 1


@pytest.mark.parametrize("key", [None, "another"])
@pytest.mark.parametrize("render", ["gateway", "engine"])
async def test_an_engine_that_refuses_the_key(
    tmp_path: Path, weights: Weights, renderer: ModelRenderer, vllm: Vllm, key: str | None, render: str
) -> None:
    """The refusal names the setting, and repeats no key."""
    engine = {"give_up_s": 0.5, "health_interval_s": 0.2, "render": render}
    async with gateway_to(tmp_path, weights, renderer, vllm.url, key=key, engine=engine) as gateway:
        _, agent = await gateway.start_rollout()
        with pytest.raises(openai.BadRequestError) as caught:
            await call(sdk(gateway, agent, max_retries=0), [USER])
    assert "engine.api_key_env" in caught.value.message
    assert "another" not in caught.value.message.replace("another try", "")


@pytest.mark.slow
async def test_an_engine_that_dies_is_left_and_taken_back(
    tmp_path: Path, weights: Weights, renderer: ModelRenderer, vllm: Vllm
) -> None:
    """Two ways to the server stand for two engines; a long call on the one that dies is answered by the other."""

    async def works() -> list[bool]:
        (model,) = await served.client.models()
        return [state.works for state in model.engine_states]

    async def until(*wanted: bool) -> None:
        async with asyncio.timeout(30):
            while await works() != list(wanted):  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    engine = {"health_interval_s": 0.2}
    async with relay(vllm.url) as stays, AsyncExitStack() as life:
        dies = await life.enter_async_context(relay(vllm.url))
        async with gateway_to(tmp_path, weights, renderer, dies.url, stays.url, engine=engine) as gateway:
            served = gateway
            rollouts, calls = [], []
            while dies.open < 2:
                rollouts.append(await gateway.start_rollout())
                client = sdk(gateway, rollouts[-1][1], max_retries=0)
                calls.append(asyncio.create_task(call(client, [USER], max_tokens=200)))
                await asyncio.sleep(0.05)
            await life.aclose()
            await asyncio.gather(*calls)
            await until(False, True)
            for rollout_id, _ in rollouts:
                (turn,) = await gateway.turns(rollout_id)
                assert len(turn.sampled_T) == 200 or turn.finish_reason is FinishReason.STOP
            async with relay(vllm.url, port=dies.port) as back:
                await until(True, True)
                await asyncio.gather(*(call(sdk(gateway, key), [SYSTEM], max_tokens=5) for _, key in rollouts))
                assert back.answered >= 2
