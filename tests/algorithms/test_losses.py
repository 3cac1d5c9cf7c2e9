import math

import pytest
import torch

from leyden.algorithms.corrections import truncated_correction
from leyden.algorithms.losses import k3_kl, ppo_clip, token_logprobs
from leyden.algorithms.objective import objective
from leyden.config import AlgorithmConfig


def f64(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_ppo_clip_all_branches():
    ratio = f64(1.1, 1.5, 0.5, 1.1, 0.5, 1.5, 5.0)
    advantage = f64(1, 1, 1, -1, -1, -1, -1)
    result = ppo_clip(ratio.log(), advantage, clip_low=0.2, clip_high=0.3, dual_clip=3.0)
    torch.testing.assert_close(result.loss_T, f64(-1.1, -1.3, -0.5, 1.1, 0.8, 1.5, 3.0))
    assert result.high_T.tolist() == [False, True, False, False, False, False, False]
    assert result.low_T.tolist() == [False, False, False, False, True, False, False]
    assert result.dual_T.tolist() == [False, False, False, False, False, False, True]


def test_ppo_clip_gradient_is_zero_exactly_where_clipped():
    log_ratio = f64(1.1, 1.5, 0.5, 5.0).log().requires_grad_()
    ppo_clip(log_ratio, f64(1, 1, -1, -1), 0.2, 0.3, 3.0).loss_T.sum().backward()
    torch.testing.assert_close(log_ratio.grad, f64(-1.1, 0, 0, 0))


@pytest.mark.parametrize("size", [1e3, 1e30, math.inf])
def test_extreme_log_ratios_stay_finite(size):
    """No product or exponential leaves the finite numbers."""
    log_ratio = f64(size, -size).requires_grad_()
    result = ppo_clip(log_ratio, f64(-1, 1), 0.2, 0.2, 3.0)
    result.loss_T.sum().backward()
    assert result.loss_T.tolist() == [3.0, pytest.approx(-math.exp(-20))]
    assert torch.isfinite(log_ratio.grad).all()
    weights = truncated_correction(f64(-1.0, -1.0 - min(size, 1e30)), f64(-1.0 - min(size, 1e30), -1.0), 2.0)
    assert weights.weights_T.tolist() == pytest.approx([2.0, math.exp(-20)])


def test_300_tokens_of_ratio_07():
    """Per-token weights do not compound over a long rollout."""
    old, mu = torch.full((300,), math.log(0.7)).double(), torch.zeros(300).double()
    weights = truncated_correction(old, mu, 2.0).weights_T
    torch.testing.assert_close(weights, torch.full((300,), 0.7, dtype=torch.float64))


def test_correction():
    old = f64(-1.0, -1.0, -1.0, -2.0, -1.0)
    mu = f64(-1.0, -3.0, math.nan, -1.0, -math.inf)
    result = truncated_correction(old, mu, clip=2.0)
    torch.testing.assert_close(result.weights_T, f64(1.0, 2.0, 1.0, math.exp(-1), 1.0))
    assert result.missing_T.tolist() == [False, False, True, False, True]
    assert result.clipped_T.tolist() == [False, True, False, False, False]
    assert not truncated_correction(old.requires_grad_(), mu, 2.0).weights_T.requires_grad


def test_k3_is_the_formula_and_never_negative():
    pi, reference = f64(-1.0, -2.0, -0.5), f64(-2.0, -1.0, -0.5)
    torch.testing.assert_close(k3_kl(pi, reference), f64(math.exp(-1), math.e - 2, 0.0))
    random = torch.randn(1000, dtype=torch.float64)
    assert (k3_kl(random, random.flip(0)) >= 0).all()


def test_temperature_is_in_the_logprobs():
    """Logits [2, 1, 0] at T = 0.5."""
    logits, token = torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([0])
    tempered, entropy = token_logprobs(logits, token, 0.5)
    raw, _ = token_logprobs(logits, token, 1.0)
    assert tempered.item() == pytest.approx(-0.1429, abs=1e-4)
    assert raw.item() == pytest.approx(-0.4076, abs=1e-4)
    p = torch.softmax(torch.tensor([4.0, 2.0, 0.0]), 0)
    assert entropy.item() == pytest.approx(-(p * p.log()).sum().item(), abs=1e-6)


def test_entropy_carries_a_gradient_only_if_asked():
    logits = torch.randn(2, 5, requires_grad=True)
    ids = torch.tensor([1, 2])
    assert not token_logprobs(logits, ids, 1.0)[1].requires_grad
    assert token_logprobs(logits, ids, 1.0, entropy_gradient=True)[1].requires_grad
    assert token_logprobs(logits, ids, 1.0)[0].requires_grad


def evaluate(config, logprobs, **changes):
    given = {
        "old_T": logprobs.detach(),
        "rollout_T": logprobs.detach(),
        "advantage_T": torch.ones_like(logprobs),
        "weight_T": torch.ones_like(logprobs),
        "reference_T": None,
    }
    entropy = changes.pop("entropy_T", torch.zeros_like(logprobs))
    return objective(logprobs, entropy, config=config, **(given | changes))


def test_objective_is_the_sum_of_its_terms():
    config = AlgorithmConfig(kl_coef=0.5, entropy_coef=0.25)
    logprobs = f64(-1.0, -2.0)
    result = evaluate(
        config,
        logprobs,
        advantage_T=f64(2.0, -1.0),
        weight_T=f64(0.5, 0.25),
        rollout_T=f64(-1.0, math.nan),
        reference_T=f64(-2.0, -2.0),
        entropy_T=f64(0.8, 0.4),
    )
    first = 0.5 * (-2.0 + 0.5 * math.exp(-1) - 0.25 * 0.8)
    second = 0.25 * (1.0 - 0.25 * 0.4)
    assert result.loss.item() == pytest.approx(first + second, rel=1e-12)
    assert result.sums["missing_logprobs"] == 1
    assert result.sums["entropy"] == pytest.approx(1.2)
    assert result.sums["kl_reference"] == pytest.approx(math.exp(-1))


def test_on_policy_gradient_is_minus_weight_times_advantage():
    logprobs = f64(-1.0, -2.0).requires_grad_()
    result = evaluate(AlgorithmConfig(), logprobs, advantage_T=f64(2.0, -1.0), weight_T=f64(0.5, 0.25))
    result.loss.backward()
    torch.testing.assert_close(logprobs.grad, f64(-1.0, 0.25))
    assert result.max_logprob_diff == 0.0


def test_correction_scales_the_policy_loss_only():
    config = AlgorithmConfig(entropy_coef=1.0, correction_clip=2.0)
    logprobs = f64(-1.0)
    result = evaluate(config, logprobs, rollout_T=f64(-1.0 - math.log(1.5)), entropy_T=f64(0.3))
    assert result.loss.item() == pytest.approx(-1.5 - 0.3)
    assert result.max_logprob_diff == pytest.approx(math.log(1.5))
    assert result.sums["kl_rollout"] == pytest.approx(0.5 - math.log(1.5))


def masked(*values, **settings):
    return torch.tensor([values], **settings)


def test_impossible_tokens_add_nothing_to_the_entropy():
    """Two equal tokens and a masked one: log 2, and no gradient at the mask."""
    logits = masked(0.0, 0.0, -math.inf, requires_grad=True)
    logprobs, entropy = token_logprobs(logits, torch.tensor([1]), 1.0, entropy_gradient=True)
    assert entropy.item() == pytest.approx(0.6931, abs=1e-4)
    assert logprobs.item() == pytest.approx(-0.6931, abs=1e-4)
    (logprobs.sum() + entropy.sum()).backward()
    torch.testing.assert_close(logits.grad, masked(-0.5, 0.5, 0.0))


def test_one_possible_token_has_entropy_zero():
    logits = masked(-math.inf, 3.0, -math.inf, requires_grad=True)
    logprobs, entropy = token_logprobs(logits, torch.tensor([1]), 0.5, entropy_gradient=True)
    assert (logprobs.item(), entropy.item()) == (0.0, 0.0)
    (logprobs + entropy).sum().backward()
    assert logits.grad.tolist() == [[0.0, 0.0, 0.0]]


@pytest.mark.parametrize("size", [1e30, 3e38, -3e38])
@pytest.mark.parametrize("temperature", [0.01, 1.0, 10.0])
def test_the_largest_floats_are_logits_like_others(size, temperature):
    logits = masked(size, 0.0, -size, requires_grad=True)
    logprobs, entropy = token_logprobs(logits, logits.argmax(dim=-1), temperature, entropy_gradient=True)
    (logprobs + entropy).sum().backward()
    assert (logprobs.item(), entropy.item()) == (0.0, 0.0)
    assert torch.isfinite(logits.grad).all()


def test_an_impossible_token_has_no_part_in_the_gradient():
    """The policy cannot say what was recorded: pi and pi_old are 0, and their ratio is 1."""
    config = AlgorithmConfig(kl_coef=0.1, entropy_coef=0.1)
    logits = torch.tensor([[0.0, 1.0, -math.inf], [0.0, 1.0, 2.0]], requires_grad=True)
    logprobs, entropy = token_logprobs(logits, torch.tensor([2, 1]), 1.0, entropy_gradient=True)
    result = evaluate(
        config,
        logprobs,
        entropy_T=entropy,
        rollout_T=torch.tensor([-1.0, -1.0]),
        reference_T=torch.tensor([-math.inf, -1.0]),
    )
    result.loss.backward()
    assert math.isfinite(result.loss.item()) and torch.isfinite(logits.grad).all()
    assert all(math.isfinite(value) for value in result.sums.values())
    assert result.max_logprob_diff == 20.0


@pytest.mark.parametrize("seed", range(30))
def test_losses_are_finite_for_any_logits(seed):
    """Any mixture of finite and -inf logits, any log-prob of another policy, with and without a mask at the token."""
    generator = torch.Generator().manual_seed(seed)
    scale = 10.0 ** (seed - 5)
    logits = torch.randn(6, 9, generator=generator) * min(scale, 1e37)
    logits[torch.rand(6, 9, generator=generator) < 0.4] = -math.inf
    logits[:, 0] = 0.0
    logits.requires_grad_()
    ids = torch.randint(0, 9, (6,), generator=generator)
    logprobs, entropy = token_logprobs(logits, ids, 0.7, entropy_gradient=True)
    others = torch.tensor([-1.0, -math.inf, math.nan, -3e38, 0.0, math.inf])
    result = evaluate(
        AlgorithmConfig(kl_coef=0.5, entropy_coef=0.5),
        logprobs,
        entropy_T=entropy,
        old_T=others[torch.randperm(6, generator=generator)].nan_to_num(-1.0, posinf=0.0, neginf=-math.inf),
        rollout_T=others[torch.randperm(6, generator=generator)],
        reference_T=others[torch.randperm(6, generator=generator)].nan_to_num(-1.0, posinf=0.0, neginf=-math.inf),
        advantage_T=torch.randn(6, generator=generator),
    )
    result.loss.backward()
    assert math.isfinite(result.loss.item()) and torch.isfinite(logits.grad).all()
    assert all(math.isfinite(value) for value in result.sums.values()) and math.isfinite(result.max_logprob_diff)
