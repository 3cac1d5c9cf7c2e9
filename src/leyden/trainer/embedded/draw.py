"""From logits to a token and its exact log-prob under the distribution that it was drawn from."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def sample(
    logits_BV: Tensor,
    uniforms_B: Sequence[float],
    temperatures_B: Sequence[float],
    top_ps_B: Sequence[float],
    top_ks_B: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """Draw one token per row; returns (tokens_B, logprobs_B float32).

    Temperature first, then top-k (0: off), then top-p on what is left, renormalised: the order of vLLM and of
    transformers. Temperature 0 takes the most likely token, with log-prob 0: a point mass. The draw inverts
    the cumulative distribution at `uniforms_B` in [0, 1), in float64, so that a request's tokens depend on
    its own random numbers and never on its neighbours. A row that holds NaN gives log-prob NaN.

    Worked example: probabilities [0.5, 0.3, 0.2], u = 0.79 draws token 1; with top_p 0.6 the distribution is
    [0.625, 0.375, 0], and its log-prob is log 0.375.
    """
    logits_BV = tempered(logits_BV, temperatures_B)
    truncated = [b for b, (k, p) in enumerate(zip(top_ks_B, top_ps_B, strict=True)) if k > 0 or p < 1]
    if truncated:
        rows = torch.tensor(truncated, device=logits_BV.device)
        logits_BV[rows] = truncate(logits_BV[rows], [top_ps_B[b] for b in truncated], [top_ks_B[b] for b in truncated])
    logprobs_BV = torch.log_softmax(logits_BV, dim=-1)
    cumulative_BV = logprobs_BV.double().exp_().cumsum_(dim=-1)
    uniforms = torch.tensor(uniforms_B, dtype=torch.float64, device=logits_BV.device)
    points_B1 = uniforms[:, None] * cumulative_BV[:, -1:]
    tokens_B1 = torch.searchsorted(cumulative_BV, points_B1, right=True)
    tokens_B1.clamp_(max=logits_BV.shape[-1] - 1)
    return tokens_B1[:, 0], logprobs_BV.gather(1, tokens_B1)[:, 0]


def tempered(logits_BV: Tensor, temperatures_B: Sequence[float]) -> Tensor:
    """logits / temperature in float32, as a new tensor; for temperature 0 everything but the maximum is -inf."""
    divisors = torch.tensor([t or 1.0 for t in temperatures_B], device=logits_BV.device)
    scaled_BV = logits_BV.float() / divisors[:, None]
    greedy = [b for b, t in enumerate(temperatures_B) if t == 0]
    if greedy:
        best = scaled_BV[greedy].argmax(dim=-1, keepdim=True)
        scaled_BV[greedy] = torch.full_like(scaled_BV[greedy], -torch.inf).scatter_(1, best, 0.0)
    return scaled_BV


def truncate(logits_BV: Tensor, top_ps_B: Sequence[float], top_ks_B: Sequence[int]) -> Tensor:
    """-inf outside the top-k, then outside the smallest set whose probability reaches top-p."""
    vocabulary = logits_BV.shape[-1]
    device = logits_BV.device
    sorted_BV, order_BV = logits_BV.sort(dim=-1, descending=True, stable=True)
    kept_B1 = torch.tensor([k or vocabulary for k in top_ks_B], device=device)[:, None]
    sorted_BV = sorted_BV.masked_fill(torch.arange(vocabulary, device=device) >= kept_B1, -torch.inf)
    probabilities_BV = torch.softmax(sorted_BV, dim=-1)
    before_BV = probabilities_BV.cumsum(dim=-1) - probabilities_BV
    limits_B1 = torch.tensor(top_ps_B, device=device)[:, None]
    outside_BV = (before_BV >= limits_B1) & (limits_B1 < 1)
    outside_BV[:, 0] = False
    sorted_BV = sorted_BV.masked_fill(outside_BV, -torch.inf)
    return torch.full_like(logits_BV, -torch.inf).scatter(1, order_BV, sorted_BV)
