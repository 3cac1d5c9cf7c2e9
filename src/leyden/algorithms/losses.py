"""Per-token losses. All inputs and outputs are flat over the trained tokens of a micro-batch, shape [T]."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0


@dataclass(frozen=True, slots=True, eq=False)
class ClippedLoss:
    """`loss_T` carries the gradient; the masks say where the clip decided, so that its gradient is zero there."""

    loss_T: Tensor
    low_T: Tensor
    high_T: Tensor
    dual_T: Tensor


def token_logprobs(
    logits_TV: Tensor, ids_T: Tensor, temperature: float, *, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """Log-probs of `ids_T` and entropies of softmax(logits / temperature), both [T], in at least float32.

    A logit may be -inf: that token cannot be sampled and adds nothing to the entropy (0 log 0 = 0).

    >>> logits_TV = torch.tensor([[2.0, 1.0, 0.0]])
    >>> logprobs, entropy = token_logprobs(logits_TV, torch.tensor([0]), temperature=0.5)
    >>> round(logprobs.item(), 4)
    -0.1429
    """
    dtype = torch.promote_types(logits_TV.dtype, torch.float32)
    shifted_TV = logits_TV.to(dtype) - logits_TV.detach().amax(
        dim=-1, keepdim=True
    )  # a quotient cannot overflow to inf
    all_TV = torch.log_softmax(shifted_TV / temperature, dim=-1)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropy_T = -(all_TV.exp() * all_TV.masked_fill(all_TV == -torch.inf, 0.0)).sum(dim=-1)
    return all_TV.gather(1, ids_T[:, None])[:, 0], entropy_T


def log_ratio(over_T: Tensor, under_T: Tensor) -> Tensor:
    """Difference of log-probs within +-LOG_RATIO_LIMIT. A token that is impossible under both has the ratio 1."""
    both_T = (over_T == -torch.inf) & (under_T == -torch.inf)
    difference_T = torch.where(both_T, 0.0, over_T) - torch.where(both_T, 0.0, under_T)
    return difference_T.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def ppo_clip(
    log_ratio_T: Tensor, advantage_T: Tensor, clip_low: float, clip_high: float, dual_clip: float
) -> ClippedLoss:
    """Clipped surrogate loss of each token, to be minimised.

    With r = exp(log-ratio), A the advantage:  L = max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A)
    (Schulman et al. 2017, arXiv:1707.06347; asymmetric: Yu et al. 2025, arXiv:2503.14476), and for A < 0
    L = min(L, -dual_clip A) (Ye et al. 2020, arXiv:1912.09729). The log-ratio is clamped to +-20 before exp.

    >>> r = torch.tensor([1.0, 1.5, 0.5, 5.0])
    >>> ppo_clip(r.log(), torch.tensor([1.0, 1.0, -1.0, -1.0]), 0.2, 0.2, 3.0).loss_T.tolist()
    [-1.0, -1.2000000476837158, 0.800000011920929, 3.0]
    """
    ratio_T = log_ratio_T.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    plain_T = -advantage_T * ratio_T
    bounded_T = -advantage_T * ratio_T.clamp(1 - clip_low, 1 + clip_high)
    loss_T = torch.maximum(plain_T, bounded_T)
    negative_T = advantage_T < 0
    loss_T = torch.where(negative_T, torch.minimum(loss_T, -dual_clip * advantage_T), loss_T)
    return ClippedLoss(
        loss_T,
        low_T=negative_T & (ratio_T.detach() < 1 - clip_low),
        high_T=(advantage_T > 0) & (ratio_T.detach() > 1 + clip_high),
        dual_T=negative_T & (ratio_T.detach() > dual_clip),
    )


def k3_kl(logprobs_T: Tensor, reference_T: Tensor) -> Tensor:
    """Estimate of KL(pi || reference) at tokens sampled from pi: q - 1 - log q with q = reference / pi. Never negative.

    The estimator k3 of Schulman 2020, "Approximating KL divergence" (joschu.net/blog/kl-approx.html).

    >>> k3_kl(torch.tensor([-1.0]), torch.tensor([-2.0])).item()  # e^-1 - 1 + 1
    0.3678794503211975
    """
    log_q_T = log_ratio(reference_T, logprobs_T)
    return torch.expm1(log_q_T) - log_q_T
