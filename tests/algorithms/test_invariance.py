"""The gradient depends on rollouts and weights, never on how their tokens are spread over samples and
batches.
"""

import numpy as np
import pytest
import torch

from leyden.algorithms.batch import (
    GroupResult,
    RolloutResult,
    build_batch,
    micro_batches,
    mini_batches,
    needs_forward,
)
from leyden.algorithms.losses import token_logprobs
from leyden.algorithms.objective import objective
from leyden.algorithms.padding import pad
from leyden.config import AlgorithmConfig
from leyden.types import Sample

VOCABULARY = 11


class TinyCausal(torch.nn.Module):
    """float64 model whose logits at a position depend on all earlier ids (a running mean)."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(VOCABULARY, 6)
        self.head = torch.nn.Linear(6, VOCABULARY)
        self.double()

    def forward(self, ids_BL):
        hidden = self.embed(ids_BL)
        steps = torch.arange(1, ids_BL.shape[1] + 1)[None, :, None]
        return self.head(torch.tanh(hidden.cumsum(1) / steps))


def conversation(seed, length, trained, rollout_id):
    rng = np.random.default_rng(seed)
    mask_L = np.zeros(length, np.bool_)
    mask_L[list(trained)] = True
    logprobs = np.where(mask_L, rng.normal(-2, 0.5, length), 0).astype(np.float32)
    return Sample(rollout_id, rng.integers(0, VOCABULARY, length).astype(np.int32), mask_L, logprobs, (1,))


def split(sample, at):
    """The same tokens trained in two samples: a prefix, and the whole with the prefix as context."""
    first = Sample(sample.rollout_id, sample.ids_L[:at], sample.mask_L[:at], sample.logprobs_L[:at], (1,))
    later_L = np.where(np.arange(len(sample.ids_L)) >= at, sample.mask_L, False)
    second = Sample(
        sample.rollout_id,
        sample.ids_L,
        later_L,
        np.where(later_L, sample.logprobs_L, 0).astype(np.float32),
        (1, 2),
    )
    return (first, second)


def groups(*, splitted=False, extra=()):
    samples = [
        conversation(1, 12, (3, 4, 5, 9, 10), "a"),
        conversation(2, 7, (2, 6), "b"),
        conversation(3, 9, (4, 5, 6, 7, 8), "c"),
    ]
    parts = [split(samples[0], 6), (samples[1],), split(samples[2], 6)] if splitted else [(s,) for s in samples]
    rewards = [1.0, 0.0, 0.25]
    rollouts = tuple(RolloutResult(s.rollout_id, r, p) for s, r, p in zip(samples, rewards, parts, strict=True))
    return [GroupResult("g", rollouts + tuple(extra))]


def gradient(groups, config, max_tokens=10_000, skip=True):
    model = TinyCausal()
    (mini,) = mini_batches(build_batch(groups, config), 1, np.random.default_rng(0))
    kept = [s for s in mini if not skip or needs_forward(s, config)]
    passes = 0
    for micro in micro_batches(kept, max_tokens):
        p = pad(micro)
        logits_TV = model(p.ids_BL)[p.row_T, p.column_T - 1]
        logprobs_T, entropy_T = token_logprobs(logits_TV, p.targets_T, 0.7, entropy_gradient=True)
        reference_T = logprobs_T.detach() - 0.1 if config.kl_coef else None
        objective(
            logprobs_T,
            entropy_T,
            old_T=logprobs_T.detach(),
            rollout_T=p.logprobs_T,
            advantage_T=p.advantage_T,
            weight_T=p.weight_T,
            reference_T=reference_T,
            config=config,
        ).loss.backward()
        passes += 1
    return torch.cat([q.grad.flatten() for q in model.parameters()]), passes


CONFIGS = [
    AlgorithmConfig(),
    AlgorithmConfig(weights="token_mean", advantage="rloo"),
    AlgorithmConfig(weights="constant", constant_tokens=20, kl_coef=0.1, entropy_coef=0.05),
]


@pytest.mark.parametrize("config", CONFIGS)
def test_splitting_rollouts_into_more_samples_changes_nothing(config):
    whole, _ = gradient(groups(), config)
    parts, _ = gradient(groups(splitted=True), config)
    assert whole.abs().max() > 1e-3
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-12)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("max_tokens", [1, 12, 24])
def test_micro_batches_change_nothing(config, max_tokens):
    """Neither do the padding rows and columns that come with them."""
    whole, one = gradient(groups(), config)
    parts, several = gradient(groups(), config, max_tokens=max_tokens)
    assert several > one
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-12)


def test_skipping_zero_advantage_changes_nothing():
    flat = [
        GroupResult(
            "flat",
            tuple(RolloutResult(n, 0.5, (conversation(9, 8, (3, 4), n),)) for n in ("x", "y")),
        )
    ]
    skipped, _ = gradient(groups() + flat, AlgorithmConfig())
    computed, _ = gradient(groups() + flat, AlgorithmConfig(), skip=False)
    torch.testing.assert_close(skipped, computed, rtol=0, atol=1e-12)
    without, _ = gradient(groups(), AlgorithmConfig())
    torch.testing.assert_close(skipped, without * 3 / 5, rtol=0, atol=1e-12)  # N = 5 instead of 3


def test_context_tokens_have_no_kl_and_no_entropy():
    """Only trained tokens enter; the context is still attended to."""
    config = AlgorithmConfig(kl_coef=1.0, entropy_coef=1.0)
    sample = conversation(4, 6, (2, 5), "a")
    p = pad(build_batch([GroupResult("g", (RolloutResult("a", 1.0, (sample,)),))], config).samples)
    model = TinyCausal()
    logits = model(p.ids_BL)
    logits.retain_grad()
    logprobs_T, entropy_T = token_logprobs(logits[p.row_T, p.column_T - 1], p.targets_T, 1.0, entropy_gradient=True)
    result = objective(
        logprobs_T,
        entropy_T,
        old_T=logprobs_T,
        rollout_T=p.logprobs_T,
        advantage_T=p.advantage_T,
        weight_T=p.weight_T,
        reference_T=logprobs_T.detach() - 1,
        config=config,
    )
    result.loss.backward()
    assert result.tokens == 2
    assert (logits.grad[0].abs().sum(-1) > 0).tolist() == [False, True, False, False, True, False]
