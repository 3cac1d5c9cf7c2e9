"""A weight update while a long generation runs: nothing is lost, and the record says which weights sampled what."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from leyden.gateway.render import ModelRenderer
from leyden.types import FinishReason, Turn
from tests.gateway.conftest import Gateway
from tests.gateway.test_chat import SYSTEM, USER, call, sdk
from tests.gateway.test_engines import metric
from tests.vllm.conftest import Weights
from tests.vllm.model import CONTEXT_TOKENS, Reference
from tests.vllm.server import Vllm
from tests.vllm.test_recording import CLOSE, gateway_to

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]
LONG = 500


@pytest.fixture
async def numbered(vllm: Vllm, weights: Weights) -> AsyncIterator[Vllm]:
    """The server at version 0 of the first weights, and again so afterwards."""
    await vllm.load(weights.first, 0)
    yield vllm
    await vllm.post("/resume")
    await vllm.load(weights.first, 0)


async def update(gateway: Gateway, vllm: Vllm, weights: Path, mode: str) -> None:
    """What a trainer does: hold calls, end those that run, load, say the version, go on."""
    await gateway.client.pause()
    await vllm.post(f"/pause?mode={mode}")
    await vllm.load(weights, 1)
    await gateway.client.put_model("policy", engines=[vllm.url], version=1, lineage="l", context_tokens=CONTEXT_TOKENS)
    await vllm.post("/resume")
    await gateway.client.resume()


async def updated_meanwhile(gateway: Gateway, vllm: Vllm, weights: Path, mode: str) -> list[Turn]:
    """The turns of eight long calls, in the middle of which the weights change."""
    rollouts = [await gateway.start_rollout() for _ in range(8)]
    before = await vllm.metric("vllm:generation_tokens_total{")
    calls = [
        asyncio.create_task(call(sdk(gateway, key, max_retries=0), [SYSTEM, USER], max_tokens=LONG))
        for _, key in rollouts
    ]
    async with asyncio.timeout(60):
        while await vllm.metric("vllm:generation_tokens_total{") < before + 100:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    await update(gateway, vllm, weights, mode)
    answers = await asyncio.gather(*calls)
    turns = [(await gateway.turns(rollout_id))[0] for rollout_id, _ in rollouts]
    for answer, turn in zip(answers, turns, strict=True):
        assert answer.usage.completion_tokens == len(turn.sampled_T) == len(turn.logprobs_T)
        assert turn.finish_reason is FinishReason.STOP or len(turn.sampled_T) == LONG
    return turns


async def test_a_long_generation_goes_on_under_the_new_weights(
    tmp_path: Path,
    weights: Weights,
    renderer: ModelRenderer,
    numbered: Vllm,
    first: Reference,
    second: Reference,
) -> None:
    """On eight calls: every token is there, those before the update are of the old weights, those after it of
    the new ones, given all that went before.
    """
    async with gateway_to(tmp_path, weights, renderer, numbered.url) as gateway:
        turns = await updated_meanwhile(gateway, numbered, weights.second, "abort")
        continued = await metric(gateway, "leyden_continued_calls_total")
    crossing = [turn for turn in turns if len(turn.spans) == 2]
    assert continued >= len(crossing) >= 1
    for turn in crossing:
        (old, old_length), (new, new_length) = turn.spans
        assert (old, new, old_length + new_length) == (0, 1, len(turn.sampled_T))
        prompt, sampled = turn.delta_P.tolist(), turn.sampled_T.tolist()
        expected = first.logprobs(prompt, sampled[:old_length])
        expected += second.logprobs([*prompt, *sampled[:old_length]], sampled[old_length:])
        assert turn.logprobs_T.tolist() == pytest.approx(expected, abs=CLOSE)


@pytest.mark.slow
async def test_a_generation_that_vllm_keeps_has_both_versions_too(
    tmp_path: Path, weights: Weights, renderer: ModelRenderer, numbered: Vllm
) -> None:
    """mode=keep: one engine call spans the update, and vLLM itself says where."""
    async with gateway_to(tmp_path, weights, renderer, numbered.url) as gateway:
        turns = await updated_meanwhile(gateway, numbered, weights.second, "keep")
        assert await metric(gateway, "leyden_continued_calls_total") == 0
    crossing = [turn for turn in turns if len(turn.spans) == 2]
    assert crossing, [(turn.spans, turn.finish_reason) for turn in turns]
    assert all([span.version for span in turn.spans] == [0, 1] for turn in crossing)


async def test_a_chat_call_that_an_update_cuts_short_is_made_again(
    tmp_path: Path, weights: Weights, renderer: ModelRenderer, numbered: Vllm, second: Reference
) -> None:
    """`render: engine` with no time to drain: the whole turn is of the new version."""
    engine = {"render": "engine", "drain_limit_s": 0}
    async with gateway_to(tmp_path, weights, renderer, numbered.url, engine=engine) as gateway:
        rollout_id, key = await gateway.start_rollout()
        client = sdk(gateway, key, max_retries=0)
        calling = await numbered.at_work(lambda: call(client, [SYSTEM, USER], max_tokens=LONG))
        await update(gateway, numbered, weights.second, "abort")
        await calling
        turn = (await gateway.turns(rollout_id))[-1]
    assert [span.version for span in turn.spans] == [1]
    expected = second.logprobs(turn.delta_P.tolist(), turn.sampled_T.tolist())
    assert turn.logprobs_T.tolist() == pytest.approx(expected, abs=CLOSE)
