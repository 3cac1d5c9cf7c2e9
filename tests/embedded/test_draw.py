import math

import pytest
import torch

from leyden.trainer.embedded.draw import sample


def draw(probabilities, u, temperature=1.0, top_p=1.0, top_k=0):
    logits = torch.tensor([probabilities]).log()
    token, logprob = sample(logits, [u], [temperature], [top_p], [top_k])
    return token.item(), logprob.item()


def test_inverts_the_cumulative_distribution():
    for u, token in [(0.0, 0), (0.49, 0), (0.51, 1), (0.79, 1), (0.81, 2), (0.999999, 2)]:
        assert draw([0.5, 0.3, 0.2], u) == (token, pytest.approx(math.log([0.5, 0.3, 0.2][token])))


def test_top_p_keeps_the_smallest_set_that_reaches_it():
    assert draw([0.2, 0.5, 0.3], 0.79, top_p=0.6) == (2, pytest.approx(math.log(0.375)))
    assert draw([0.2, 0.5, 0.3], 0.99, top_p=0.4) == (1, pytest.approx(0.0))


def test_top_k_then_top_p():
    assert draw([0.1, 0.4, 0.3, 0.2], 0.99, top_k=2) == (2, pytest.approx(math.log(3 / 7)))
    # after top-k 2 the first token has 4/7 > 0.5
    assert draw([0.1, 0.4, 0.3, 0.2], 0.99, top_k=2, top_p=0.5) == (1, pytest.approx(0.0))


def test_temperature_comes_first():
    """L15: logits [2, 1, 0] at T = 0.5."""
    token, logprob = sample(torch.tensor([[2.0, 1.0, 0.0]]), [0.1], [0.5], [1.0], [0])
    assert token.item() == 0
    assert logprob.item() == pytest.approx(-0.1429, abs=1e-4)


def test_greedy_is_a_point_mass():
    assert draw([0.2, 0.5, 0.3], 0.99, temperature=0.0) == (1, 0.0)


def test_rows_do_not_influence_each_other():
    logits = torch.randn(4, 50)
    settings = ([0.1, 0.5, 0.9, 0.3], [1.0, 0.7, 0.0, 1.3], [1.0, 0.5, 1.0, 1.0], [0, 0, 0, 5])
    before = logits.clone()
    tokens, logprobs = sample(logits, *settings)
    torch.testing.assert_close(logits, before, rtol=0, atol=0)
    for b in range(4):
        token, logprob = sample(logits[b : b + 1], *[[s[b]] for s in settings])
        assert token.item() == tokens[b].item()
        assert logprob.item() == pytest.approx(logprobs[b].item())


def test_a_token_without_probability_is_never_drawn():
    logits = torch.full((1, 10), -torch.inf)
    logits[0, 4] = 0.0
    for u in (0.0, 0.5, 1 - 2**-53):
        assert sample(logits, [u], [1.0], [1.0], [0])[0].item() == 4


def test_frequencies():
    n = 20_000
    logits = torch.tensor([0.5, 0.3, 0.2]).log().expand(n, 3)
    uniforms = torch.rand(n, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).tolist()
    tokens, _ = sample(logits, uniforms, [1.0] * n, [1.0] * n, [0] * n)
    torch.testing.assert_close(
        torch.bincount(tokens, minlength=3) / n, torch.tensor([0.5, 0.3, 0.2]), atol=0.01, rtol=0
    )


def test_broken_logits_show_in_the_logprob():
    _, logprob = sample(torch.full((1, 3), math.nan), [0.5], [1.0], [1.0], [0])
    assert math.isnan(logprob.item())
