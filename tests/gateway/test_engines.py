"""vLLM by token ids, through a real gateway: what is asked, what is recorded, and what cannot be."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from aiohttp import web

from leyden.errors import CaptureError, ConfigError, GatewayError
from leyden.gateway.engines import GenerateRequest
from leyden.gateway.engines.vllm_wire import read_completion
from leyden.gateway.render import ModelRenderer
from leyden.types import FinishReason, VersionSpan
from tests.gateway.conftest import Gateway, make_config, serving, until
from tests.gateway.fake_vllm import FakeVllm, Json, completed, generated, listening, raw, refused
from tests.gateway.test_chat import SYSTEM, USER, call, sdk

GENERATE, COMPLETIONS = "/inference/v1/generate", "/v1/completions"


@pytest.fixture
async def vllm() -> AsyncIterator[FakeVllm]:
    async with listening(FakeVllm()) as fake:
        yield fake


def config_for(tmp_path: Path, tokenizer_path: Path, *engines: FakeVllm, **sections: Any) -> Any:
    engine = {"kind": "vllm", "urls": [fake.url for fake in engines]} | sections.pop("engine", {})
    return make_config(tmp_path, tokenizer_path, engine=engine, **sections)


@pytest.fixture
async def gateway(
    tmp_path: Path, tokenizer_path: Path, renderer: ModelRenderer, vllm: FakeVllm
) -> AsyncIterator[Gateway]:
    async with serving(config_for(tmp_path, tokenizer_path, vllm), renderer) as running:
        yield running


async def one_call(gateway: Gateway, **options: Any) -> Any:
    """A call of a new rollout: its one turn."""
    rollout_id, key = await gateway.start_rollout()
    await call(sdk(gateway, key, max_retries=0), [SYSTEM, USER], **options)
    (turn,) = await gateway.turns(rollout_id)
    return turn


async def refusal(gateway: Gateway, **options: Any) -> tuple[int, str, str | None]:
    """Status and message of a call that fails, and why its attempt is incomplete."""
    rollout_id, key = await gateway.start_rollout()
    with pytest.raises(openai.APIStatusError) as caught:
        await call(sdk(gateway, key, max_retries=0), [SYSTEM, USER], **options)
    assert await gateway.turns(rollout_id) == []
    receipt = await gateway.client.exit(rollout_id, 1, exit_code=0, timed_out=False, reason=None)
    return caught.value.status_code, caught.value.message, receipt.rollout.reason


async def metric(gateway: Gateway, name: str) -> float:
    text = await gateway.client.metrics()
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name))


async def test_ids_logprobs_and_versions_are_recorded_as_sampled(gateway: Gateway, vllm: FakeVllm) -> None:
    """The last token counts."""
    versions = [{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 4}]
    entries = [{"token_id": i, "logprob": -i / 1000, "rank": 1} for i in (300, 301, 302, 2)]
    vllm.script = [generated([300, 301, 302, 2], logprobs={"content": entries}, weight_versions=versions)]
    turn = await one_call(gateway, max_tokens=50, temperature=0.3)
    assert turn.sampled_T.tolist() == [300, 301, 302, 2]
    assert turn.logprobs_T.tolist() == pytest.approx([-0.3, -0.301, -0.302, -0.002])
    assert turn.spans == (VersionSpan(3, 2), VersionSpan(4, 2))
    ((path, body),) = vllm.asked
    assert path == GENERATE
    assert body == {
        "token_ids": turn.delta_P.tolist(),
        "sampling_params": {
            **{"max_tokens": 50, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "seed": None},
            **{"stop": [], "stop_token_ids": [2, 0], "logprobs": 0, "detokenize": False, "skip_special_tokens": False},
        },
    }


async def test_versions_that_are_no_numbers_are_the_registered_one(gateway: Gateway, vllm: FakeVllm) -> None:
    first = await one_call(gateway)
    await gateway.client.put_model("policy", engines=[vllm.url], version=7, lineage="l", context_tokens=2000)
    vllm.script = [generated([300, 2]), generated([300, 2], weight_versions=None)]
    assert (first.spans, (await one_call(gateway)).spans) == ((VersionSpan(0, 3),), (VersionSpan(7, 2),))
    assert (await one_call(gateway)).spans == (VersionSpan(7, 2),)


async def test_stop_strings_keep_their_tokens(gateway: Gateway, vllm: FakeVllm) -> None:
    ids = gateway.renderer.encode("the fox jumps", add_special_tokens=False)
    vllm.script = [generated(ids, stop_reason=" jumps")]
    rollout_id, key = await gateway.start_rollout()
    answer = await call(sdk(gateway, key), [SYSTEM, USER], stop=[" jumps", "dog"])
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("the fox", "stop")
    (turn,) = await gateway.turns(rollout_id)
    assert turn.sampled_T.tolist() == ids
    assert vllm.bodies[0]["sampling_params"]["stop"] == [" jumps", "dog"]
    assert vllm.bodies[0]["sampling_params"]["detokenize"] is True


async def test_evaluation_keeps_the_harness_sampling_and_seed(gateway: Gateway, vllm: FakeVllm) -> None:
    _, key = await gateway.start_rollout("eval")
    await call(sdk(gateway, key), [SYSTEM, USER], temperature=0.2, top_p=0.9, seed=5, extra_body={"top_k": 4})
    sent = vllm.bodies[0]["sampling_params"]
    assert {k: sent[k] for k in ("temperature", "top_p", "top_k", "seed")} == {
        **{"temperature": 0.2, "top_p": 0.9, "top_k": 4, "seed": 5}
    }


async def test_completions_where_generate_is_off(gateway: Gateway, vllm: FakeVllm) -> None:
    vllm.missing = {GENERATE}
    vllm.default = completed([300, 2], prompt_token_ids=None)
    turn = await one_call(gateway, max_tokens=9, stop=["x"])
    assert (turn.sampled_T.tolist(), turn.logprobs_T.tolist()) == ([300, 2], [-0.5, -0.5])
    assert turn.spans == (VersionSpan(0, 2),)
    ((path, body),) = vllm.asked
    assert (path, body["prompt"], body["max_tokens"]) == (COMPLETIONS, turn.delta_P.tolist(), 9)
    assert (body["logprobs"], body["return_token_ids"], body["return_tokens_as_token_ids"]) == (0, True, True)
    assert (body["add_special_tokens"], body["skip_special_tokens"]) == (False, False)
    assert (body["stop"], body["stop_token_ids"], body["repetition_penalty"]) == (["x"], [2, 0], 1.0)
    assert vllm.probes == 1


async def test_ids_spelt_in_the_logprobs_are_read(gateway: Gateway, vllm: FakeVllm) -> None:
    """Ids only as `token_id:N` strings."""
    vllm.missing = {GENERATE}
    vllm.default = completed([300, 2], token_ids=None)
    turn = await one_call(gateway)
    assert (turn.sampled_T.tolist(), turn.logprobs_T.tolist()) == ([300, 2], [-0.5, -0.5])


@pytest.mark.parametrize(
    ("changes", "sampling", "needed"),
    [
        ({"missing": {GENERATE, COMPLETIONS}}, {}, "--enable-scale-out"),
        ({"probe_logprob": None}, {}, "--max-logprobs"),
        ({"probe_logprob": -1.2}, {"temperature": 0.7}, "--logprobs-mode processed_logprobs"),
        ({"probe_logprob": -1.2}, {"top_p": 0.9}, "--logprobs-mode processed_logprobs"),
        ({"max_model_len": 1999}, {}, "--max-model-len 2000"),
    ],
)
async def test_an_engine_that_cannot_serve_is_named_with_the_option_to_set(
    tmp_path: Path,
    tokenizer_path: Path,
    renderer: ModelRenderer,
    vllm: FakeVllm,
    changes: Json,
    sampling: Json,
    needed: str,
) -> None:
    """Found by the first call or check, before anything is recorded."""
    for name, value in changes.items():
        setattr(vllm, name, value)
    async with serving(config_for(tmp_path, tokenizer_path, vllm, sampling=sampling), renderer) as gateway:
        status, message, reason = await refusal(gateway)
        assert (status, needed in message) == (400, True)
        assert reason is not None
        assert needed in reason
        (model,) = await gateway.client.models()
        (state,) = model.engine_states
        assert (state.url, state.works, needed in state.problem) == (vllm.url, False, True)
    assert vllm.asked == []


async def test_raw_logprobs_do_where_sampling_is_plain(gateway: Gateway, vllm: FakeVllm) -> None:
    vllm.probe_logprob = -1.2
    assert (await one_call(gateway)).logprobs_T.tolist() == [-0.5] * 3


async def test_ids_refused_by_the_completions_route_are_named(gateway: Gateway, vllm: FakeVllm) -> None:
    """An engine that ignores `return_token_ids`, found by its probe."""
    vllm.missing = {GENERATE}

    async def without_ids(*_: Any) -> Any:
        raise AssertionError("not asked: the probe said no")

    vllm.default = without_ids
    vllm._probe = lambda _path: completed([5], token_ids=None, logprobs=None)  # type: ignore[assignment]
    status, message, _ = await refusal(gateway)
    assert (status, "return_token_ids" in message) == (400, True)


@pytest.mark.parametrize(
    "logprobs",
    [
        pytest.param([-0.1, -0.2], id="one less"),
        pytest.param([-0.1, -0.2, -0.3, -0.4], id="one more"),
        pytest.param([-0.1, math.nan, -0.3], id="NaN"),
        pytest.param([-0.1, -math.inf, -0.3], id="-Infinity"),
        pytest.param([-0.1, None, -0.3], id="null"),
        pytest.param([-0.1, -9999.0, -0.3], id="vLLM's floor"),
        pytest.param([-0.1, 0.2, -0.3], id="positive"),
        pytest.param(None, id="none"),
    ],
)
@pytest.mark.parametrize("route", [GENERATE, COMPLETIONS])
async def test_log_probs_that_do_not_fit_are_absent(
    gateway: Gateway, vllm: FakeVllm, route: str, logprobs: list[Any] | None
) -> None:
    """The ids, whose number the engine says twice, stay; the log-probs are absent as a whole and
    counted, the harness gets its 200.
    """
    ids = [300, 301, 2]
    if route == GENERATE:
        content = [{"token_id": i, "logprob": v} for i, v in zip([300, 301, 2, 7], logprobs or [], strict=False)]
        answer = generated(ids, logprobs=logprobs and {"content": content})
    else:
        vllm.missing = {GENERATE}
        answer = completed(ids, logprobs=logprobs and {"tokens": ["a", "b", "c"], "token_logprobs": logprobs})
    vllm.script = [raw(json.dumps(answer | {"usage": {"completion_tokens": 3}}))]
    turn = await one_call(gateway)
    assert (turn.sampled_T.tolist(), turn.logprobs_T) == (ids, None)
    assert await metric(gateway, "leyden_turns_without_logprobs_total") == 1


async def test_log_probs_of_other_tokens_are_absent(gateway: Gateway, vllm: FakeVllm) -> None:
    """Entries for three of four tokens do not shift."""
    entries = [{"token_id": i, "logprob": -0.5} for i in (10, 12, 13, 13)]
    vllm.script = [generated([10, 11, 12, 13], logprobs={"content": entries})]
    turn = await one_call(gateway)
    assert (turn.sampled_T.tolist(), turn.logprobs_T) == ([10, 11, 12, 13], None)


def test_log_probs_spelt_for_other_ids_are_absent() -> None:
    spelt = {"tokens": ["token_id:10", "token_id:12"], "token_logprobs": [-0.1, -0.2]}
    assert read_completion(completed([10, 11], logprobs=spelt), GenerateRequest([1], 9)).logprobs_T is None
    assert read_completion(completed([10, 12], logprobs=spelt), GenerateRequest([1], 9)).logprobs_T == [-0.1, -0.2]


async def test_strict_runs_refuse_a_turn_without_log_probs(
    tmp_path: Path, tokenizer_path: Path, renderer: ModelRenderer, vllm: FakeVllm
) -> None:
    """Strict."""
    vllm.default = generated([300, 2], logprobs=None)
    config = config_for(tmp_path, tokenizer_path, vllm, gateway={"strict_logprobs": True})
    async with serving(config, renderer) as gateway:
        status, _, reason = await refusal(gateway)
    assert (status, "strict_logprobs" in (reason or "")) == (400, True)


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(generated([], token_ids=None), id="no ids"),
        pytest.param(generated([], token_ids=["300"]), id="ids that are none"),
        pytest.param(generated([300, 2]) | {"usage": {"prompt_tokens": 1, "completion_tokens": 2}}, id="other prompt"),
        pytest.param(generated([300, 2]) | {"usage": {"completion_tokens": 3}}, id="an id is missing"),
        pytest.param(generated([300] * 60), id="more than max_tokens"),
        pytest.param(generated([300, 2], finish_reason=None), id="no end"),
        pytest.param(
            generated([300, 2], weight_versions=None, logprobs={"content": [{"token_id": 300, "logprob": -0.5}]}),
            id="ids and log-probs of other numbers, and nobody says which is right",
        ),
        pytest.param(
            generated([300, 2], weight_versions=[{"version": "1", "start": 0, "end": 1}]), id="versions cover half"
        ),
        pytest.param(
            generated([300, 2], weight_versions=[{"version": "1", "start": 1, "end": 2}]), id="versions leave a gap"
        ),
        pytest.param(generated([300, 2], weight_versions=[{"version": "1"}]), id="versions of another shape"),
        pytest.param({"choices": []}, id="no choice"),
        pytest.param({"choices": generated([1])["choices"] * 2}, id="two choices"),
    ],
)
async def test_ids_that_contradict_make_the_attempt_incomplete(gateway: Gateway, vllm: FakeVllm, answer: Json) -> None:
    vllm.script = [answer]
    status, message, reason = await refusal(gateway, max_tokens=50)
    assert (status, "cannot be recorded exactly" in message) == (400, True)
    assert (reason or "").startswith("incomplete: ")


@pytest.mark.parametrize("said", ["repetition", "content_filter", "tool_calls", "never_heard_of"])
@pytest.mark.parametrize("missing", [set(), {GENERATE}])
async def test_an_end_of_any_name_is_a_stop(
    gateway: Gateway, vllm: FakeVllm, said: str, missing: set[str], caplog: pytest.LogCaptureFixture
) -> None:
    """All ids are there. What is not known is named once."""
    vllm.missing = missing
    make = completed if missing else generated
    vllm.script = [make([300, 301], finish_reason=said), make([300, 301], finish_reason=said)]
    rollout_id, key = await gateway.start_rollout()
    answers = [await call(sdk(gateway, key), [{"role": "user", "content": text}]) for text in "ab"]
    assert [answer.choices[0].finish_reason for answer in answers] == ["stop"] * 2
    turns = await gateway.turns(rollout_id)
    assert [turn.sampled_T.tolist() for turn in turns] == [[300, 301]] * 2
    assert {turn.finish_reason for turn in turns} == {FinishReason.STOP}
    assert len([r for r in caplog.records if said in r.getMessage()]) == (0 if said == "tool_calls" else 1)


async def test_a_call_that_ends_in_an_error_is_made_again(gateway: Gateway, vllm: FakeVllm) -> None:
    vllm.script = [generated([300], finish_reason="error"), generated([301, 2])]
    assert (await one_call(gateway)).sampled_T.tolist() == [301, 2]


@pytest.mark.parametrize("logprobs", [[-0.1], [-0.1, -0.2, -0.3], []], ids=len)
@pytest.mark.parametrize("usage", [None, {"completion_tokens": 2}, {"completion_tokens": None}])
def test_who_says_how_many_ids_there_are(logprobs: list[float], usage: Json | None) -> None:
    """Log-probs of another number than the ids leave the ids in doubt, unless usage counts these."""
    answer = completed([10, 11], logprobs={"tokens": ["a"] * len(logprobs), "token_logprobs": logprobs})
    if usage is not None:
        answer["usage"] = usage
    if (usage or {}).get("completion_tokens"):
        assert read_completion(answer, GenerateRequest([1], 9)).logprobs_T is None
    else:
        with pytest.raises(CaptureError, match=f"2 ids and {len(logprobs)} log-probs"):
            read_completion(answer, GenerateRequest([1], 9))


async def test_an_abort_is_gone_on_with_under_the_new_weights(gateway: Gateway, vllm: FakeVllm) -> None:
    """Prompt + partial ids, what is left of max_tokens, log-probs joined, both versions recorded."""

    async def update_meanwhile(_request: Any, _body: Json) -> Any:
        await gateway.client.pause()
        await gateway.client.put_model("policy", engines=[vllm.url], version=1, lineage="l", context_tokens=2000)
        asyncio.get_running_loop().call_later(0.05, lambda: tasks.append(asyncio.create_task(gateway.client.resume())))
        return web.json_response(generated([40, 41], finish_reason="abort"))

    tasks: list[Any] = []
    vllm.script = [
        update_meanwhile,
        generated([], finish_reason="abort", logprobs=None),
        generated([42], finish_reason="abort", logprobs={"content": [{"token_id": 42, "logprob": -2.0}]}),
        generated([43, 2]),
    ]
    turn = await one_call(gateway, max_tokens=20)
    assert turn.sampled_T.tolist() == [40, 41, 42, 43, 2]
    assert turn.logprobs_T.tolist() == [-0.5, -0.5, -2.0, -0.5, -0.5]
    assert turn.spans == (VersionSpan(0, 2), VersionSpan(1, 3))
    assert turn.finish_reason is FinishReason.STOP
    prompt = turn.delta_P.tolist()
    assert [(b["token_ids"], b["sampling_params"]["max_tokens"]) for b in vllm.bodies] == [
        (prompt, 20),
        ([*prompt, 40, 41], 18),
        ([*prompt, 40, 41], 18),
        ([*prompt, 40, 41, 42], 17),
    ]
    assert await metric(gateway, "leyden_continued_calls_total") == 3


async def test_an_abort_at_the_limit_is_the_limit(gateway: Gateway, vllm: FakeVllm) -> None:
    vllm.script = [generated([40, 41], finish_reason="abort")]
    turn = await one_call(gateway, max_tokens=2)
    assert (turn.sampled_T.tolist(), turn.finish_reason) == ([40, 41], FinishReason.LENGTH)
    assert await metric(gateway, "leyden_truncated_turns_total") == 1


async def test_every_choice_is_recorded(gateway: Gateway, vllm: FakeVllm) -> None:
    """N = 2 is two calls and two turns; an error of one ends the other."""
    vllm.script = [generated([5, 6]), generated([5, 7])]
    rollout_id, key = await gateway.start_rollout()
    answer = await call(sdk(gateway, key), [SYSTEM, USER], n=2)
    turns = await gateway.turns(rollout_id)
    assert (len(answer.choices), sorted(turn.sampled_T.tolist() for turn in turns)) == (2, [[5, 6], [5, 7]])

    async def never(*_: Any) -> Any:
        await asyncio.Event().wait()

    vllm.script = [refused(400, "no"), never]
    rollout_id, key = await gateway.start_rollout()
    with pytest.raises(openai.BadRequestError):
        await call(sdk(gateway, key, max_retries=0), [SYSTEM, USER], n=2)
    await until(lambda: vllm.open == 0)
    assert (vllm.cancelled, await gateway.turns(rollout_id)) == (1, [])


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("[2001:db8::5]:8000", "http://[2001:db8::5]:8000"),
        ("http://[2001:db8::5]:8000/v1/", "http://[2001:db8::5]:8000"),
        ("10.0.0.1:8000", "http://10.0.0.1:8000"),
        ("https://engine.example/base/v1", "https://engine.example/base"),
    ],
)
async def test_engine_urls(gateway: Gateway, tmp_path: Path, given: str, url: str) -> None:
    assert make_config(tmp_path, tmp_path, engine={"kind": "vllm", "urls": [given, given]}).engine.urls == [url]
    await gateway.client.put_model("policy", engines=[given], version=0, lineage="l", context_tokens=2000)
    (model,) = await gateway.client.models()
    assert model.engines == (url,)


@pytest.mark.parametrize(
    "given", ["2001:db8::5:8000", "http://2001:db8::5:8000", "ftp://h:1", "h:99999", "http://h:1?x", "", "[::1"]
)
async def test_urls_that_are_none_are_refused(gateway: Gateway, tmp_path: Path, given: str) -> None:
    """An IPv6 address without brackets."""
    with pytest.raises(ConfigError, match=r"engine\.urls") as caught:
        make_config(tmp_path, tmp_path, engine={"kind": "vllm", "urls": [given]})
    with pytest.raises(GatewayError, match="422"):
        await gateway.client.put_model("policy", engines=[given], version=0, lineage="l", context_tokens=2000)
    if given == "2001:db8::5:8000":
        assert "[2001:db8::5]:8000" in str(caught.value)


def test_only_vllm_renders(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine\.kind: vllm"):
        make_config(tmp_path, tmp_path, engine={"render": "engine"})


async def test_a_restarted_gateway_keeps_the_version_of_the_run_files_engines(
    tmp_path: Path, tokenizer_path: Path, renderer: ModelRenderer, vllm: FakeVllm
) -> None:
    config = config_for(tmp_path, tokenizer_path, vllm)
    async with serving(config, renderer) as gateway:
        (model,) = await gateway.client.models()
        assert (model.engines, model.version, model.lineage) == ((vllm.url,), 0, "run")
        await gateway.client.put_model("policy", engines=[vllm.url], version=5, lineage="m", context_tokens=2000)
    async with serving(config, renderer) as gateway:
        (model,) = await gateway.client.models()
        assert (model.engines, model.version, model.lineage) == ((vllm.url,), 5, "m")
