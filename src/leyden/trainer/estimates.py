"""pass@1 and pass@k with 95 % intervals. Pure; missing rewards are counted and never scored.

pass@k is the unbiased estimator of Chen et al. (2021), "Evaluating Large Language Models Trained on Code": for a task
with n rewarded samples of which c pass, 1 - C(n - c, k) / C(n, k); the mean over tasks with n >= k.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb, sqrt
from typing import Literal

import numpy as np

from leyden.types import Json

Z_95 = 1.959963984540054
BOOTSTRAP_DRAWS = 4000


@dataclass(frozen=True, slots=True)
class Estimate:
    """`value` with a 95 % interval over `tasks` tasks; all None without data. `method` made the interval."""

    k: int
    value: float | None
    low: float | None
    high: float | None
    tasks: int
    method: Literal["wilson", "bootstrap", "none"]

    def as_json(self) -> Json:
        return {
            "k": self.k,
            "value": self.value,
            "interval_95": None if self.low is None else [self.low, self.high],
            "tasks": self.tasks,
            "method": self.method,
        }

    def __str__(self) -> str:
        if self.value is None:
            return f"pass@{self.k} no data"
        return f"pass@{self.k} {self.value:.3f} [{self.low:.3f}, {self.high:.3f}] n={self.tasks}"


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Probability that at least one of k samples drawn without replacement passes. Needs samples >= k."""
    if not 0 <= passed <= samples or k > samples:
        raise ValueError(f"pass@{k} of {passed} passed among {samples} samples is not defined")
    return 1.0 - comb(samples - passed, k) / comb(samples, k)


def estimate(rewards: Sequence[Sequence[float | None]], k: int, *, threshold: float = 1.0, seed: int = 0) -> Estimate:
    """pass@k over tasks. `rewards[i]` holds one entry per sample of task i, None where there is no reward; a sample
    passes with a reward of at least `threshold`.

    The interval is Wilson's for k = 1 with one sample a task, otherwise a percentile bootstrap over tasks. Where all
    tasks agree on 0 or 1, resampling shows no spread and Wilson's interval over tasks is the honest one.
    """
    known = [[r for r in task if r is not None] for task in rewards]
    covered = [task for task in known if len(task) >= k]
    if not covered:
        return Estimate(k, None, None, None, 0, "none")
    values = np.array([pass_at_k(len(task), sum(r >= threshold for r in task), k) for task in covered])
    value = float(values.mean())
    single = k == 1 and all(len(task) == 1 for task in covered)
    if single or value in (0.0, 1.0):
        low, high = wilson(value, len(values))
        return Estimate(k, value, low, high, len(values), "wilson")
    low, high = bootstrap_mean(values, seed)
    return Estimate(k, value, low, high, len(values), "bootstrap")


def wilson(fraction: float, count: int) -> tuple[float, float]:
    """Wilson's score interval (1927) at 95 % for a fraction of `count` independent trials."""
    z2 = Z_95**2
    centre = (fraction + z2 / (2 * count)) / (1 + z2 / count)
    half = Z_95 * sqrt(fraction * (1 - fraction) / count + z2 / (4 * count**2)) / (1 + z2 / count)
    return (0.0 if fraction == 0 else centre - half), (1.0 if fraction == 1 else centre + half)


def bootstrap_mean(values: np.ndarray, seed: int) -> tuple[float, float]:
    """2.5 and 97.5 percentiles of the mean of `values` resampled with replacement."""
    rng = np.random.default_rng(seed)
    draws = rng.integers(0, len(values), size=(BOOTSTRAP_DRAWS, len(values)))
    low, high = np.percentile(values[draws].mean(axis=1), [2.5, 97.5])
    return float(low), float(high)
