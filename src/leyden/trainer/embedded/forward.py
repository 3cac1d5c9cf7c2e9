"""The trainer's forward pass: log-probs and entropies of the trained tokens of a padded micro-batch."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from leyden.algorithms.losses import token_logprobs
from leyden.algorithms.padding import PaddedSamples


def trained_logprobs(
    model: Any, padded: PaddedSamples, temperature: float, *, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """(logprobs_T, entropy_T) of softmax(logits / temperature) at the trained tokens, log-probs with gradient.

    The model sees every token of a sample, context included. Rows are padded on the right, where a causal model
    does not look, so there is no mask. Logits are made only at columns where some row has a trained token.
    """
    before_T = padded.column_T - 1
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        logits_BLV = model(input_ids=padded.ids_BL, use_cache=False).logits
        logits_TV = logits_BLV[padded.row_T, before_T]
        return token_logprobs(logits_TV, padded.targets_T, temperature, entropy_gradient=entropy_gradient)
    kept_K, index_T = torch.unique(before_T, return_inverse=True)
    logits_BKV = model(input_ids=padded.ids_BL, use_cache=False, logits_to_keep=kept_K).logits
    logits_TV = logits_BKV[padded.row_T, index_T]
    return token_logprobs(logits_TV, padded.targets_T, temperature, entropy_gradient=entropy_gradient)
