"""The whole objective of a micro-batch from log-probs, and the sums that its metrics are made of."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from leyden.algorithms.corrections import truncated_correction
from leyden.algorithms.losses import k3_kl, log_ratio, ppo_clip
from leyden.config import AlgorithmConfig


@dataclass(frozen=True, slots=True, eq=False)
class Objective:
    """`loss` is a scalar, to be summed over micro-batches. `sums` are sums over tokens (divide by `tokens`)."""

    loss: Tensor
    tokens: int
    sums: dict[str, float]
    max_logprob_diff: float


def objective(
    logprobs_T: Tensor,
    entropy_T: Tensor,
    *,
    old_T: Tensor,
    rollout_T: Tensor,
    advantage_T: Tensor,
    weight_T: Tensor,
    reference_T: Tensor | None,
    config: AlgorithmConfig,
) -> Objective:
    """Loss = sum over tokens of  w (correction * policy loss + kl_coef * KL - entropy_coef * entropy).

    `logprobs_T` are of the policy that is differentiated, `old_T` of the policy at the start of the step
    (pi_old), `rollout_T` as recorded (mu; NaN if missing), `reference_T` of the KL's reference, all at the
    sampling temperature. Ratio = pi / pi_old; correction = pi_old / mu, truncated. Only trained tokens enter,
    so context (tool output, templates) has neither policy loss nor KL nor entropy.

    Worked example: one token, pi = pi_old = mu, A = 2, w = 0.5 gives loss -1.
    """
    old_T = old_T.detach()
    correction = truncated_correction(old_T, rollout_T, config.correction_clip)
    clipped = ppo_clip(log_ratio(logprobs_T, old_T), advantage_T, config.clip_low, config.clip_high, config.dual_clip)
    per_token_T = correction.weights_T * clipped.loss_T
    kl_T = k3_kl(logprobs_T, reference_T) if reference_T is not None else torch.zeros_like(logprobs_T)
    if config.kl_coef > 0:
        per_token_T = per_token_T + config.kl_coef * kl_T
    if config.entropy_coef > 0:
        per_token_T = per_token_T - config.entropy_coef * entropy_T
    recorded_T = ~correction.missing_T
    diff_T = log_ratio(old_T[recorded_T], rollout_T[recorded_T])
    sums = {
        "entropy": entropy_T,
        "kl_reference": kl_T,
        "kl_rollout": k3_kl(rollout_T[recorded_T], old_T[recorded_T]),
        "logprob_diff": diff_T.abs(),
        "clip_low": clipped.low_T,
        "clip_high": clipped.high_T,
        "clip_dual": clipped.dual_T,
        "correction": correction.weights_T,
        "correction_clipped": correction.clipped_T,
        "missing_logprobs": correction.missing_T,
    }
    return Objective(
        loss=(weight_T * per_token_T).sum(),
        tokens=len(logprobs_T),
        sums={name: float(value.detach().double().sum()) for name, value in sums.items()},
        max_logprob_diff=float(diff_T.abs().max()) if len(diff_T) else 0.0,
    )
