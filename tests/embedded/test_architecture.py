"""What config.json says of a model's size: parameters of known models, and the sum that a run is refused by."""

from __future__ import annotations

import pytest

from leyden.run_file import parse
from leyden.trainer.embedded.architecture import GIB, arithmetic, needs, parameters

QWEN3_06B = {
    "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 3072, "vocab_size": 151936, "tie_word_embeddings": True,
}  # fmt: skip
SMOLLM2_135M = {
    "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
    "intermediate_size": 1536, "vocab_size": 49152, "tie_word_embeddings": True,
}  # fmt: skip
LLAMA_3_8B = {
    "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 14336, "vocab_size": 128256, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("model", "published"), [(QWEN3_06B, 596_049_920), (SMOLLM2_135M, 134_515_008), (LLAMA_3_8B, 8_030_261_248)]
)
def test_parameters_of_models_whose_number_is_published(model, published):
    assert parameters(model) == pytest.approx(published, rel=1e-4)
    assert parameters({"text_config": model}) == parameters(model)


def test_the_key_value_cache_of_a_long_context_is_the_largest_part():
    """32 slots x 8 heads x 32,769 tokens x 128 x 4 bytes x 2 (keys, values) x 28 layers."""
    config = parse(
        {
            "run_dir": "r", "model": {"path": "m", "context_tokens": 32768}, "data": {"train": "t"},
            "harness": {"command": ["a"]}, "grader": {"function": "a:b"}, "algorithm": {"kl_coef": 0.1},
        }
    )  # fmt: skip
    sizes = config.embedded, config.model.context_tokens
    parts = needs(QWEN3_06B, *sizes, reference=True)
    words = arithmetic(parts, *sizes)
    assert parts["key-value cache"] == 32 * 8 * 32769 * 128 * 4 * 2 * 28 == 240_525_508_608
    assert parts["AdamW"] == parts["weights, twice"] == 2 * parts["gradients"] == 2 * parts["reference model"]
    assert words.startswith(f"{sum(parts.values()) / GIB:.1f} GiB = weights, twice 4.4 + ")
    assert "embedded.slots 32, model.context_tokens 32768, embedded.micro_batch_tokens 8192" in words


def test_the_real_number_of_weights(tiny_model_path):
    from leyden.model_files import architecture
    from leyden.trainer.embedded.hub import load_model

    weights = sum(p.numel() for p in load_model(str(tiny_model_path)).parameters())
    assert parameters(architecture(str(tiny_model_path))) == pytest.approx(weights, rel=0.02)
