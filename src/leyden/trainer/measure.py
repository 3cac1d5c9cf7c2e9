"""Pure: the numbers of one step, as they stand in metrics.jsonl."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from leyden.algorithms.batch import Batch
from leyden.trainer.collect import Collected
from leyden.trainer.outcomes import count, first_failures
from leyden.types import Json


def measure(
    collected: Collected,
    batch: Batch,
    update: Mapping[str, float | None],
    seconds: Mapping[str, float],
    *,
    pass_threshold: float = 1.0,
) -> Json:
    """Counts are of this step. `reward` (the mean) and `pass_rate` (the share of at least `pass_threshold`) are over
    rollouts that are not excluded, None without one. `outcomes` counts all rollouts by how they ended, and
    `first_failures` has the first one of each kind that is not `completed`.

    `sample_limits` are the non-zero counts of `SampleCounts`. `update` adds its own names (entropy, grad_norm, ...).
    """
    rewards = collected.rewards()
    return {
        "rollouts": len(collected.rollouts),
        "attempts": collected.attempts,
        "reward": sum(rewards) / len(rewards) if rewards else None,
        "pass_rate": sum(r >= pass_threshold for r in rewards) / len(rewards) if rewards else None,
        "outcomes": count(collected.rollouts),
        "first_failures": first_failures(collected.rollouts),
        "excluded": dict(collected.excluded),
        "turns": collected.turns,
        "sampled_tokens": collected.sampled_tokens,
        **asdict(batch.counts),
        "forks": dict(collected.forks),
        "sample_limits": {name: n for name, n in asdict(collected.samples).items() if n},
        **update,
        "seconds": dict(seconds),
    }
