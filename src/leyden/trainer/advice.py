"""Pure: is a run learning at all? Warnings from the last lines of metrics.jsonl, each with what to do."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from leyden.types import Json

WINDOW_STEPS = 5
EQUAL_GROUPS_SHARE = 0.9
EXCLUDED_SHARE = 0.5
LOGPROB_DIFF_MAX = 0.5
LOGPROB_DIFF_MEAN = 0.02
ENTROPY_FACTOR = 3.0
SAMPLES_PER_ROLLOUT = 2.0


def advice(lines: Sequence[Json]) -> list[str]:
    """Warnings for the newest step of `lines` (those that hold, oldest first; evaluations are passed over)."""
    steps = [line for line in lines if line["event"] in ("step", "skip")]
    if not steps:
        return []
    found = (_equal_groups(steps), _excluded(steps[-1]), _mismatch(steps[-1]), _entropy(steps), _forks(steps[-1]))
    return [warning for warning in found if warning is not None]


def _equal_groups(steps: Sequence[Json]) -> str | None:
    window = [s for s in steps[-WINDOW_STEPS:] if s.get("groups")]
    groups = sum(s["groups"] for s in window)
    equal = sum(s["groups_without_spread"] for s in window)
    newest = steps[-1]
    if newest.get("groups") and newest["groups_without_spread"] == newest["groups"]:
        return (
            f"all {newest['groups']} groups of this step have equal rewards (mean {_number(newest.get('reward'))}): "
            "nothing was learned from it; use easier or harder tasks, or a larger trainer.group_size"
        )
    if len(window) == WINDOW_STEPS and equal >= EQUAL_GROUPS_SHARE * groups:
        return (
            f"{equal} of the {groups} groups of the last {WINDOW_STEPS} steps have equal rewards: almost nothing is "
            "learned; use easier or harder tasks, or a larger trainer.group_size"
        )
    return None


def _excluded(newest: Json) -> str | None:
    excluded, rollouts = newest.get("excluded") or {}, newest.get("rollouts") or 0
    count = sum(excluded.values())
    if not rollouts or count < EXCLUDED_SHARE * rollouts:
        return None
    kinds = ", ".join(f"{kind} {n}" for kind, n in sorted(excluded.items()))
    made_none = "no_calls" in (newest.get("outcomes") or excluded)
    hint = "; does the harness use OPENAI_BASE_URL (or its family's variable)?" if made_none else ""
    return f"{count} of {rollouts} rollouts were left out ({kinds}){hint}"


def _mismatch(newest: Json) -> str | None:
    largest, mean = newest.get("max_logprob_diff") or 0.0, newest.get("mean_logprob_diff") or 0.0
    if largest <= LOGPROB_DIFF_MAX and mean <= LOGPROB_DIFF_MEAN:
        return None
    return (
        f"recorded log-probs differ from the trainer's by {mean:.3g} on average, {largest:.3g} at most: sampler and "
        "trainer do not compute the same distribution (temperature, precision, weights)"
    )


def _entropy(steps: Sequence[Json]) -> str | None:
    known = [s["entropy"] for s in steps if s.get("entropy")]
    if len(known) <= WINDOW_STEPS:
        return None
    first = median(known[:WINDOW_STEPS])
    if known[-1] <= ENTROPY_FACTOR * first:
        return None
    return f"entropy rose from {first:.3g} to {known[-1]:.3g}: the policy may be falling apart; lower optimizer.lr"


def _forks(newest: Json) -> str | None:
    rollouts = newest.get("trained_rollouts") or 0
    if not rollouts or newest["samples"] <= SAMPLES_PER_ROLLOUT * rollouts:
        return None
    causes = newest.get("forks") or {}
    most = f"; the most frequent cause is {max(causes, key=causes.__getitem__)!r}" if causes else ""
    return f"{newest['samples'] / rollouts:.1f} samples per rollout: prompts do not extend what was recorded{most}"


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.3g}"
