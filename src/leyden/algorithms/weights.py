"""How much each trained token counts: fixed per rollout before anything is split, so no split changes a gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

WeightMethod = Literal["rollout_mean", "token_mean", "constant"]


def token_weights(
    trained_tokens: Sequence[int], method: WeightMethod, constant_tokens: int | None = None
) -> NDArray[np.float64]:
    """Weight of every trained token of each rollout of one optimizer step, float64, shape [R].

    With T_r trained tokens in rollout r and N rollouts that have at least one (zero advantage included):

    rollout_mean  1 / (N T_r)   every rollout counts the same, whatever its length
    token_mean    1 / sum T_r   every token counts the same
    constant      1 / (N C)     every token counts the same and length is not divided out (C =
    `constant_tokens`)

    A rollout without a trained token gets 0 and is not counted in N.

    >>> token_weights([2, 8, 0], "rollout_mean").tolist()
    [0.25, 0.0625, 0.0]
    >>> token_weights([2, 8, 0], "token_mean").tolist()
    [0.1, 0.1, 0.0]
    >>> token_weights([2, 8, 0], "constant", 10).tolist()
    [0.05, 0.05, 0.0]
    """
    tokens_R = np.asarray(trained_tokens, dtype=np.float64)
    has_tokens_R = tokens_R > 0
    if not has_tokens_R.any():
        return np.zeros_like(tokens_R)
    rollouts = has_tokens_R.sum()
    if method == "rollout_mean":
        return np.where(has_tokens_R, 1.0 / (rollouts * np.maximum(tokens_R, 1)), 0.0)
    if method == "token_mean":
        return np.where(has_tokens_R, 1.0 / tokens_R.sum(), 0.0)
    if constant_tokens is None:
        raise ValueError("weights: constant needs constant_tokens, the C of 1/(N C)")
    return np.where(has_tokens_R, 1.0 / (rollouts * constant_tokens), 0.0)
