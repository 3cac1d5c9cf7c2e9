import numpy as np
import pytest

from leyden.algorithms.weights import token_weights


def test_rollout_mean():
    """Each rollout weighs 1/N in total, so a token of a short rollout weighs more."""
    weights = token_weights([10, 100], "rollout_mean")
    np.testing.assert_allclose(weights, [1 / 20, 1 / 200])
    np.testing.assert_allclose(weights * [10, 100], [0.5, 0.5])


def test_token_mean_and_constant():
    np.testing.assert_allclose(token_weights([10, 30], "token_mean"), [1 / 40, 1 / 40])
    np.testing.assert_allclose(token_weights([10, 30], "constant", 50), [1 / 100, 1 / 100])


def test_rollouts_without_trained_token_are_not_counted():
    np.testing.assert_allclose(token_weights([4, 0, 4, 0], "rollout_mean"), [1 / 8, 0, 1 / 8, 0])
    np.testing.assert_allclose(token_weights([4, 0], "constant", 10), [1 / 10, 0])
    assert token_weights([0, 0], "token_mean").tolist() == [0.0, 0.0]
    assert token_weights([], "rollout_mean").tolist() == []


def test_constant_needs_its_constant():
    with pytest.raises(ValueError, match="constant_tokens"):
        token_weights([1], "constant")
