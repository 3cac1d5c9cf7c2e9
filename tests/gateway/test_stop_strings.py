"""Stop strings bind what the caller sees: in reasoning they end nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from leyden.gateway.render import ModelRenderer
from leyden.types import FinishReason, Generation
from tests.gateway.conftest import Gateway, ScriptedEngine, make_config, serving
from tests.gateway.fake_vllm import FakeVllm, chatted, listening
from tests.gateway.test_bad_input import CHAT, GEMINI
from tests.gateway.test_engines import config_for
from tests.gateway.test_reading import MESSAGES, READ_FROM, asked
from tests.qwen_tokenizers import qwen_tokenizer_folder

STOP = "Question:"
STOPS = {
    CHAT: {"stop": [STOP]},
    MESSAGES: {"stop_sequences": [STOP]},
    GEMINI: {"generationConfig": {"stopSequences": [STOP]}},
}
OPENED = {"qwen3": "<think>\n", "qwen3.5": ""}


def part(engine: ScriptedEngine, text: str, stop: str | None = None) -> Generation:
    whole = engine.generation(text, stop_string=stop)
    if stop is None:
        return whole
    ids = whole.token_ids_T[:-1]
    return Generation(ids, [-0.5] * len(ids), FinishReason.STOP, (whole.spans[0]._replace(length=len(ids)),), stop)


@pytest.mark.parametrize("path", STOPS)
@pytest.mark.parametrize("family", OPENED)
async def test_one_in_the_reasoning_ends_nothing(tmp_path: Path, family: str, path: str) -> None:
    """The generation goes on from its ids; one in the text ends it, and neither stays in it."""
    folder = qwen_tokenizer_folder(family)
    config = make_config(tmp_path, folder, model={"renderer": family})
    async with serving(config, ModelRenderer(str(folder), family, "template")) as gateway:
        engine = gateway.engine
        first = part(engine, f"{OPENED[family]}is it a {STOP}", STOP)
        second = part(engine, " yes.\n</think>\n\nIt is.\nQuestion:", STOP)
        engine.replies = [first, second]
        rollout_id, key = await gateway.start_rollout()
        answer = await asked(gateway, key, path, **STOPS[path])
        assert READ_FROM[path](answer) == ("It is.\n", [])
        assert engine.requests[1].prompt_ids == [*engine.requests[0].prompt_ids, *first.token_ids_T]
        assert engine.requests[1].max_tokens == engine.requests[0].max_tokens - len(first.token_ids_T)
        (turn,) = await gateway.turns(rollout_id)
        assert turn.sampled_T.tolist() == [*first.token_ids_T, *second.token_ids_T]
        if path == MESSAGES:
            assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", STOP)


@pytest.mark.parametrize("stop", ["</think>", "\n\n", "\n"])
async def test_the_end_of_the_reasoning_is_not_seen(gateway: Gateway, stop: str) -> None:
    engine = gateway.engine
    engine.replies = [part(engine, "<think>\nhm\n</think>\n\n", stop), part(engine, "54")]
    _, key = await gateway.start_rollout()
    assert READ_FROM[CHAT](await asked(gateway, key, CHAT, stop=[stop])) == ("54", [])


async def test_a_limit_in_the_reasoning_is_a_limit(gateway: Gateway) -> None:
    first = part(gateway.engine, f"<think>\nis it a {STOP}", STOP)
    gateway.engine.replies = [first]
    _, key = await gateway.start_rollout()
    answer = await asked(gateway, key, CHAT, stop=[STOP], max_tokens=len(first.token_ids_T))
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["choices"][0]["message"]["reasoning_content"].strip() == f"is it a {STOP}"


async def test_without_reasoning_they_end_the_text_blanks_too(gateway: Gateway) -> None:
    gateway.engine.replies = [part(gateway.engine, "one\n", "\n")]
    _, key = await gateway.start_rollout()
    assert READ_FROM[CHAT](await asked(gateway, key, CHAT, stop=["\n"])) == ("one", [])
    assert len(gateway.engine.requests) == 1


@pytest.mark.parametrize("path", STOPS)
async def test_where_the_engine_renders_it_is_asked_again_without_and_the_text_is_cut(
    tmp_path: Path, path: str
) -> None:
    async with listening(FakeVllm()) as vllm:
        config = config_for(tmp_path, Path("/nowhere/model"), vllm, engine={"render": "engine"})
        async with serving(config, None) as gateway:  # type: ignore[arg-type]
            vllm.script = [
                chatted([1], [4], {"content": None, "reasoning": "is it a "}, stop_reason=STOP),
                chatted([1], [4, 5], {"content": f"It is.\n{STOP} or", "reasoning": f"a {STOP}"}),
                chatted([1], [4], {"content": "It is.\n", "reasoning": "hm"}, stop_reason=STOP),
            ]
            rollout_id, key = await gateway.start_rollout()
            assert READ_FROM[path](await asked(gateway, key, path, **STOPS[path])) == ("It is.\n", [])
            (turn,) = await gateway.turns(rollout_id)
            assert turn.sampled_T.tolist() == [4, 5]
            assert READ_FROM[path](await asked(gateway, key, path, **STOPS[path])) == ("It is.\n", [])
            assert [body["stop"] for body in vllm.bodies] == [[STOP], [], [STOP]]
