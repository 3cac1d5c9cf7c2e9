"""From tasks to finished groups: create, wait, read back.

Waiting follows the gateway's feed of changes by cursor, so nothing is polled. The result is keyed by rollout
id and holds exactly the rollouts that were asked for: an id that the feed adds is ignored, a
change seen twice is taken once, and of two changes the later one holds. Which rollouts are left out, and why,
is decided by the pure function `exclusion`.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

from leyden.algorithms.batch import GroupResult, RolloutResult
from leyden.client import Group, Rollout
from leyden.config import SamplingConfig
from leyden.errors import CaptureError, TrainingError
from leyden.records import LAST_WORDS
from leyden.trainer.outcomes import words
from leyden.trajectory.kinds import fork_counts
from leyden.trajectory.samples import RolloutSamples, SampleCounts, build_samples
from leyden.types import TERMINAL, FailureClass, Json, RolloutState, Turn

if TYPE_CHECKING:
    from leyden.client import ControlClient

FEED_WAIT_S = 30.0
FEED_LIMIT = 1000
SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "max_tokens")


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the rollouts of a step are. `mean_reward` is over the rewards so far, None without one."""

    done: int
    total: int
    mean_reward: float | None
    elapsed_s: float

    @property
    def eta_s(self) -> float | None:
        """Remaining seconds if the rest takes as long per rollout as what is done, None before the first."""
        return self.elapsed_s * (self.total - self.done) / self.done if self.done else None


@dataclass(frozen=True, slots=True)
class Collected:
    """Finished groups, ready for `build_batch`, and what was met on the way.

    `reasons` gives the reason of each excluded rollout in words; `excluded` counts them by kind. `turns`, `attempts`
    and `sampled_tokens` are sums over all rollouts, `forks` over those that are not excluded: forks by cause, and
    side calls and other conversations by kind.
    """

    groups: tuple[GroupResult, ...]
    rollouts: tuple[Rollout, ...]
    samples: SampleCounts
    excluded: Mapping[str, int]
    reasons: Mapping[str, str]
    forks: Mapping[str, int]
    turns: int
    sampled_tokens: int
    attempts: int

    def rewards(self) -> list[float]:
        """Rewards of the rollouts that are not excluded."""
        return [
            r.reward for group in self.groups for r in group.rollouts if r.excluded is None and r.reward is not None
        ]


def group_request(
    kind: str, step: int, slot: int, *, size: int, task: Json, sampling: SamplingConfig | None = None
) -> Json:
    """The body of one group for POST /api/groups."""
    return {
        "kind": kind,
        "step": step,
        "slot": slot,
        "size": size,
        "task": task,
        "sampling": None if sampling is None else {name: getattr(sampling, name) for name in SAMPLING_FIELDS},
    }


async def wait_until_terminal(
    client: ControlClient,
    groups: Sequence[Group],
    on_progress: Callable[[Progress], None] | None = None,
    *,
    max_same_failures: int | None = None,
    on_ended: Callable[[Rollout], None] | None = None,
) -> dict[str, Rollout]:
    """The final state of every rollout of `groups`, by id. A rollout's own deadline ends it, never this wait.

    `on_ended` is called once for each rollout that ends during the wait, in the order of their ends. Raises
    TrainingError once the last `max_same_failures` rollouts that ended during the wait were all lost to the
    machinery for one and the same reason: the others would end like them.
    """
    start = time.monotonic()
    latest = {rollout.rollout_id: rollout for group in groups for rollout in group.rollouts}
    earlier = {rollout_id for rollout_id, rollout in latest.items() if rollout.state in TERMINAL}
    cursor = min((r.change for r in latest.values()), default=0)
    while True:
        if on_progress is not None:
            on_progress(progress(latest.values(), time.monotonic() - start))
        if all(r.state in TERMINAL for r in latest.values()):
            return latest
        changed, cursor = await client.rollouts(
            after=cursor, states=sorted(TERMINAL), wait_s=FEED_WAIT_S, limit=FEED_LIMIT, tasks=False
        )
        open_before = {rollout_id for rollout_id, r in latest.items() if r.state not in TERMINAL}
        merge(latest, changed)
        ended = [latest[i] for i in open_before if latest[i].state in TERMINAL]
        if on_ended is not None:
            for rollout in sorted(ended, key=lambda r: r.change):
                on_ended(rollout)
        count, reason = failed_alike(r for rollout_id, r in latest.items() if rollout_id not in earlier)
        if max_same_failures is not None and count >= max_same_failures:
            raise TrainingError(
                f"the last {count} rollouts that ended all failed alike, each after its last attempt, and none of them "
                f"by the agent's doing (trainer.max_same_failures): {reason}"
            )


def merge(latest: dict[str, Rollout], changed: Iterable[Rollout]) -> None:
    """Take newer changes of known rollouts into `latest`. Others are of other steps, or of other users."""
    for rollout in changed:
        known = latest.get(rollout.rollout_id)
        if known is not None and rollout.change > known.change:
            latest[rollout.rollout_id] = replace(rollout, task=known.task)


def failed_alike(rollouts: Iterable[Rollout]) -> tuple[int, str]:
    """How many of the rollouts that ended last were lost to the machinery for one and the same reason, and the newest
    one's reason. Reasons are the same if they differ only in words with digits or slashes: names, paths, seconds.
    """
    ended = sorted((r for r in rollouts if r.state in TERMINAL), key=lambda r: r.change, reverse=True)
    count, reason = 0, ended[0].reason or "" if ended else ""
    for rollout in ended:
        if rollout.failure is not FailureClass.INFRASTRUCTURE or _words(rollout.reason or "") != _words(reason):
            break
        count += 1
    return count, reason


def _words(reason: str) -> str:
    return re.sub(r"\S*[\d/]\S*", "#", reason.partition(LAST_WORDS)[0])


def progress(rollouts: Iterable[Rollout], elapsed_s: float) -> Progress:
    known = list(rollouts)
    done = [r for r in known if r.state in TERMINAL]
    rewards = [r.reward for r in done if r.reward is not None]
    return Progress(len(done), len(known), sum(rewards) / len(rewards) if rewards else None, elapsed_s)


def exclusion(rollout: Rollout) -> str | None:
    """Why a finished rollout takes no part in training, or None.

    `infrastructure`: the machinery failed and attempts ran out. `cancelled`. `no_calls`: the harness never called the
    model, so it was not this policy that earned the reward. `no_reward`. An agent's failure excludes nothing.
    """
    if rollout.state is RolloutState.CANCELLED:
        return "cancelled"
    if rollout.failure is FailureClass.INFRASTRUCTURE:
        return "infrastructure"
    if rollout.turns == 0:
        return "no_calls"
    return "no_reward" if rollout.reward is None else None


async def collect(
    client: ControlClient, groups: Sequence[Group], final: Mapping[str, Rollout], max_tokens: int | None
) -> Collected:
    """Read the turns of all rollouts that take part, as one body, and build their samples."""
    wanted = [r.rollout_id for r in final.values() if exclusion(r) is None]
    turns = await client.turns(wanted) if wanted else []
    return await asyncio.to_thread(assemble, groups, final, turns, max_tokens)


def assemble(
    groups: Sequence[Group], final: Mapping[str, Rollout], turns: Iterable[Turn], max_tokens: int | None
) -> Collected:
    """Pure: finished rollouts and their turns -> groups for `build_batch`, in the order of `groups`.

    A rollout whose turns are not the complete record that the gateway announced is excluded as `capture`.
    """
    turns_of: dict[str, list[Turn]] = defaultdict(list)
    for turn in turns:
        turns_of[turn.rollout_id].append(turn)
    rollouts = [final[r.rollout_id] for group in groups for r in group.rollouts]
    built: dict[str, RolloutSamples] = {}
    forks = Counter[str]()
    kinds: dict[str, str] = {}
    reasons: dict[str, str] = {}
    for rollout in rollouts:
        key, kind, why = rollout.rollout_id, exclusion(rollout), words(rollout)
        if kind is None:
            try:
                built[key] = _samples(rollout, turns_of[key], max_tokens)
                forks.update(fork_counts(turns_of[key]))
                continue
            except CaptureError as error:
                kind, why = "capture", str(error)
        kinds[key] = kind
        reasons[key] = f"{kind}: {why}" if why else kind
    return Collected(
        groups=tuple(_group_result(group, final, built, kinds) for group in groups),
        rollouts=tuple(rollouts),
        samples=_sum([b.counts for b in built.values()]),
        excluded=dict(Counter(kinds.values())),
        reasons=reasons,
        forks=dict(forks),
        turns=sum(r.turns for r in rollouts),
        sampled_tokens=sum(r.sampled_tokens for r in rollouts),
        attempts=sum(r.attempt for r in rollouts),
    )


def _samples(rollout: Rollout, turns: list[Turn], max_tokens: int | None) -> RolloutSamples:
    if any(turn.attempt != rollout.attempt for turn in turns):
        raise CaptureError(f"rollout {rollout.rollout_id} ended in attempt {rollout.attempt}; other turns came")
    if len(turns) != rollout.turns:
        raise CaptureError(
            f"rollout {rollout.rollout_id} has {rollout.turns} committed turns, {len(turns)} were read back"
        )
    return build_samples(turns, max_tokens)


def _group_result(
    group: Group, final: Mapping[str, Rollout], built: Mapping[str, RolloutSamples], kinds: Mapping[str, str]
) -> GroupResult:
    members = []
    for rollout in group.rollouts:
        key = rollout.rollout_id
        samples = built[key].samples if key in built else ()
        members.append(RolloutResult(key, final[key].reward, samples, kinds.get(key)))
    return GroupResult(group.group_id, tuple(members))


def _sum(counts: Sequence[SampleCounts]) -> SampleCounts:
    return SampleCounts(**{f.name: sum(getattr(c, f.name) for c in counts) for f in fields(SampleCounts)})
