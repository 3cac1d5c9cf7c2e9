"""A random Qwen3 that vLLM can run on CPU, and what Hugging Face says of the same ids."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from tests.tiny_model import make_tokenizer

TEMPLATE = Path(__file__).with_name("qwen3.jinja")
CONTEXT_TOKENS = 2048


def make_model(folder: Path, seed: int) -> Path:
    """A model folder. Its generation_config.json asks for a distribution of its own, which nobody may sample from.

    One coordinate of the hidden state is about the same everywhere; by it a stop token is one of some thousand tokens.
    The output layer has weights of its own: where it shares the embedding's, vLLM on CPU does not reload it.
    """
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder)
    shutil.copy(TEMPLATE, folder / "chat_template.jinja")
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=32,
            max_position_embeddings=CONTEXT_TOKENS,
            tie_word_embeddings=False,
            initializer_range=0.1,
            pad_token_id=0,
            eos_token_id=2,
        )
    )
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 1.0
        model.lm_head.weight[:, 0] = 0.0
        model.lm_head.weight[tokenizer.eos_token_id, 0] = -0.5
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=0.3, top_k=3, top_p=0.5, repetition_penalty=1.5, eos_token_id=2, pad_token_id=0
    )
    model.save_pretrained(folder)
    return folder


class Reference:
    """Log-probs by a forward pass in float32."""

    def __init__(self, folder: Path) -> None:
        self._model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def logprobs(
        self,
        before: Sequence[int],
        sampled: Sequence[int],
        *,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
    ) -> list[float]:
        """Of each of `sampled` after `before`, under the distribution that is sampled from."""
        ids = torch.tensor([[*before, *sampled]])
        with torch.no_grad():
            logits_TV = self._model(ids).logits[0, len(before) - 1 : -1].float() / temperature
        if top_k:
            lowest_T1 = logits_TV.topk(top_k).values[:, -1:]
            logits_TV = logits_TV.masked_fill(logits_TV < lowest_T1, -torch.inf)
        if top_p < 1:
            ordered_TV, order_TV = logits_TV.sort(descending=True)
            probs_TV = ordered_TV.softmax(-1)
            dropped_TV = probs_TV.cumsum(-1) - probs_TV >= top_p
            logits_TV = logits_TV.masked_fill(dropped_TV.gather(1, order_TV.argsort(-1)), -torch.inf)
        chosen_T = logits_TV.log_softmax(-1).gather(1, torch.tensor(list(sampled))[:, None])[:, 0]
        return [float(value) for value in chosen_T]
