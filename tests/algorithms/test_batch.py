import math

import numpy as np
import pytest

from leyden.algorithms.batch import (
    GroupResult,
    RolloutResult,
    WeightedSample,
    build_batch,
    micro_batches,
    mini_batches,
    needs_forward,
)
from leyden.algorithms.padding import pad
from leyden.config import AlgorithmConfig
from leyden.errors import TrainingError
from leyden.types import Sample

CONFIG = AlgorithmConfig()


def sample(trained, context=2, rollout_id="r"):
    length = context + trained
    mask_L = np.arange(length) >= context
    return Sample(
        rollout_id=rollout_id,
        ids_L=np.arange(1, length + 1, dtype=np.int32),
        mask_L=mask_L,
        logprobs_L=np.where(mask_L, -1.0, 0.0).astype(np.float32),
        turn_ids=(1,),
    )


def rollout(reward, *trained, excluded=None):
    return RolloutResult(f"r{reward}", reward, tuple(sample(t) for t in trained), excluded)


def group(*rollouts, group_id="g"):
    return GroupResult(group_id, rollouts)


def test_group_mean_counts_rollouts_not_samples():
    """Rewards [1, 0, 1, 0] with 2, 1, 2, 1 samples."""
    batch = build_batch([group(rollout(1, 3, 3), rollout(0, 3), rollout(1, 3, 3), rollout(0, 3))], AlgorithmConfig())
    a = 0.5 / (math.sqrt(1 / 3) + 1e-6)
    assert [s.advantage for s in batch.samples] == pytest.approx([a, a, -a, a, a, -a])
    assert [s.rollout for s in batch.samples] == [0, 0, 1, 2, 2, 3]
    assert [s.weight for s in batch.samples] == pytest.approx([1 / 24, 1 / 24, 1 / 12, 1 / 24, 1 / 24, 1 / 12])
    assert (batch.counts.samples, batch.counts.trained_rollouts) == (6, 4)
    assert batch.counts.trained_tokens == 18


def test_excluded_rollouts_leave_statistics_and_weights():
    """The worked example of `build_batch`."""
    batch = build_batch(
        [group(rollout(1, 5, 2), rollout(1, 4), rollout(0, 4), rollout(0, 9, excluded="infrastructure"))],
        CONFIG,
    )
    assert [s.advantage for s in batch.samples] == pytest.approx([0.57735, 0.57735, 0.57735, -1.15470], abs=1e-5)
    assert [s.weight for s in batch.samples] == pytest.approx([1 / 21, 1 / 21, 1 / 12, 1 / 12])
    assert batch.counts.trained_rollouts == 3


def test_missing_reward_is_not_zero():
    """None is left out and named."""
    batch = build_batch([group(rollout(1, 2), rollout(0, 2), rollout(None, 2))], CONFIG)
    assert batch.counts.trained_rollouts == 2
    assert [s.advantage for s in batch.samples] == pytest.approx([0.70711, -0.70711], abs=1e-5)


def test_groups_do_not_mix():
    config = AlgorithmConfig(advantage="mean_only")
    batch = build_batch(
        [
            group(rollout(1, 1), rollout(0, 1), rollout(1, 1), rollout(0, 1), group_id="a"),
            group(rollout(0, 1), rollout(0, 1), rollout(0, 1), rollout(1, 1), group_id="b"),
        ],
        config,
    )
    assert [s.advantage for s in batch.samples] == [0.5, -0.5, 0.5, -0.5, -0.25, -0.25, -0.25, 0.75]


def test_shrunken_group_of_one_gets_zero_and_is_counted():
    lost = [rollout(0, 3, excluded="infrastructure") for _ in range(3)]
    batch = build_batch([group(rollout(1, 3), *lost), group(*lost)], CONFIG)
    assert [s.advantage for s in batch.samples] == [0.0]
    assert (batch.counts.groups_of_one, batch.counts.groups_empty) == (1, 1)
    assert batch.counts.trained_rollouts == 1


def test_no_spread_is_counted_and_needs_no_forward_pass():
    batch = build_batch([group(rollout(0.3, 2), rollout(0.1 + 0.2, 2)), group(rollout(1, 2), rollout(0, 2))], CONFIG)
    assert batch.counts.groups_without_spread == 1
    assert [needs_forward(s, CONFIG) for s in batch.samples] == [False, False, True, True]
    assert all(needs_forward(s, AlgorithmConfig(kl_coef=0.1)) for s in batch.samples)
    assert all(needs_forward(s, AlgorithmConfig(entropy_coef=0.1)) for s in batch.samples)
    # they still count in N: 4 rollouts with 2 tokens each
    assert [s.weight for s in batch.samples] == [1 / 8] * 4


def test_rollout_without_a_trained_token_counts_in_statistics_only():
    """The reward is part of the baseline, N is not."""
    batch = build_batch([group(rollout(1, 2), rollout(0))], AlgorithmConfig(advantage="mean_only"))
    assert [(s.advantage, s.weight) for s in batch.samples] == [(0.5, 0.5)]
    assert batch.counts.trained_rollouts == 1
    empty = build_batch([group(rollout(1), rollout(0))], CONFIG)
    assert empty.samples == ()
    assert empty.counts.trained_rollouts == 0
    assert mini_batches(empty, 2, np.random.default_rng(0)) == []


def test_mini_batches_hold_whole_rollouts():
    """4 rollouts with 5, 1, 1, 1 samples and 2 rollouts per step: 2 steps, all 8 samples, N = 2."""
    batch = build_batch([group(rollout(1, 2, 2, 2, 2, 2), rollout(0, 4)), group(rollout(1, 4), rollout(0, 4))], CONFIG)
    minis = mini_batches(batch, 2, np.random.default_rng(0))
    assert len(minis) == 2
    assert [len({s.rollout for s in mini}) for mini in minis] == [2, 2]
    assert sorted(s.rollout for mini in minis for s in mini) == [0, 0, 0, 0, 0, 1, 2, 3]
    for mini in minis:
        assert {s.rollout: s.weight for s in mini} == {s.rollout: 1 / (2 * (10 if s.rollout == 0 else 4)) for s in mini}


def test_mini_batch_sizes_differ_by_at_most_one_and_follow_the_seed():
    batch = build_batch([group(*[rollout(i, 1) for i in range(7)])], CONFIG)

    def split(seed):
        return [[s.rollout for s in m] for m in mini_batches(batch, 3, np.random.default_rng(seed))]

    assert [len(m) for m in split(1)] == [3, 2, 2]
    assert split(1) == split(1)
    assert split(1) != split(2)
    assert len(mini_batches(batch, 100, np.random.default_rng(0))) == 7
    assert mini_batches(batch, 1, np.random.default_rng(0)) == [batch.samples]


def test_micro_batches_are_bounded_and_lose_nothing():
    samples = [WeightedSample(sample(n - 2), 1.0, 1.0, 0) for n in (3, 9, 4, 4)]
    lengths = [[len(s.sample.ids_L) for s in m] for m in micro_batches(samples, 12)]
    assert lengths == [[3, 4, 4], [9]]
    assert [len(m) for m in micro_batches(samples, 1)] == [1, 1, 1, 1]
    assert micro_batches([], 12) == []


def test_padding_puts_the_advantage_on_trained_tokens_only():
    """Masks of 5 and 2 tokens, advantage 0.7: 7 values of 0.7 and nothing else."""
    padded = pad([WeightedSample(sample(5), 0.7, 0.1, 0), WeightedSample(sample(2, context=3), 0.7, 0.1, 0)])
    assert padded.ids_BL.tolist() == [[1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 0, 0]]
    assert padded.row_T.tolist() == [0, 0, 0, 0, 0, 1, 1]
    assert padded.column_T.tolist() == [2, 3, 4, 5, 6, 3, 4]
    assert padded.targets_T.tolist() == [3, 4, 5, 6, 7, 4, 5]
    assert padded.advantage_T.tolist() == [0.7] * 7
    assert padded.weight_T.tolist() == [0.1] * 7
    assert padded.logprobs_T.tolist() == [-1.0] * 7


def test_refuses_a_sample_that_cannot_be_trained():
    wrong = Sample("r9", np.zeros(2, np.int32), np.ones(2, np.bool_), np.zeros(2, np.float32), ())
    with pytest.raises(TrainingError, match="r9: the first id"):
        build_batch([group(RolloutResult("r9", 1.0, (wrong,)), rollout(0, 1))], CONFIG)
    short = Sample("r9", np.zeros(2, np.int32), np.zeros(2, np.bool_), np.zeros(1, np.float32), ())
    with pytest.raises(TrainingError, match="2 ids, 2 mask values and 1 log-probs"):
        build_batch([group(RolloutResult("r9", 1.0, (short,)), rollout(0, 1))], CONFIG)
    with pytest.raises(TrainingError, match="group g: rewards"):
        build_batch([group(rollout(math.nan, 1), rollout(0, 1))], CONFIG)
