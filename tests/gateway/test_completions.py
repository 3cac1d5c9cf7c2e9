"""/v1/completions through the official SDK and a real socket."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import openai
import pytest

from leyden.gateway.render import ModelRenderer
from leyden.trajectory.samples import build_samples
from leyden.types import FinishReason, Generation, VersionSpan
from tests.gateway.conftest import Gateway, ScriptedEngine, make_config, serving
from tests.tiny_model import make_tiny_model

PROMPT = "Q: the quick\nA:"


def sdk(gateway: Gateway, key: str, **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=key, **options)


async def complete(client: openai.AsyncOpenAI, prompt: Any, **options: Any) -> Any:
    return await client.completions.create(model="any", prompt=prompt, **options)


def cut(engine: ScriptedEngine, text: str, **changes: Any) -> Generation:
    """An answer that ends without a stop token."""
    ids = engine.ids(text)
    return Generation(ids, [-0.5] * len(ids), FinishReason.LENGTH, (VersionSpan(0, len(ids)),), **changes)


def letters(gateway: Gateway, text: str) -> list[int]:
    """The ids of `text` letter by letter: not how the tokenizer would spell it."""
    encode = gateway.renderer.encode
    return [i for letter in text for i in encode(letter, add_special_tokens=False)]


async def test_text_is_sampled_from_as_it_is(gateway: Gateway) -> None:
    gateway.engine.replies = [" <think>hm</think> \n\tblanks "]
    rollout_id, key = await gateway.start_rollout()
    answer = await complete(sdk(gateway, key), PROMPT, max_tokens=5)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (" <think>hm</think> \n\tblanks ", "stop")
    (request,) = gateway.engine.requests
    assert request.prompt_ids == gateway.renderer.encode(PROMPT, add_special_tokens=False)
    assert request.max_tokens == 5
    (turn,) = await gateway.turns(rollout_id)
    assert (turn.protocol, turn.fork_cause, turn.delta_P.tolist()) == ("openai-completions", None, request.prompt_ids)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(turn.delta_P), len(turn.sampled_T))
    assert answer.id == f"cmpl-{turn.turn_id}"


async def test_a_text_that_goes_on_is_continued_by_the_exact_ids(gateway: Gateway) -> None:
    """The ids stay as they were sampled, in a tokenisation that encoding the text again does not give."""
    gateway.engine.spell = lambda text: letters(gateway, text)
    gateway.engine.replies = [cut(gateway.engine, " the lazy dog"), cut(gateway.engine, " fox")]
    rollout_id, key = await gateway.start_rollout()
    client = sdk(gateway, key)
    first = await complete(client, PROMPT)
    assert (first.choices[0].text, first.choices[0].finish_reason) == (" the lazy dog", "length")
    text = PROMPT + first.choices[0].text + "\nQ: and\nA:"
    await complete(client, text)
    await complete(client, text + " fox jumps")
    one, two, three = await gateway.turns(rollout_id)
    assert [t.parent_id for t in (one, two, three)] == [None, one.turn_id, two.turn_id]
    assert [t.fork_cause for t in (one, two, three)] == [None, None, None]
    assert gateway.renderer.decode(two.delta_P) == "\nQ: and\nA:"
    ids = gateway.engine.requests[2].prompt_ids
    assert ids == [*one.delta_P, *one.sampled_T, *two.delta_P, *two.sampled_T, *three.delta_P]
    assert ids != gateway.renderer.encode(text + " fox jumps", add_special_tokens=False)
    assert gateway.renderer.decode(ids) == text + " fox jumps"
    assert len(build_samples([one, two, three]).samples) == 1


async def test_a_stop_token_has_to_come_back(gateway: Gateway) -> None:
    gateway.engine.replies = [" fox", " dog", " cow"]
    rollout_id, key = await gateway.start_rollout()
    client = sdk(gateway, key)
    await complete(client, PROMPT)
    text = f"{PROMPT} fox<|im_end|>\nQ: next\nA:"
    await complete(client, text)
    await complete(client, f"{PROMPT} fox\nQ: next\nA:")
    one, two, three = await gateway.turns(rollout_id)
    assert (two.parent_id, two.fork_cause) == (one.turn_id, None)
    assert gateway.renderer.decode(two.delta_P) == "\nQ: next\nA:"
    assert gateway.renderer.decode(gateway.engine.requests[1].prompt_ids) == text
    assert (three.parent_id, three.fork_cause) == (None, "stop_token_not_resent")


async def test_a_stop_string_ends_the_text_and_forks(gateway: Gateway) -> None:
    gateway.engine.replies = [cut(gateway.engine, " fox\nQ:", stop_string="\nQ:")]
    rollout_id, key = await gateway.start_rollout()
    client = sdk(gateway, key)
    first = await complete(client, PROMPT, stop="\nQ:")
    assert (first.choices[0].text, gateway.engine.requests[0].stop) == (" fox", ("\nQ:",))
    await complete(client, PROMPT + " fox and")
    one, two = await gateway.turns(rollout_id)
    assert gateway.renderer.decode(one.sampled_T) == " fox\nQ:"
    assert (two.parent_id, two.fork_cause) == (None, "stop_string")


async def test_causes_of_other_forks(gateway: Gateway) -> None:
    rollout_id, key = await gateway.start_rollout()
    client = sdk(gateway, key)
    for prompt in (PROMPT, PROMPT, PROMPT + " another reply", "elsewhere"):
        await complete(client, prompt)
    causes = [turn.fork_cause for turn in await gateway.turns(rollout_id)]
    assert causes == [None, "repeated_request", "reply_rewritten", "new_conversation"]


async def test_ids_are_continued_wherever_they_begin_with_a_turn(gateway: Gateway) -> None:
    """Also where nothing is added: a cut answer goes on."""
    encode = gateway.renderer.encode
    gateway.engine.replies = [cut(gateway.engine, " lazy"), cut(gateway.engine, " dog")]
    rollout_id, key = await gateway.start_rollout()
    client = sdk(gateway, key)
    ids = letters(gateway, PROMPT)
    await complete(client, ids)
    ids += encode(" lazy", add_special_tokens=False)
    await complete(client, [ids])
    ids += encode(" dog", add_special_tokens=False) + encode("\nQ:", add_special_tokens=False)
    await complete(client, ids)
    one, two, three = turns = await gateway.turns(rollout_id)
    assert [request.prompt_ids for request in gateway.engine.requests][-1] == ids
    assert [t.parent_id for t in turns] == [None, one.turn_id, two.turn_id]
    assert [t.fork_cause for t in turns] == [None, None, None]
    assert (two.delta_P.tolist(), gateway.renderer.decode(three.delta_P)) == ([], "\nQ:")
    (sample,) = build_samples(turns).samples
    assert sample.ids_L.tolist()[: len(ids)] == ids
    assert sample.mask_L.sum() == sum(len(t.sampled_T) for t in turns)


async def test_a_templated_text_continues_a_chat(gateway: Gateway) -> None:
    rollout_id, key = await gateway.start_rollout()
    client = sdk(gateway, key)
    await client.chat.completions.create(model="any", messages=[{"role": "user", "content": "hello"}])
    head = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nreply 1<|im_end|>\n"
    await complete(client, f"{head}<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n")
    one, two = await gateway.turns(rollout_id)
    assert (two.parent_id, two.fork_cause) == (one.turn_id, None)


@pytest.mark.parametrize("kept_alive", [False, True])
async def test_streamed_equals_plain_also_after_keep_alives(
    tmp_path: Path, tokenizer_path: Path, renderer: ModelRenderer, kept_alive: bool
) -> None:
    async with serving(make_config(tmp_path, tokenizer_path), renderer, keep_alive_s=0.05) as gateway:
        if kept_alive:
            gateway.engine.before = gateway.kept_alive
        rollout_id, key = await gateway.start_rollout()
        client = sdk(gateway, key)
        gateway.engine.replies = ["x\u2028y é", "x\u2028y é"]
        plain = await complete(client, PROMPT)
        stream = await complete(client, PROMPT, stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
        text = "".join(choice.text for chunk in chunks for choice in chunk.choices)
        assert text == plain.choices[0].text == "x\u2028y é"
        assert [choice.finish_reason for chunk in chunks for choice in chunk.choices] == [None, "stop"]
        assert chunks[-1].usage == plain.usage
        assert [turn.streamed for turn in await gateway.turns(rollout_id)] == [False, True]


async def test_a_restart_forgets_nothing(tmp_path: Path, tokenizer_path: Path, renderer: ModelRenderer) -> None:
    config = make_config(tmp_path, tokenizer_path)
    async with serving(config, renderer) as gateway:
        rollout_id, key = await gateway.start_rollout()
        await complete(sdk(gateway, key), PROMPT)
    async with serving(config, renderer) as gateway:
        await complete(sdk(gateway, key), f"{PROMPT}reply 1<|im_end|>\n")
        one, two = await gateway.turns(rollout_id)
        assert (two.parent_id, two.fork_cause) == (one.turn_id, None)


async def test_choices_and_sampling(gateway: Gateway) -> None:
    """Evaluation keeps the harness's sampling."""
    rollout_id, key = await gateway.start_rollout(kind="eval")
    answer = await complete(sdk(gateway, key), PROMPT, n=2, temperature=0.3, top_p=0.9, seed=4)
    assert [choice.text for choice in answer.choices] == ["reply 1", "reply 2"]
    request = gateway.engine.requests[0]
    assert (request.temperature, request.top_p, request.seed, request.max_tokens) == (0.3, 0.9, 4, 16)
    assert len(await gateway.turns(rollout_id)) == 2


async def test_errors(gateway: Gateway) -> None:
    _, key = await gateway.start_rollout()
    client = sdk(gateway, key)
    with pytest.raises(openai.BadRequestError, match="prompt holds 2 prompts") as caught:
        await complete(client, ["a", "b"])
    assert caught.value.param == "prompt"
    with pytest.raises(openai.BadRequestError, match="echo is not supported"):
        await complete(client, PROMPT, echo=True)
    with pytest.raises(openai.BadRequestError, match="maximum context length is 2000 tokens") as caught:
        await complete(client, [5] * 2000)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.AuthenticationError):
        await complete(sdk(gateway, "nonsense"), PROMPT)
    assert gateway.engine.requests == []


def with_post_processor(folder: Path) -> Path:
    """A tokenizer that begins each encoded text with `<|endoftext|>`, as Llama's begins with BOS."""
    path = make_tiny_model(folder, weights=False) / "tokenizer.json"
    document = json.loads(path.read_text())
    bos = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
    document["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [bos, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [bos, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}},
    }
    path.write_text(json.dumps(document))
    return folder


async def test_a_doubled_bos_is_kept_counted_and_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """VLLM's tokenizer adds BOS to a text, also to one that has it; the row holds the ids as they were."""

    def warnings() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.name == "leyden.gateway.prompt"]

    folder = with_post_processor(tmp_path / "model")
    renderer = ModelRenderer(str(folder), "qwen3", "template")
    async with serving(make_config(tmp_path, folder), renderer) as gateway:
        rollout_id, key = await gateway.start_rollout()
        client = sdk(gateway, key)
        gateway.engine.replies = [cut(gateway.engine, " fox")]
        with caplog.at_level(logging.WARNING, logger="leyden.gateway.prompt"):
            await complete(client, "a")
            assert warnings() == []
            await complete(client, "a fox b")
            await complete(client, "<|endoftext|>a")
            await complete(client, [0, 0, 5])
        assert [request.prompt_ids[:3] for request in gateway.engine.requests] == [
            [0, *renderer.encode("a", add_special_tokens=False)],
            gateway.engine.requests[1].prompt_ids[:3],
            [0, 0, *renderer.encode("a", add_special_tokens=False)],
            [0, 0, 5],
        ]
        assert len(warnings()) == 1
        assert b"leyden_double_bos_total 2.0" in gateway.app.state.turns._metrics.text()
        one, two, *_ = await gateway.turns(rollout_id)
        assert two.parent_id == one.turn_id
        assert 0 not in two.delta_P


@pytest.mark.parametrize(
    ("normalizer", "rest", "cause"),
    [
        ({"type": "Prepend", "prepend": " "}, "\nQ:", "text_tokenised_whole"),
        ({"type": "NFC"}, " e\u0301\nQ:", None),
    ],
)
async def test_a_rest_has_to_read_as_it_was_sent(
    tmp_path: Path, normalizer: dict[str, str], rest: str, cause: str | None
) -> None:
    """Some tokenizers put a blank before each text that they encode: the rest by itself would have one too many.
    Others compose letters, which is the same in a whole and in a rest.
    """
    path = make_tiny_model(tmp_path / "model", weights=False) / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"normalizer": normalizer}))
    renderer = ModelRenderer(str(path.parent), "qwen3", "template")
    async with serving(make_config(tmp_path, path.parent), renderer) as gateway:
        rollout_id, key = await gateway.start_rollout()
        client = sdk(gateway, key)
        gateway.engine.spell = lambda text: renderer._tokenizer.convert_tokens_to_ids(list(text))
        gateway.engine.replies = [cut(gateway.engine, "fox"), "dog"]
        text = PROMPT + (await complete(client, PROMPT)).choices[0].text + rest
        await complete(client, text)
        one, two = await gateway.turns(rollout_id)
        assert (two.parent_id, two.fork_cause) == (None if cause else one.turn_id, cause)
        whole = renderer.encode(text, add_special_tokens=True)
        assert (gateway.engine.requests[1].prompt_ids == whole) == (cause is not None)
        assert renderer.decode(gateway.engine.requests[1].prompt_ids) == renderer.decode(whole)
