from __future__ import annotations

import math

import numpy as np
import pytest

from leyden.trainer.estimates import bootstrap_mean, estimate, pass_at_k, wilson


@pytest.mark.parametrize(
    ("samples", "passed", "k", "value"),
    [(4, 2, 1, 0.5), (4, 2, 2, 1 - 1 / 6), (4, 2, 3, 1.0), (5, 0, 2, 0.0), (3, 3, 3, 1.0), (10, 1, 5, 0.5)],
)
def test_unbiased_estimator(samples, passed, k, value):
    assert pass_at_k(samples, passed, k) == pytest.approx(value, abs=1e-12)


def test_estimator_needs_k_samples():
    with pytest.raises(ValueError, match="pass@3"):
        pass_at_k(2, 1, 3)


def test_wilson_on_known_values():
    """Half of 10: the textbook interval 0.2366 to 0.7634; none of 10: 0 to 0.2775."""
    assert wilson(0.5, 10) == pytest.approx((0.236593, 0.763407), abs=1e-6)
    assert wilson(0.0, 10) == pytest.approx((0.0, 0.277533), abs=1e-6)
    assert wilson(1.0, 10) == pytest.approx((0.722467, 1.0), abs=1e-6)


def test_one_sample_a_task_is_wilson():
    result = estimate([[1.0]] * 5 + [[0.0]] * 5, 1)
    assert (result.value, result.tasks, result.method) == (0.5, 10, "wilson")
    assert (result.low, result.high) == pytest.approx((0.236593, 0.763407), abs=1e-6)
    assert str(result) == "pass@1 0.500 [0.237, 0.763] n=10"


def test_several_samples_a_task_are_bootstrapped_with_a_seed():
    rewards = [[1.0, 0.0], [1.0, 1.0], [0.0, 0.0], [0.0, 1.0]]
    one, two = estimate(rewards, 1, seed=7), estimate(rewards, 2, seed=7)
    assert (one.value, one.method) == (0.5, "bootstrap")
    assert two.value == pytest.approx(0.75)
    assert one == estimate(rewards, 1, seed=7)
    assert 0 <= one.low < 0.5 < one.high <= 1


def test_bootstrap_of_the_mean():
    low, high = bootstrap_mean(np.array([0.0, 1.0] * 200), seed=0)
    assert low == pytest.approx(0.5 - 1.96 * 0.5 / 20, abs=0.005)
    assert high == pytest.approx(0.5 + 1.96 * 0.5 / 20, abs=0.005)


def test_missing_rewards_are_counted_never_scored():
    """T09: three tasks, one without a reward: two are covered, nothing is NaN."""
    result = estimate([[1.0], [0.0], [None]], 1)
    assert (result.value, result.tasks) == (0.5, 2)
    assert not math.isnan(result.low)
    assert estimate([[1.0, None], [1.0, 0.0]], 2).tasks == 1


def test_no_data_is_said():
    result = estimate([[None], []], 1)
    assert result.as_json() == {"k": 1, "value": None, "interval_95": None, "tasks": 0, "method": "none"}
    assert str(result) == "pass@1 no data"


def test_agreement_of_all_tasks_does_not_give_a_zero_width_interval():
    result = estimate([[1.0, 1.0]] * 10, 1)
    assert result.method == "wilson"
    assert (result.low, result.high) == pytest.approx((0.722467, 1.0), abs=1e-6)


def test_partial_credit_does_not_pass_and_larger_rewards_do():
    assert estimate([[0.99], [2.0], [-3.5], [1.0]], 1).value == 0.5
