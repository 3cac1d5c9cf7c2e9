"""The base model of micro_swe and what it was made from."""

import hashlib
import json
import random
from typing import Any

import demonstrations
import pytest
import tasks

from tests.micro_swe import EXAMPLE


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    result: dict[str, Any] = json.loads((EXAMPLE / "base" / "base.json").read_text())
    return result


def test_the_base_model_comes_from_the_script(record: dict[str, Any]) -> None:
    script = hashlib.sha256((EXAMPLE / "make_base.py").read_bytes()).hexdigest()
    assert record["script_sha256"] == script, "make_base.py has changed: run it"
    for name, digest in record["files"].items():
        assert hashlib.sha256((EXAMPLE / "base" / name).read_bytes()).hexdigest() == digest, name
    assert (EXAMPLE / "base" / "model.safetensors").stat().st_size <= 5_000_000


def test_the_demonstrations_are_those_that_the_base_model_was_made_from(record: dict[str, Any]) -> None:
    pytest.importorskip("torch")
    import make_base

    source = make_base.Demonstrations(record["seed"])
    texts = make_base.tokenizer_texts(source, make_base.Recipe(tokenizer_demonstrations=200))
    assert tasks.sha256("".join(texts)) == record["first_200_demonstrations_sha256"]


def test_the_base_model_and_its_renderer_load(splits: dict[tasks.Split, list[tasks.Task]]) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    import make_base

    model = transformers.AutoModelForCausalLM.from_pretrained(EXAMPLE / "base", dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(EXAMPLE / "base")
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert model.config.vocab_size == len(tokenizer)
    renderer = make_base.make_renderer(tokenizer)
    assert renderer.get_stop_token_ids() == tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])

    habits = demonstrations.Habits(right_operator=0.5, right_function=0.8, lazy=0.2, slip=0.5)
    rng = random.Random(0)
    for task in splits["train"][:30]:
        episode, replies = demonstrations.demonstrate(task, rng, habits)
        example = make_base.encode(tokenizer, renderer, episode, replies)
        for end in [i for i, m in enumerate(episode.messages) if m["role"] == "assistant"]:
            prompt = renderer.render_ids(episode.messages[:end], add_generation_prompt=True)
            assert example.ids[: len(prompt)] == prompt
            text = tokenizer.apply_chat_template(episode.messages[:end], add_generation_prompt=True, tokenize=False)
            assert tokenizer.encode(text, add_special_tokens=False) == prompt
        trained = [i for i, m in zip(example.ids, example.mask, strict=True) if m]
        replied = "".join(f"{r.text}<|im_end|>" for r in replies if r.trained)
        assert tokenizer.decode(trained) == replied
