"""What an update reports, added up over its micro-batches and optimizer steps."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from leyden.algorithms.objective import Objective


@dataclass(frozen=True, slots=True)
class UpdateMetrics:
    """Of one update. Fractions, entropy and KL are means over the trained tokens that were computed; `loss` and
    `grad_norm` (before clipping) are means over optimizer steps. Samples without a gradient are skipped and are in
    no mean. `max_logprob_diff` is max |pi_old - recorded| over tokens with a recorded log-prob, at most 20.
    `kl_rollout` estimates KL(rollout policy || pi_old), `kl_reference` KL(policy || initial policy).
    """

    loss: float
    grad_norm: float
    lr: float
    entropy: float
    kl_rollout: float
    kl_reference: float
    mean_logprob_diff: float
    max_logprob_diff: float
    clip_low: float
    clip_high: float
    clip_dual: float
    correction: float
    correction_clipped: float
    missing_logprobs: int
    tokens: int
    samples: int
    samples_skipped: int
    optimizer_steps: int
    optimizer_steps_skipped: int


MEANS = ("entropy", "kl_reference", "clip_low", "clip_high", "clip_dual", "correction_clipped")


class Tally:
    """Adds up an update's metrics."""

    def __init__(self) -> None:
        self._sums: Counter[str] = Counter()
        self._tokens = self._samples = self._steps = 0
        self._loss = self._grad_norm = self._max_diff = 0.0
        self.steps_skipped = 0

    def add(self, result: Objective, samples: int) -> None:
        self._sums.update(result.sums)
        self._tokens += result.tokens
        self._samples += samples
        self._max_diff = max(self._max_diff, result.max_logprob_diff)

    def step(self, loss: float, grad_norm: float) -> None:
        self._steps += 1
        self._loss += loss
        self._grad_norm += grad_norm

    def metrics(self, *, lr: float, samples: int) -> UpdateMetrics:
        """`samples` are all of the update, with the skipped ones."""
        sums, tokens, steps = self._sums, max(1, self._tokens), max(1, self._steps)
        missing = int(sums["missing_logprobs"])
        recorded = max(1, self._tokens - missing)
        return UpdateMetrics(
            loss=self._loss / steps,
            grad_norm=self._grad_norm / steps,
            lr=lr,
            kl_rollout=sums["kl_rollout"] / recorded,
            mean_logprob_diff=sums["logprob_diff"] / recorded,
            max_logprob_diff=self._max_diff,
            correction=sums["correction"] / tokens if self._tokens else 1.0,
            missing_logprobs=missing,
            tokens=self._tokens,
            samples=self._samples,
            samples_skipped=samples - self._samples,
            optimizer_steps=self._steps,
            optimizer_steps_skipped=self.steps_skipped,
            **{name: sums[name] / tokens for name in MEANS},
        )
