"""Advantages of the rollouts of one group. A group's statistics are over rollouts, never over samples or turns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

AdvantageMethod = Literal["grpo", "rloo", "mean_only"]
STD_EPSILON = 1e-6
RELATIVE_SPREAD = 1e-12


def has_spread(rewards: Sequence[float]) -> bool:
    """Whether rewards differ by more than the rounding of their own arithmetic: 0.3 and 0.1 + 0.2 do not."""
    scaled_R, _ = _scaled(np.asarray(rewards, dtype=np.float64))
    if len(scaled_R) < 2:
        return False
    return bool(np.ptp(scaled_R) > RELATIVE_SPREAD * np.abs(scaled_R).max())


def advantages(rewards: Sequence[float], method: AdvantageMethod) -> NDArray[np.float64]:
    """Advantage of each rollout of one group, float64, shape [R].

    grpo       (R - mean) / (std + 1e-6) with the sample standard deviation (Shao et al. 2024,
    arXiv:2402.03300)
    rloo       R - mean of the others (Ahmadian et al. 2024, arXiv:2402.14740)
    mean_only  R - mean, without the division (Liu et al. 2025, arXiv:2503.20783)

    A group of one, or without spread, gives zeros. Neither squares of large rewards overflow, nor does a large mean
    swallow a small spread. Raises ValueError for a reward that is not finite, and for an advantage that is none.

    >>> advantages([1, 0, 1, 0], "grpo").round(3).tolist()
    [0.866, -0.866, 0.866, -0.866]
    >>> advantages([1, 1, 0], "grpo").round(3).tolist()
    [0.577, 0.577, -1.155]
    >>> advantages([1, 0, 0], "rloo").tolist()
    [1.0, -0.5, -0.5]
    >>> advantages([1, 0, 0, 0], "mean_only").tolist()
    [0.75, -0.25, -0.25, -0.25]
    """
    rewards_R = np.asarray(rewards, dtype=np.float64)
    if not np.isfinite(rewards_R).all():
        raise ValueError(f"rewards {list(rewards)} of a group must be finite; leave out rollouts without a reward")
    if not has_spread(rewards):
        return np.zeros_like(rewards_R)
    scaled_R, exponent = _scaled(rewards_R)
    distance_R = scaled_R - scaled_R.min()
    centred_R = distance_R - distance_R.mean()
    if method == "grpo":
        return np.asarray(centred_R / (centred_R.std(ddof=1) + math.ldexp(STD_EPSILON, -exponent)))
    if method == "rloo":
        centred_R = centred_R * len(rewards_R) / (len(rewards_R) - 1)
    with np.errstate(over="ignore"):
        advantages_R = np.ldexp(centred_R, exponent)
    if not np.isfinite(advantages_R).all():
        raise ValueError(f"the advantages of rewards {list(rewards)} are beyond what a float holds; scale them down")
    return np.asarray(advantages_R)


def _scaled(rewards_R: NDArray[np.float64]) -> tuple[NDArray[np.float64], int]:
    """(rewards / 2^exponent, exponent): exact, and no larger than 1 where a reward is."""
    largest = np.abs(rewards_R).max(initial=0.0)
    exponent = max(0, math.frexp(largest)[1])
    return np.ldexp(rewards_R, -exponent), exponent
