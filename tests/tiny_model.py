"""A tiny Qwen3-architecture model with a byte-level tokenizer, made in a second: what tests sample from.

The tokenizer has one token per byte and some merges, so that most texts have several tokenisations.
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
TEXT = "system user assistant tool the quick brown fox jumps over the lazy dog bash command echo hi name arguments "
CONFIG = Qwen3Config(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    max_position_embeddings=2048,
    tie_word_embeddings=True,
    pad_token_id=0,
    eos_token_id=2,
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 4, trainer)
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKS])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")


def make_tiny_model(folder: Path, *, weights: bool = True) -> Path:
    """A Hugging Face model folder; without `weights` it holds the tokenizer and the configuration only."""
    tokenizer = make_tokenizer()
    CONFIG.vocab_size = len(tokenizer)
    tokenizer.save_pretrained(folder)
    if weights:
        import torch
        from transformers import Qwen3ForCausalLM

        torch.manual_seed(0)
        Qwen3ForCausalLM(CONFIG).save_pretrained(folder)
    else:
        CONFIG.save_pretrained(folder)
    return folder
