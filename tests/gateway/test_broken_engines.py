"""Engines that are there and do not sample: calls move, or wait, and nobody is scored for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from aiohttp import web

from leyden.gateway.render import ModelRenderer
from tests.gateway.conftest import Gateway, serving, until
from tests.gateway.fake_vllm import (
    Answer,
    FakeVllm,
    Json,
    chatted,
    cut_before,
    cut_within,
    generated,
    listening,
    own,
    raw,
    refused,
)
from tests.gateway.test_chat import USER, call, sdk
from tests.gateway.test_engine_faults import held_s, until_works
from tests.gateway.test_engines import config_for, one_call, refusal

KINDS: dict[str, tuple[Json, Json]] = {
    "leyden": ({"kind": "leyden"}, own([300, 2])),
    "vllm": ({"kind": "vllm"}, generated([300, 2])),
    "vllm renders": ({"kind": "vllm", "render": "engine"}, chatted([9], [300, 2])),
}


async def never(_request: web.Request, _body: Json) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


FAULTS = {
    "500": refused(500, "CUDA error"),
    "no JSON": raw("<html>CUDA error</html>"),
    "reset": cut_before,
    "cut": cut_within,
}


@asynccontextmanager
async def engines(
    folder: Path,
    tokenizer: Path,
    renderer: ModelRenderer,
    kind: str,
    *answers: Answer | None,
    give_up_s: float = 0.3,
    **sections: Any,
) -> AsyncIterator[tuple[Gateway, list[FakeVllm]]]:
    """A gateway with an engine for each answer, which it gives to calls and probes alike; None: it works."""
    settings, good = KINDS[kind]
    fakes = [FakeVllm(default=answer or good, probe_answer=answer) for answer in answers]
    async with AsyncExitStack() as stack:
        for fake in fakes:
            await stack.enter_async_context(listening(fake))
        engine = settings | {"health_interval_s": 0.05, "give_up_s": give_up_s}
        config = config_for(folder, tokenizer, *fakes, engine=engine, **sections)
        async with serving(config, renderer) as gateway:
            yield gateway, fakes


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fault", FAULTS)
async def test_an_engine_that_fails_every_call_makes_attempts_incomplete(
    tmp_path: Path, tokenizer_path: Path, renderer: ModelRenderer, kind: str, fault: str
) -> None:
    """After a while, none of it the rollout's, with the engine's words; its rollout is run again, and not graded."""
    async with engines(tmp_path, tokenizer_path, renderer, kind, FAULTS[fault]) as (gateway, (fake,)):
        status, message, reason = await refusal(gateway)
        assert (status, fake.url in message) == (400, True)
        assert fake.url in (reason or "")
        assert ("CUDA error" in (reason or "")) == (fault in ("500",))
        assert await held_s(gateway) >= 0.3
        (rollout,), _ = await gateway.client.rollouts()
        assert (rollout.state, rollout.reward) == ("queued", None)
        fake.default, fake.probe_answer = KINDS[kind][1], None
        await until_works(gateway, True)
        assert (await one_call(gateway)).sampled_T.tolist() == [300, 2]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fault", [*FAULTS, "wrong shape"])
async def test_calls_move_from_a_broken_engine_to_a_good_one(
    tmp_path: Path, tokenizer_path: Path, renderer: ModelRenderer, kind: str, fault: str
) -> None:
    bad = FAULTS.get(fault, raw("[]"))
    async with engines(tmp_path, tokenizer_path, renderer, kind, bad, None) as (gateway, (broken, good)):
        await until(lambda: broken.probes > 0 or kind == "leyden")
        for _ in range(12):
            try:
                await one_call(gateway)
            except openai.BadRequestError:
                assert (kind, fault, len(broken.asked)) == ("leyden", "wrong shape", 1)  # one attempt is void
        await until_works(gateway, False, True)
        assert len(good.asked) >= 11
        broken.default, broken.probe_answer = KINDS[kind][1], None
        await until_works(gateway, True, True)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_call_that_one_engine_fails_is_made_at_another(
    tmp_path: Path, tokenizer_path: Path, renderer: ModelRenderer, kind: str
) -> None:
    """Although its probes succeed."""
    async with engines(tmp_path, tokenizer_path, renderer, kind, None, None) as (gateway, (one, two)):
        one.default = refused(500, "out of memory")
        for _ in range(12):
            await one_call(gateway)
        assert len(one.asked) >= 1
        assert len(two.asked) == 12


def busy_for(fake: FakeVllm, times: int, status: int) -> Answer:
    """An answer to so many probes; then the engine has time."""

    async def answer(request: web.Request, body: Json) -> web.StreamResponse:
        if fake.probes >= times:
            fake.probe_answer = None
        return await refused(status, "too many requests")(request, body)

    return answer


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("kind", KINDS)
async def test_an_engine_too_busy_for_a_probe_stays(
    tmp_path: Path, tokenizer_path: Path, renderer: ModelRenderer, kind: str, status: int, caplog: Any
) -> None:
    """One call breaks, and the probe that follows finds the engine busy: it is asked on, and answers."""
    async with engines(tmp_path, tokenizer_path, renderer, kind, None) as (gateway, (fake,)):
        await one_call(gateway)
        fake.probes = 0
        fake.probe_answer = busy_for(fake, 1, status)
        fake.script = [refused(500, "CUDA error"), KINDS[kind][1]]
        assert (await one_call(gateway)).sampled_T.tolist() == [300, 2]
        assert (len(fake.asked), fake.probes >= 1) == (3, True)
        assert "is not asked any more" not in caplog.text


@pytest.mark.parametrize("kind", ["vllm", "vllm renders"])
async def test_an_engine_that_begins_busy_is_waited_for(
    tmp_path: Path, tokenizer_path: Path, renderer: ModelRenderer, kind: str
) -> None:
    """Its routes are not known before a probe is answered. Probes do not come faster than the pause between them."""
    async with engines(tmp_path, tokenizer_path, renderer, kind, refused(429, "busy"), give_up_s=60) as (
        gateway,
        (fake,),
    ):
        fake.default, fake.probe_answer = KINDS[kind][1], busy_for(fake, 2, 429)
        assert (await one_call(gateway)).sampled_T.tolist() == [300, 2]
        assert fake.probes < 10  # two busy answers take two pauses of a second; checks come 20 times a second
        assert await held_s(gateway) >= 1


@pytest.mark.parametrize("kind", ["vllm", "vllm renders"])
async def test_an_engine_that_is_always_busy_makes_attempts_incomplete(
    tmp_path: Path, tokenizer_path: Path, renderer: ModelRenderer, kind: str
) -> None:
    async with engines(tmp_path, tokenizer_path, renderer, kind, refused(429, "busy")) as (gateway, (fake,)):
        status, message, reason = await refusal(gateway)
        assert (status, "no time for one token" in message) == (400, True)
        assert fake.url in (reason or "")


@pytest.mark.parametrize("kind", KINDS)
async def test_an_engine_that_answers_nothing_is_left(
    tmp_path: Path, tokenizer_path: Path, renderer: ModelRenderer, kind: str
) -> None:
    """A hang is found by a token that does not come, long before attempts are out of time; calls move."""
    timeout = {"timeout_s": 2, "command": ["true"]}
    async with engines(tmp_path, tokenizer_path, renderer, kind, None, None, harness=timeout) as (gateway, fakes):
        for fake in fakes:
            fake.default = never
        _, key = await gateway.start_rollout()
        calling = asyncio.create_task(call(sdk(gateway, key, max_retries=0), [USER]))
        await until(lambda: any(fake.asked for fake in fakes))
        hung, other = fakes if fakes[0].asked else reversed(fakes)
        hung.probe_answer, other.default = never, KINDS[kind][1]
        await calling
        assert (len(hung.asked), len(other.asked)) == (1, 1)


@pytest.mark.parametrize("kind", KINDS)
async def test_an_engine_that_answers_nothing_at_all_makes_attempts_incomplete(
    tmp_path: Path, tokenizer_path: Path, renderer: ModelRenderer, kind: str
) -> None:
    timeout = {"timeout_s": 2, "command": ["true"]}
    async with engines(tmp_path, tokenizer_path, renderer, kind, never, harness=timeout) as (gateway, (fake,)):
        _, _, reason = await refusal(gateway)
        assert f"engine {fake.url} answers GET /health, but samples not one token within 0.5 s" in (reason or "")
        assert await held_s(gateway) >= 0.5


GARBAGE: dict[str, Answer] = {
    "no JSON": raw("<html>"),
    "another shape": raw('{"choices": [{"token_ids": [5], "logprobs": 3, "finish_reason": "stop"}]}'),
    "two choices": generated([5]) | {"choices": generated([5])["choices"] * 2},
    "no end": generated([5], finish_reason=None),
    "too many": generated([5, 6]),
    "contradicted": generated([5]) | {"usage": {"completion_tokens": 7}},
    "usage of another shape": generated([5]) | {"usage": [1]},
    "nothing": raw(""),
    "null": raw("null"),
    "deep": raw("[" * 100_000),
    "half a surrogate pair": raw('{"choices": "\\ud800"}'),
    "bytes": raw("\x00\x01"),
    "error": refused(500, "boom"),
    "reset": cut_before,
}


@pytest.mark.parametrize("kind", ["vllm", "vllm renders"])
@pytest.mark.parametrize("garbage", GARBAGE)
async def test_a_malformed_answer_to_the_first_probe_takes_out_that_engine_alone(
    tmp_path: Path, tokenizer_path: Path, renderer: ModelRenderer, kind: str, garbage: str
) -> None:
    """The gateway lives, the others serve, and the engine is named until it gives a good answer."""
    async with engines(tmp_path, tokenizer_path, renderer, kind, GARBAGE[garbage], None) as (gateway, (bad, good)):
        await until_works(gateway, False, True)
        for _ in range(6):
            await one_call(gateway)
        assert (len(bad.asked), len(good.asked)) == (0, 6)
        (model,) = await gateway.client.models()
        assert bad.url in model.engine_states[0].problem
        bad.probe_answer = None
        await until_works(gateway, True, True)
