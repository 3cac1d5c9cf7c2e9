"""Hugging Face model folders: loading."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from leyden.errors import ConfigError


def load(path: str) -> tuple[Any, Any]:
    """(model, tokenizer) on the CPU. Weights stored in bfloat16 are cast up: an update of 1e-6 would vanish in them."""
    from transformers import AutoTokenizer

    try:
        return load_model(path), AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            "model.path", f"{path!r} cannot be loaded as a causal LM with a tokenizer: {error}"
        ) from error


def load_model(path: str) -> Any:
    """The model in float32, with dropout off. Raises OSError, ValueError."""
    from transformers import AutoModelForCausalLM

    with quiet():
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa").eval()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' progress bars, which would tear up the trainer's own line."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
