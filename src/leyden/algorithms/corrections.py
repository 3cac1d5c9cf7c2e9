"""Weight of tokens that were sampled by another policy than the one that the step starts from."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from leyden.algorithms.losses import log_ratio


@dataclass(frozen=True, slots=True, eq=False)
class Correction:
    """`weights_T` in (0, clip], detached. `missing_T`: no finite recorded log-prob. `clipped_T`: truncated."""

    weights_T: Tensor
    missing_T: Tensor
    clipped_T: Tensor


def truncated_correction(old_logprobs_T: Tensor, rollout_logprobs_T: Tensor, clip: float) -> Correction:
    """Truncated importance weight min(pi_old / mu, clip) of each token.

    pi_old is the trainer's recomputation at the start of the step, mu the recorded log-prob, both of the same
    tempered distribution. A token whose mu is missing (NaN) or infinite gets weight 1. (Truncated importance
    sampling: Ionides 2008; for rollouts of another engine: Yao et al. 2025, "Your efficient RL framework
    secretly brings you off-policy RL training".)

    >>> old, mu = torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([-1.0, -3.0, math.nan])
    >>> truncated_correction(old, mu, clip=2.0).weights_T.tolist()
    [1.0, 2.0, 1.0]
    """
    old_logprobs_T = old_logprobs_T.detach()
    missing_T = ~torch.isfinite(rollout_logprobs_T)
    log_weight_T = log_ratio(old_logprobs_T, torch.where(missing_T, old_logprobs_T, rollout_logprobs_T))
    clipped_T = log_weight_T > math.log(clip)
    weights_T = log_weight_T.clamp(max=math.log(clip)).exp()
    return Correction(torch.where(missing_T, 1.0, weights_T), missing_T, clipped_T & ~missing_T)
