"""What a reward is: one finite number. Standard library only, for graders import it."""

from __future__ import annotations

import math
from typing import Any, SupportsFloat, SupportsIndex

LARGEST_REWARD = 1e12
"""Advantages are differences of rewards and become gradients in float32, whose squares end at 3e38."""


def reward_number(value: Any) -> float:
    """`value` as a float. Booleans are 1.0 and 0.0; scalars of numpy and torch, Decimal and Fraction are numbers.

    Raises ValueError for text, None, complex numbers, arrays with axes, what is not finite or beyond LARGEST_REWARD.

    >>> reward_number(True), reward_number(0.25)
    (1.0, 0.25)
    """
    number = _as_float(value)
    if number is None or not math.isfinite(number):
        raise ValueError(f"{_shown(value)} is not a finite number")
    if abs(number) > LARGEST_REWARD:
        raise ValueError(f"{_shown(value)} is beyond the largest reward, {LARGEST_REWARD:g}; scale rewards down")
    return number


def _as_float(value: Any) -> float | None:
    if getattr(value, "shape", None) is not None and callable(getattr(value, "item", None)):
        if tuple(value.shape) != ():
            return None
        value = value.item()  # a numpy or torch scalar, or an array without axes
    if isinstance(value, str | bytes | bytearray | complex) or not isinstance(value, SupportsFloat | SupportsIndex):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf
    except (TypeError, ValueError):
        return None


def _shown(value: object) -> str:
    text = " ".join(repr(value).split())
    kind = type(value).__name__
    return (
        f"{text:.200}" if kind in text or value is None or isinstance(value, int | float) else f"{text:.200} ({kind})"
    )
