"""Groups -> batch -> mini-batches -> micro-batches.

A *batch* is what one training step learns from. A *mini-batch* is one optimizer step and holds whole
rollouts, so that the number of optimizer steps depends on the run file and never on how many turns or samples
the rollouts had. A *micro-batch* is one forward and backward pass; its size changes memory and nothing else,
because every weight is fixed per mini-batch before samples are spread over micro-batches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from leyden.algorithms.advantages import advantages, has_spread
from leyden.algorithms.weights import token_weights
from leyden.config import AlgorithmConfig
from leyden.errors import TrainingError
from leyden.types import Sample


@dataclass(frozen=True, slots=True)
class RolloutResult:
    """A finished rollout. With `excluded` (the reason) it leaves its group's statistics and is not trained.

    A rollout without samples (it never called the model, or nothing could be kept) still has a reward that counts.
    """

    rollout_id: str
    reward: float | None
    samples: tuple[Sample, ...] = ()
    excluded: str | None = None


@dataclass(frozen=True, slots=True)
class GroupResult:
    group_id: str
    rollouts: tuple[RolloutResult, ...]


@dataclass(frozen=True, slots=True)
class WeightedSample:
    """A sample with the advantage and the weight of each of its trained tokens. `rollout` numbers kept rollouts."""

    sample: Sample
    advantage: float
    weight: float
    rollout: int


@dataclass(frozen=True, slots=True)
class BatchCounts:
    """What went into a batch. `groups_of_one` have a single kept rollout; `groups_empty` none."""

    groups: int
    groups_without_spread: int
    groups_of_one: int
    groups_empty: int
    trained_rollouts: int
    samples: int
    trained_tokens: int


@dataclass(frozen=True, slots=True)
class Batch:
    """Samples with at least one trained token, weighted as one optimizer step; `mini_batches` weights them anew."""

    samples: tuple[WeightedSample, ...]
    counts: BatchCounts
    config: AlgorithmConfig


def build_batch(groups: Sequence[GroupResult], config: AlgorithmConfig) -> Batch:
    """Weigh every sample of every kept rollout. Raises TrainingError for a sample that cannot be trained.

    Worked example (`grpo`, `rollout_mean`): a group with rewards [1, 1, 0] and a fourth, evicted rollout; the
    first rollout has two samples with 5 and 2 trained tokens, the others one sample with 4:

        advantages  [0.577, 0.577, -1.155]        the evicted rollout is in no statistic
        weights     1/(3*7), 1/(3*7), 1/(3*4), 1/(3*4)   of the four samples; N = 3
    """
    samples: list[WeightedSample] = []
    rewards_per_group: list[list[float]] = []
    rollouts = 0
    for group in groups:
        kept = [(r, r.reward) for r in group.rollouts if r.excluded is None and r.reward is not None]
        rewards_per_group.append([reward for _, reward in kept])
        advantages_R = _group_advantages(group.group_id, rewards_per_group[-1], config)
        for (rollout, _), advantage in zip(kept, advantages_R, strict=True):
            samples += [WeightedSample(s, advantage, 0.0, rollouts) for s in rollout.samples if _is_trained(s)]
            rollouts += 1
    weighted = _weigh(samples, config)
    return Batch(tuple(weighted), _count(rewards_per_group, weighted), config)


def mini_batches(batch: Batch, count: int, rng: np.random.Generator) -> list[tuple[WeightedSample, ...]]:
    """Deal the rollouts that have a trained token to `count` optimizer steps, evenly (sizes differ by at most one).

    A rollout's samples stay together; N and T of the weights are those of the mini-batch; nothing is left over. Fewer
    rollouts than `count` give fewer mini-batches. The order is shuffled by `rng` if there is more than one.

    Worked example: 4 rollouts with 5, 1, 1 and 1 samples in 2 mini-batches: 2 optimizer steps of 2 rollouts
    each, all 8 samples, each weight divided by N = 2.
    """
    rollouts = sorted({s.rollout for s in batch.samples})
    count = min(count, len(rollouts))
    if count <= 1:
        return [batch.samples] if batch.samples else []
    parts = np.array_split(rng.permutation(np.asarray(rollouts)), count)
    members = [frozenset(part.tolist()) for part in parts]
    return [tuple(_weigh([s for s in batch.samples if s.rollout in part], batch.config)) for part in members]


def needs_forward(sample: WeightedSample, config: AlgorithmConfig) -> bool:
    """Whether the sample has a gradient at all. It counts in N either way."""
    return sample.advantage != 0 or config.kl_coef > 0 or config.entropy_coef > 0


def micro_batches(samples: Sequence[WeightedSample], max_tokens: int) -> list[list[WeightedSample]]:
    """Split by length so that rows x longest row <= `max_tokens`. A longer sample gets a micro-batch of its own.

    Worked example: lengths [3, 9, 4, 4] with max_tokens 12 become [3, 4, 4] (3 rows x 4) and [9].
    """
    ordered = sorted(samples, key=lambda s: len(s.sample.ids_L))
    result: list[list[WeightedSample]] = []
    for sample in ordered:
        if result and (len(result[-1]) + 1) * len(sample.sample.ids_L) <= max_tokens:
            result[-1].append(sample)
        else:
            result.append([sample])
    return result


def _group_advantages(group_id: str, rewards: Sequence[float], config: AlgorithmConfig) -> list[float]:
    try:
        return advantages(rewards, config.advantage).tolist() if rewards else []
    except ValueError as error:
        raise TrainingError(f"group {group_id}: {error}") from error


def _is_trained(sample: Sample) -> bool:
    length = len(sample.ids_L)
    if not length == len(sample.mask_L) == len(sample.logprobs_L):
        raise TrainingError(
            f"rollout {sample.rollout_id}: a sample has {length} ids, {len(sample.mask_L)} mask values and "
            f"{len(sample.logprobs_L)} log-probs; they must be of one length"
        )
    if length and sample.mask_L[0]:
        raise TrainingError(
            f"rollout {sample.rollout_id}: the first id of a sample is marked as sampled; nothing precedes it"
        )
    return bool(sample.mask_L.any())


def _weigh(samples: Sequence[WeightedSample], config: AlgorithmConfig) -> list[WeightedSample]:
    """The same samples with the weights of one optimizer step over exactly their rollouts."""
    tokens_by_rollout: Counter[int] = Counter()
    for s in samples:
        tokens_by_rollout[s.rollout] += int(s.sample.mask_L.sum())
    rollouts = list(tokens_by_rollout)
    weights_R = token_weights([tokens_by_rollout[r] for r in rollouts], config.weights, config.constant_tokens)
    weight_of = dict(zip(rollouts, weights_R.tolist(), strict=True))
    return [replace(s, weight=weight_of[s.rollout]) for s in samples]


def _count(rewards_per_group: Sequence[Sequence[float]], samples: Sequence[WeightedSample]) -> BatchCounts:
    return BatchCounts(
        groups=len(rewards_per_group),
        groups_without_spread=sum(len(r) > 1 and not has_spread(r) for r in rewards_per_group),
        groups_of_one=sum(len(r) == 1 for r in rewards_per_group),
        groups_empty=sum(not r for r in rewards_per_group),
        trained_rollouts=len({s.rollout for s in samples}),
        samples=len(samples),
        trained_tokens=sum(int(s.sample.mask_L.sum()) for s in samples),
    )
