"""Validation at one policy version: every task `samples` times, with the evaluation's own sampling, never trained."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from leyden.config import EvalConfig
from leyden.trainer.collect import (
    Progress,
    exclusion,
    group_request,
    wait_until_terminal,
)
from leyden.trainer.display import named
from leyden.trainer.estimates import Estimate, estimate
from leyden.trainer.outcomes import count, failures, first_failures
from leyden.types import Json

if TYPE_CHECKING:
    from leyden.client import ControlClient, Group, Rollout

SCORED_ANYWAY = frozenset({"no_calls"})
"""Kinds of exclusion from training whose reward still counts here: the harness is judged as it is
deployed.
"""


@dataclass(frozen=True, slots=True)
class EvalResult:
    """`tasks` and `rollouts` were asked for, `rewarded` of the rollouts have a reward; the others are
    `missing` by reason and enter no mean. `estimates` are pass@k in the order asked for: a rollout passes with a reward
    of at least `pass_threshold`. `outcomes` and `first_failures` say how rollouts ended, as those of a step do."""

    step: int
    version: int
    tasks: int
    samples: int
    rollouts: int
    rewarded: int
    mean_reward: float | None
    estimates: tuple[Estimate, ...]
    missing: Mapping[str, int]
    no_calls: int
    seconds: float
    pass_threshold: float = 1.0
    outcomes: Mapping[str, int] = field(default_factory=dict)
    first_failures: Mapping[str, Json] = field(default_factory=dict)

    @property
    def coverage(self) -> float:
        return self.rewarded / self.rollouts

    def as_json(self) -> Json:
        known = asdict(self)
        del known["estimates"]
        passes = [e.as_json() for e in self.estimates]
        return known | {"coverage": self.coverage, "pass": passes, "seconds": round(self.seconds, 3)}

    def __str__(self) -> str:
        passes = ", ".join(str(e) for e in self.estimates)
        missing = ", ".join(f"{kind} {n}" for kind, n in sorted(self.missing.items()))
        parts = [passes] if self.mean_reward is None else [f"mean reward {self.mean_reward:.3f}", passes]
        parts.append(f"{self.rewarded}/{self.rollouts} rewarded" + (f" (missing: {missing})" if missing else ""))
        if failed := failures(self.outcomes, without={"no_calls", *self.missing}):
            parts.append(f"ended {named(failed)}")
        return ", ".join(parts)

    @property
    def nothing_measured(self) -> str | None:
        """Why the estimates say nothing of the model, or None."""
        if self.no_calls == self.rollouts:
            return "no rollout made a model call that was served"
        return "no rollout got a reward" if self.rewarded == 0 else None


async def evaluate(
    client: ControlClient,
    tasks: Sequence[Json],
    *,
    step: int,
    version: int,
    settings: EvalConfig,
    ks: Sequence[int] = (1,),
    seed: int = 0,
    on_progress: Callable[[Progress], None] | None = None,
    max_same_failures: int | None = None,
    filed_under: int | None = None,
    on_ended: Callable[[Rollout], None] | None = None,
) -> EvalResult:
    """Run the evaluation groups of `step` (those that exist already are not run again) and estimate
    pass@k. With `filed_under`, the gateway knows the groups by that step instead.
    """
    start = time.monotonic()
    known_as = step if filed_under is None else filed_under
    requests = [
        group_request("eval", known_as, slot, size=settings.samples, task=task, sampling=settings.sampling)
        for slot, task in enumerate(tasks)
    ]
    groups = await client.create_groups(requests)
    final = await wait_until_terminal(
        client, groups, on_progress, max_same_failures=max_same_failures, on_ended=on_ended
    )
    result = score(
        groups,
        final,
        step=step,
        version=version,
        ks=ks,
        seed=seed,
        seconds=time.monotonic() - start,
        pass_threshold=settings.pass_threshold,
    )
    await client.consume([group.group_id for group in groups])
    return result


def score(
    groups: Sequence[Group],
    final: Mapping[str, Rollout],
    *,
    step: int,
    version: int,
    ks: Sequence[int],
    seed: int,
    seconds: float,
    pass_threshold: float = 1.0,
) -> EvalResult:
    """Pure: final rollouts -> estimates with what is missing."""
    missing: Counter[str] = Counter()
    no_calls = 0
    rewards: list[list[float | None]] = []
    for group in groups:
        rewards.append([])
        for member in group.rollouts:
            rollout = final[member.rollout_id]
            kind = exclusion(rollout)
            no_calls += kind == "no_calls"
            kind = None if kind in SCORED_ANYWAY else kind
            if kind is None and rollout.reward is None:
                kind = "no_reward"
            if kind is not None:
                missing[kind] += 1
            rewards[-1].append(rollout.reward if kind is None else None)
    known = [r for task in rewards for r in task if r is not None]
    return EvalResult(
        step=step,
        version=version,
        tasks=len(groups),
        samples=max((group.size for group in groups), default=0),
        rollouts=sum(group.size for group in groups),
        rewarded=len(known),
        mean_reward=sum(known) / len(known) if known else None,
        estimates=tuple(estimate(rewards, k, threshold=pass_threshold, seed=seed) for k in ks),
        missing=dict(missing),
        no_calls=no_calls,
        seconds=seconds,
        pass_threshold=pass_threshold,
        outcomes=count(final.values()),
        first_failures=first_failures(final.values()),
    )
