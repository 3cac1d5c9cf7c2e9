"""Hugging Face model folders: loading, and what the embedded backend can run."""

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


def check_supported(config: Any, context_tokens: int) -> None:
    """Raises ConfigError for a model whose attention the slot cache cannot hold, or a context it was not made
    for.
    """
    config = config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and context_tokens > limit:
        raise ConfigError("model.context_tokens", f"{context_tokens} is over the model's {limit} positions")
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None)
    slides = "sliding_attention" in kinds or (window is not None and not hasattr(config, "layer_types"))
    unknown = kinds - {"full_attention", "sliding_attention"}
    if unknown or (slides and (window is None or window < context_tokens)):
        raise ConfigError(
            "model.path",
            f"layers of kind {sorted(unknown) or 'sliding_attention'} (window {window}) are not supported by the "
            f"embedded sampler at context_tokens {context_tokens}; full attention is",
        )
