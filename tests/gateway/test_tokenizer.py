"""The gateway's tokenizer against Hugging Face's own, and what the gateway does not load."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from leyden.errors import ConfigError
from leyden.gateway.render import ModelRenderer
from leyden.gateway.tokenizer import load

TEXTS = [
    "",
    "the quick brown fox",
    "<think>\nhm\n</think>\n\n<tool_call>",
    "é 好🙂 \n\t x",
    "<|im_start|>user\nhi<|im_end|>",
]


def test_ids_and_texts_are_those_of_transformers(tokenizer_path: Path) -> None:
    ours, theirs = load(str(tokenizer_path)), AutoTokenizer.from_pretrained(tokenizer_path)
    for text in TEXTS:
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)
    rng = random.Random(0)
    for _ in range(50):
        ids = [rng.randrange(len(theirs)) for _ in range(20)]
        for skip in (False, True):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert ours.eos_token_id == theirs.eos_token_id
    assert ours.convert_tokens_to_ids(["<|im_end|>", "</think>"]) == theirs.convert_tokens_to_ids(
        ["<|im_end|>", "</think>"]
    )


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.path: .* has no tokenizer\.json"):
        load(str(tmp_path))


def test_an_unknown_renderer_is_named(tokenizer_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.renderer: 'qwen33' is refused"):
        ModelRenderer(str(tokenizer_path), "qwen33", "template")


def test_the_gateway_loads_neither_torch_nor_transformers(tokenizer_path: Path) -> None:
    code = (
        "import sys; import leyden.gateway.app; from leyden.gateway.render import ModelRenderer; "
        f"ModelRenderer({str(tokenizer_path)!r}, 'qwen3', 'template'); "
        "print(' '.join(m for m in ('torch', 'transformers') if m in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "")
