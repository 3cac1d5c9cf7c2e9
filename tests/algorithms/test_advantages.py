import math

import numpy as np
import pytest

from leyden.algorithms.advantages import advantages

METHODS = ["grpo", "rloo", "mean_only"]


def test_grpo_hand_computed():
    # mean 0.5, sample std sqrt(1/3)
    expected = 0.5 / (math.sqrt(1 / 3) + 1e-6)
    np.testing.assert_allclose(advantages([1, 0, 1, 0], "grpo"), [expected, -expected, expected, -expected], rtol=1e-12)


def test_statistics_leave_out_the_lost_rollout():
    """Three valid rewards, not four with a zero."""
    np.testing.assert_allclose(advantages([1, 1, 0], "grpo"), [0.57735, 0.57735, -1.15470], atol=1e-5)
    np.testing.assert_allclose(advantages([1, 0, 0], "grpo"), [1.15470, -0.57735, -0.57735], atol=1e-5)
    np.testing.assert_allclose(advantages([1, 0, 0], "mean_only"), [2 / 3, -1 / 3, -1 / 3], atol=1e-12)


def test_rloo_is_reward_minus_mean_of_the_others():
    rewards = [0.5, 2.0, -3.5, 1.0]
    expected = [r - (sum(rewards) - r) / 3 for r in rewards]
    np.testing.assert_allclose(advantages(rewards, "rloo"), expected, rtol=1e-12)


def test_means_are_per_group():
    """Means 0.5 and 0.25, never raw rewards."""
    np.testing.assert_allclose(advantages([1, 0, 1, 0], "mean_only"), [0.5, -0.5, 0.5, -0.5])
    np.testing.assert_allclose(advantages([0, 0, 0, 1], "mean_only"), [-0.25, -0.25, -0.25, 0.75])


@pytest.mark.parametrize("method", METHODS)
def test_group_of_one_is_zero(method):
    assert advantages([1.0], method).tolist() == [0.0]


@pytest.mark.parametrize("method", METHODS)
def test_rounding_is_not_spread(method):
    """0.1 + 0.2 differs from 0.3 in the last bit only."""
    assert advantages([0.3, 0.1 + 0.2, 0.3, 0.3], method).tolist() == [0.0, 0.0, 0.0, 0.0]
    assert advantages([0.0, 0.0], method).tolist() == [0.0, 0.0]


def test_small_but_real_spread_is_kept():
    assert advantages([1000.0, 1000.001], "mean_only") == pytest.approx([-0.0005, 0.0005])


def test_odd_rewards_are_kept():
    """2 and -3.5 and True are rewards like others."""
    result = advantages([2, -3.5, True], "mean_only")
    np.testing.assert_allclose(result, [2 + 1 / 6, -3.5 + 1 / 6, 1 + 1 / 6])
    assert result.dtype == np.float64


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_not_finite_is_refused(bad):
    with pytest.raises(ValueError, match="must be finite"):
        advantages([1.0, bad], "grpo")


@pytest.mark.parametrize("size", [1e200, -1e200, 1e307, 1e-3, 1e12])
def test_grpo_does_not_depend_on_the_size_of_rewards(size):
    """Squares of large rewards overflow; 1e-6 beside the standard deviation is nothing."""
    expected = advantages([0.0, 1.0, 0.0, 1.0], "grpo")
    result = advantages([0.0, size, 0.0, size], "grpo")
    np.testing.assert_allclose(result, math.copysign(1, size) * expected, rtol=1e-2 if abs(size) < 1 else 1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_differences_beyond_a_float_are_either_normalised_or_said(method):
    if method == "grpo":
        np.testing.assert_allclose(advantages([1.7e308, -1.7e308], "grpo"), [0.70711, -0.70711], atol=1e-5)
        return
    assert np.isfinite(advantages([8e307, -8e307], method)).all()
    if method == "rloo":
        with pytest.raises(ValueError, match="beyond what a float holds"):
            advantages([1.7e308, -1.7e308], method)


@pytest.mark.parametrize("method", METHODS)
def test_denormal_rewards_give_finite_advantages(method):
    result = advantages([5e-324, 0.0, 2.5e-310], method)
    assert np.isfinite(result).all() and abs(result).max() < 1e-300


@pytest.mark.parametrize("mean", [1e6, -1e9, 1e11])
def test_a_large_mean_does_not_swallow_the_spread(mean):
    """Differences are taken from the smallest reward, where they are exact."""
    rewards = [mean, mean + 1, mean, mean + 1]
    np.testing.assert_allclose(advantages(rewards, "grpo"), advantages([0, 1, 0, 1], "grpo"), rtol=1e-12)
    np.testing.assert_allclose(advantages(rewards, "mean_only"), [-0.5, 0.5, -0.5, 0.5], rtol=1e-12)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("seed", range(20))
def test_advantages_are_finite_and_sum_to_zero_whatever_the_scale(method, seed):
    rng = np.random.default_rng(seed)
    scale = 10.0 ** rng.uniform(-300, 12)
    result = advantages((rng.standard_normal(int(rng.integers(2, 9))) * scale).tolist(), method)
    assert np.isfinite(result).all()
    assert abs(result.sum()) <= 1e-12 * max(abs(result).max(), 1e-300) * len(result)
