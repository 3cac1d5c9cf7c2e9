"""What a model's config.json tells of it: whether the embedded backend can run it, and what that takes in memory.

Everything is float32 (4 bytes). Parameters are counted as in Llama and its kin: grouped-query attention, a gated MLP or
its experts, two norms a layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from leyden.config import EmbeddedConfig
from leyden.errors import ConfigError

FLOAT = 4
GIB = 2**30


def parameters(architecture: Mapping[str, Any]) -> int:
    """The number of weights, as far as config.json tells."""
    a = _Shape(architecture)
    attention = 2 * a.hidden * a.heads * a.head_size + 2 * a.hidden * a.kv_heads * a.head_size
    mlp = 3 * a.hidden * a.intermediate * a.experts
    embeddings = a.vocabulary * a.hidden * (1 if a.tied else 2)
    return embeddings + a.layers * (attention + mlp + 2 * a.hidden) + a.hidden


def needs(
    architecture: Mapping[str, Any], embedded: EmbeddedConfig, context_tokens: int, *, reference: bool = False
) -> dict[str, int]:
    """Bytes by part: weights of trainer and sampler, gradients, AdamW's two moments, the key-value cache (slots x
    context x layers x key-value heads x head size x 2), one micro-batch of the update (activations, logits thrice),
    and the `reference` model of the KL.
    """
    a, weights = _Shape(architecture), FLOAT * parameters(architecture)
    batch = max(embedded.micro_batch_tokens, 1)
    per_layer = 8 * a.hidden + 2 * (a.heads + 2 * a.kv_heads) * a.head_size + 4 * a.intermediate
    parts = {
        "weights, twice": 2 * weights,
        "gradients": weights,
        "AdamW": 2 * weights,
        "key-value cache": FLOAT * 2 * embedded.slots * (context_tokens + 1) * a.layers * a.kv_heads * a.head_size,
        "one micro-batch": FLOAT * batch * (a.layers * per_layer + 3 * a.vocabulary),
    }
    return parts | ({"reference model": weights} if reference else {})


def arithmetic(parts: Mapping[str, int], embedded: EmbeddedConfig, context_tokens: int) -> str:
    """The sum in words: `7.3 GiB = weights, twice 4.4 + ...`, with the keys that change it."""
    total = sum(parts.values())
    shown = " + ".join(f"{name} {size / GIB:.1f}" for name, size in parts.items())
    return (
        f"{total / GIB:.1f} GiB = {shown} (embedded.slots {embedded.slots}, model.context_tokens "
        f"{context_tokens}, embedded.micro_batch_tokens {embedded.micro_batch_tokens})"
    )


def check_supported(architecture: Mapping[str, Any], context_tokens: int) -> None:
    """Raises ConfigError for a model whose attention the slot cache cannot hold, or a context it was not made for."""
    text = text_part(architecture)
    limit = text.get("max_position_embeddings")
    if limit is not None and context_tokens > limit:
        raise ConfigError("model.context_tokens", f"{context_tokens} is over the model's {limit} positions")
    kinds = set(text.get("layer_types") or ["full_attention"])
    window = text.get("sliding_window")
    slides = "sliding_attention" in kinds or (window is not None and "layer_types" not in text)
    unknown = kinds - {"full_attention", "sliding_attention"}
    if unknown or (slides and (window is None or window < context_tokens)):
        raise ConfigError(
            "model.path",
            f"layers of kind {sorted(unknown) or 'sliding_attention'} (window {window}) are not supported by the "
            f"embedded sampler at context_tokens {context_tokens}; full attention is",
        )


def text_part(architecture: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of a model with several parts, the language model's."""
    text = architecture.get("text_config")
    return text if isinstance(text, Mapping) else architecture


class _Shape:
    """The sizes in a config.json; 0 is unknown."""

    def __init__(self, architecture: Mapping[str, Any]) -> None:
        found = text_part(architecture)

        def size(*names: str, default: int = 0) -> int:
            return next((value for n in names if isinstance(value := found.get(n), int)), default)

        self.hidden = size("hidden_size", "n_embd", "d_model")
        self.layers = size("num_hidden_layers", "n_layer", "num_layers")
        self.heads = size("num_attention_heads", "n_head", default=1)
        self.kv_heads = size("num_key_value_heads", default=self.heads)
        self.head_size = size("head_dim", default=self.hidden // max(self.heads, 1))
        self.experts = max(size("num_experts", "num_local_experts", "n_routed_experts", default=1), 1)
        dense = size("intermediate_size", "n_inner", default=4 * self.hidden)
        self.intermediate = size("moe_intermediate_size", default=dense) if self.experts > 1 else dense
        self.vocabulary = size("vocab_size")
        self.tied = bool(found.get("tie_word_embeddings", architecture.get("tie_word_embeddings", True)))
