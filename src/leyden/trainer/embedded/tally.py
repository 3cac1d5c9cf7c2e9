"""What an update reports, added up over its micro-batches and optimizer steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from leyden.algorithms.objective import Objective

ProgressCallback = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class UpdateMetrics:
    """Of one update. Fractions, entropy and KL are means over the trained tokens that were computed; `loss` and
    `grad_norm` (before clipping) are means over optimizer steps. Samples without a gradient are skipped and are in
    no mean. `max_logprob_diff` is max |pi_old - recorded| over tokens with a recorded log-prob, 20
    at most. `kl_rollout`
    estimates KL(rollout policy || pi_old), `kl_reference` KL(policy || initial policy).
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
    seconds: float


class Tally:
    """Adds up an update's metrics."""

    def __init__(self, total_samples: int, on_progress: ProgressCallback | None) -> None:
        self._total, self._on_progress = total_samples, on_progress
        self._sums: Counter[str] = Counter()
        self._tokens = self._samples = self._steps = 0
        self._loss = self._grad_norm = self._max_diff = 0.0
        self.steps_skipped = 0

    def add(self, result: Objective, samples: int) -> None:
        self._sums.update(result.sums)
        self._tokens += result.tokens
        self._samples += samples
        self._max_diff = max(self._max_diff, result.max_logprob_diff)
        if self._on_progress is not None:
            self._on_progress(self._samples, self._total)

    def step(self, loss: float, grad_norm: float) -> None:
        self._steps += 1
        self._loss += loss
        self._grad_norm += grad_norm

    def metrics(self, *, lr: float, samples_skipped: int, seconds: float) -> UpdateMetrics:
        missing = int(self._sums["missing_logprobs"])
        recorded = max(1, self._tokens - missing)
        mean = {name: value / max(1, self._tokens) for name, value in self._sums.items()}
        return UpdateMetrics(
            loss=self._loss / max(1, self._steps),
            grad_norm=self._grad_norm / max(1, self._steps),
            lr=lr,
            entropy=mean.get("entropy", 0.0),
            kl_rollout=self._sums["kl_rollout"] / recorded,
            kl_reference=mean.get("kl_reference", 0.0),
            mean_logprob_diff=self._sums["logprob_diff"] / recorded,
            max_logprob_diff=self._max_diff,
            clip_low=mean.get("clip_low", 0.0),
            clip_high=mean.get("clip_high", 0.0),
            clip_dual=mean.get("clip_dual", 0.0),
            correction=mean.get("correction", 1.0),
            correction_clipped=mean.get("correction_clipped", 0.0),
            missing_logprobs=missing,
            tokens=self._tokens,
            samples=self._samples,
            samples_skipped=samples_skipped,
            optimizer_steps=self._steps,
            optimizer_steps_skipped=self.steps_skipped,
            seconds=seconds,
        )
