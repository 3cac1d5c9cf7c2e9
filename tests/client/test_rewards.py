import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from leyden.rewards import LARGEST_REWARD, reward_number


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (True, 1.0),
        (False, 0.0),
        (3, 3.0),
        (-0.25, -0.25),
        (5e-324, 5e-324),
        (LARGEST_REWARD, 1e12),
        (np.bool_(True), 1.0),
        (np.float32(0.5), 0.5),
        (np.int64(-2), -2.0),
        (np.array(0.5), 0.5),
        (np.array(True), 1.0),
        (torch.tensor(0.5), 0.5),
        (torch.tensor(True), 1.0),
        (torch.tensor(0.5, requires_grad=True), 0.5),
        (torch.tensor(0.5, dtype=torch.bfloat16), 0.5),
        (Decimal("0.125"), 0.125),
        (Fraction(1, 4), 0.25),
    ],
    ids=repr,
)
def test_whatever_is_one_number_is_a_reward(value: Any, expected: float) -> None:
    number = reward_number(value)
    assert number == expected and type(number) is float


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "None is not a finite number"),
        ("1.0", "'1.0' (str) is not a finite number"),
        (b"1", "b'1' (bytes)"),
        (math.nan, "nan is not"),
        (-math.inf, "-inf is not"),
        (np.float32("nan"), "nan"),
        (Decimal("NaN"), "Decimal('NaN') is not"),
        (Decimal("sNaN"), "Decimal('sNaN') is not"),
        (1 + 0j, "(1+0j) (complex)"),
        (np.complex64(1), "complex64"),
        (np.array(1 + 0j), "(ndarray)"),
        (np.array([1.0]), "array([1.]) (ndarray)"),
        (torch.tensor([1.0]), "tensor([1.]) (Tensor)"),
        (np.array("1"), "(ndarray)"),
        (np.str_("1"), "is not a finite number"),
        ([1.0], "[1.0] (list)"),
        ({"value": 1}, "(dict)"),
        (10**400, "is not a finite number"),
        (Fraction(10**400), "is not a finite number"),
        (1e200, "1e+200 is beyond the largest reward, 1e+12; scale rewards down"),
        (-(10**13), "-10000000000000 is beyond the largest reward"),
    ],
    ids=repr,
)
def test_anything_else_is_refused_with_the_value(value: Any, said: str) -> None:
    with pytest.raises(ValueError) as caught:
        reward_number(value)
    assert said in str(caught.value) and len(str(caught.value)) < 300
