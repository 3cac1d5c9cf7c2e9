import math

import numpy as np
import pytest
import torch

from leyden.algorithms.batch import GroupResult, RolloutResult, build_batch
from leyden.config import AlgorithmConfig, EmbeddedConfig, ModelConfig, OptimizerConfig
from leyden.errors import ConfigError, TrainingError
from leyden.trainer.embedded.policy import EmbeddedPolicy, learning_rate, make_optimizer
from leyden.trainer.embedded.requests import SampleRequest
from leyden.types import Sample

from .conftest import VOCABULARY, tiny_model

TEMPERATURE = 0.8


@pytest.fixture
def make(model_folder):
    def make(*, mini_batches=1, micro_batch_tokens=64, algorithm=None, optimizer=None, **model):
        return EmbeddedPolicy(
            ModelConfig(path=str(model_folder), context_tokens=128, **model),
            algorithm=algorithm or AlgorithmConfig(),
            optimizer=optimizer or OptimizerConfig(lr=1e-3),
            embedded=EmbeddedConfig(device="cpu", threads=1, slots=4, micro_batch_tokens=micro_batch_tokens),
            mini_batches=mini_batches,
        )

    return make


def recorded(model, seed, length=20, context=6, rollout_id="r", temperature=TEMPERATURE, missing=()):
    """A sample whose recorded log-probs are exactly the model's, as a sampler would have recorded them."""
    ids = np.random.default_rng(seed).integers(0, VOCABULARY, length)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor(ids[None])).logits[0] / temperature
    logprobs = torch.log_softmax(logits[:-1], -1).gather(1, torch.tensor(ids[1:, None]))[:, 0].numpy()
    mask_L = np.arange(length) >= context
    logprobs_L = np.where(mask_L, np.concatenate([[0.0], logprobs]), 0.0).astype(np.float32)
    logprobs_L[list(missing)] = np.nan
    return Sample(rollout_id, ids.astype(np.int32), mask_L, logprobs_L, (1,))


def batch_of(model, rewards=(1.0, 0.0, 0.0, 1.0), config=None, missing=(), **options):
    rollouts = tuple(
        RolloutResult(
            f"r{i}",
            reward,
            (recorded(model, i, length=14 + 3 * i, rollout_id=f"r{i}", missing=missing, **options),),
        )
        for i, reward in enumerate(rewards)
    )
    return build_batch([GroupResult("g", rollouts)], config or AlgorithmConfig())


def weights(policy):
    return torch.cat([p.detach().flatten() for p in policy.model.parameters()]).clone()


def test_on_policy_update(make):
    policy = make()
    before = weights(policy)
    batch = batch_of(tiny_model())
    metrics = policy.update(batch, TEMPERATURE)
    assert metrics.max_logprob_diff < 1e-4
    assert metrics.kl_rollout < 1e-6
    assert metrics.correction == pytest.approx(1.0, abs=1e-4)
    assert (metrics.clip_low, metrics.clip_high, metrics.clip_dual, metrics.correction_clipped) == (0, 0, 0, 0)
    # ratio 1 everywhere: loss = -sum w A = -mean over rollouts of A = 0
    assert metrics.loss == pytest.approx(0.0, abs=1e-5)
    assert metrics.tokens == sum(8 + 3 * i for i in range(4))
    assert metrics.samples == 4
    assert (metrics.optimizer_steps, metrics.optimizer_steps_skipped) == (1, 0)
    assert metrics.grad_norm > 0
    assert 0 < metrics.entropy < math.log(VOCABULARY)
    assert not torch.equal(weights(policy), before)


def test_update_raises_good_and_lowers_bad(make):
    policy = make()
    model, batch = tiny_model(), batch_of(tiny_model())
    policy.update(batch, TEMPERATURE)
    for weighted in batch.samples:
        after = recorded(policy.model, int(weighted.sample.rollout_id[1:]), length=len(weighted.sample.ids_L))
        before = recorded(model, int(weighted.sample.rollout_id[1:]), length=len(weighted.sample.ids_L))
        assert (after.logprobs_L.sum() - before.logprobs_L.sum()) * weighted.advantage > 0


@pytest.mark.parametrize("tokens", [1, 40, 10_000])
def test_micro_batches_change_nothing(make, tokens):
    """L09 on the real path: the same weights after an update, whatever the micro-batches."""
    reference, policy = make(micro_batch_tokens=64), make(micro_batch_tokens=tokens)
    for p in (reference, policy):
        p._optimizer = torch.optim.SGD(p.model.parameters(), lr=1e-2)
        p.update(batch_of(tiny_model()), TEMPERATURE)
    torch.testing.assert_close(weights(policy), weights(reference), rtol=0, atol=1e-6)


def test_mini_batches_are_optimizer_steps(make):
    """L10: two steps; in the second, pi has moved away from pi_old."""
    policy = make(mini_batches=2, optimizer=OptimizerConfig(lr=1e-2, max_grad_norm=100.0))
    metrics = policy.update(batch_of(tiny_model()), TEMPERATURE)
    assert metrics.optimizer_steps == 2
    assert policy.optimizer_steps == 2
    assert metrics.tokens == sum(8 + 3 * i for i in range(4))
    assert metrics.max_logprob_diff < 1e-4  # of pi_old, not of pi
    assert metrics.clip_low + metrics.clip_high > 0


def test_pi_old_of_one_mini_batch_is_the_same_forward_pass(make):
    """The first pass that several mini-batches need gives what a single one takes from its own forward pass."""
    policy = make()
    batch = batch_of(tiny_model())
    micros = policy._micro_batches(batch.samples)
    (old,) = policy._old_logprobs([micros], TEMPERATURE)
    for micro, old_T in zip(micros, old, strict=True):
        recorded_T = np.concatenate([s.sample.logprobs_L[s.sample.mask_L] for s in micro])
        np.testing.assert_allclose(old_T.numpy(), recorded_T, atol=1e-4)


def test_zero_advantage_is_not_computed_and_a_step_without_gradient_is_skipped(make):
    """L04."""
    policy = make()
    before = weights(policy)
    metrics = policy.update(batch_of(tiny_model(), rewards=(0.5, 0.5)), TEMPERATURE)
    assert torch.equal(weights(policy), before)
    assert (metrics.samples, metrics.samples_skipped) == (0, 2)
    assert (metrics.optimizer_steps, metrics.optimizer_steps_skipped) == (0, 1)
    assert policy.optimizer_steps == 0
    assert metrics.loss == 0.0


def test_wrong_temperature_shows_in_the_metrics(make):
    """L15: log-probs recorded at another temperature than the trainer is told."""
    metrics = make().update(batch_of(tiny_model(), temperature=1.0), 0.5)
    assert metrics.max_logprob_diff > 0.5


def test_missing_logprobs_are_counted_and_weigh_one(make):
    metrics = make().update(batch_of(tiny_model(), missing=(7, 8)), TEMPERATURE)
    assert metrics.missing_logprobs == 8
    assert metrics.correction == pytest.approx(1.0, abs=1e-4)
    assert metrics.max_logprob_diff < 1e-4


def test_kl_reference_is_the_initial_model(make):
    algorithm = AlgorithmConfig(kl_coef=0.1)
    policy = make(algorithm=algorithm, optimizer=OptimizerConfig(lr=1e-2, max_grad_norm=10.0))
    first = policy.update(batch_of(tiny_model(), config=algorithm), TEMPERATURE)
    second = policy.update(batch_of(tiny_model(), config=algorithm), TEMPERATURE)
    assert first.kl_reference == pytest.approx(0.0, abs=1e-9)
    assert second.kl_reference > 1e-5


def test_not_finite_is_an_error_and_changes_nothing(make):
    policy = make()
    policy.update(batch_of(tiny_model()), TEMPERATURE)
    with torch.no_grad():
        policy.model.model.embed_tokens.weight[5] = torch.nan
    before = weights(policy)
    with pytest.raises(TrainingError, match=r"optimizer step 2: the loss is nan.*Rollouts: r0"):
        policy.update(batch_of(tiny_model()), TEMPERATURE)
    torch.testing.assert_close(weights(policy), before, equal_nan=True, rtol=0, atol=0)
    assert policy.optimizer_steps == 1
    assert all(p.grad is None for p in policy.model.parameters())


def test_not_finite_gradient_is_an_error(make):
    policy = make()
    before = weights(policy)
    policy.model.model.norm.weight.register_hook(lambda grad: grad * torch.inf)
    with pytest.raises(TrainingError, match="optimizer step 1: the gradient norm is"):
        policy.update(batch_of(tiny_model()), TEMPERATURE)
    assert torch.equal(weights(policy), before)


def test_sampler_has_its_own_copy_until_publish(make):
    policy = make(optimizer=OptimizerConfig(lr=1e-2))
    sampler = policy.make_sampler(version=3, lineage="a")
    sampler.start()
    try:
        request = SampleRequest([1, 2, 3], 8, temperature=TEMPERATURE, seed=1)
        before = sampler.submit(request).result(60)
        policy.update(batch_of(tiny_model()), TEMPERATURE)
        assert sampler.submit(request).result(60) == before
        policy.publish(sampler, 4, "b").result(60)
        after = sampler.submit(request).result(60)
        assert (sampler.version, sampler.lineage) == (4, "b")
        assert after.spans == ((4, 8),)
        assert after.logprobs_T != before.logprobs_T
        ids = np.array([*request.prompt_ids, *after.token_ids_T])
        with torch.no_grad():
            logits = policy.model(input_ids=torch.tensor(ids[None])).logits[0, 2:-1] / TEMPERATURE
        expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(ids[3:, None]))[:, 0].tolist()
        np.testing.assert_allclose(after.logprobs_T, expected, atol=1e-4)
    finally:
        sampler.close()


def test_sampler_and_trainer_agree_on_the_logprobs(make):
    """What the sampler records is what the trainer recomputes: below 1e-4 over several turns."""
    policy = make()
    sampler = policy.make_sampler()
    sampler.start()
    rollouts = []
    try:
        for r in range(4):
            ids = np.random.default_rng(r).integers(0, VOCABULARY, 8).tolist()
            mask, logprobs = [False] * 8, [0.0] * 8
            for turn in range(3):
                answer = sampler.submit(SampleRequest(ids, 10, temperature=TEMPERATURE, seed=turn)).result(60)
                ids = ids + answer.token_ids_T + [1, 2, 3]
                mask += [True] * 10 + [False] * 3
                logprobs += answer.logprobs_T + [0.0] * 3
            sample = Sample(f"r{r}", np.array(ids, np.int32), np.array(mask), np.array(logprobs, np.float32), (1, 2, 3))
            rollouts.append(RolloutResult(f"r{r}", float(r % 2), (sample,)))
    finally:
        sampler.close()
    metrics = policy.update(build_batch([GroupResult("g", tuple(rollouts))], AlgorithmConfig()), TEMPERATURE)
    assert metrics.tokens == 4 * 30
    assert metrics.max_logprob_diff < 1e-4


def test_warm_up():
    config = OptimizerConfig(lr=0.1, warmup_steps=4)
    assert [learning_rate(config, n) for n in range(6)] == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1, 0.1])
    assert learning_rate(OptimizerConfig(lr=0.1), 0) == 0.1


def test_decay_is_on_matrices_only():
    model = tiny_model()
    matrices, vectors = make_optimizer(model, OptimizerConfig(weight_decay=0.1)).param_groups
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.1, 0.0)
    assert {p.ndim for p in matrices["params"]} == {2}
    assert {p.ndim for p in vectors["params"]} == {1}
    assert len(matrices["params"]) + len(vectors["params"]) == len(list(model.parameters()))


def test_a_folder_without_a_model_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"model.path: .*nothing"):
        EmbeddedPolicy(
            ModelConfig(path=str(tmp_path / "nothing")),
            algorithm=AlgorithmConfig(),
            optimizer=OptimizerConfig(),
            embedded=EmbeddedConfig(device="cpu"),
        )
