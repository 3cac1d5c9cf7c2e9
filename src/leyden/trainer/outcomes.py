"""Pure: how rollouts ended, by kind, and what the first one of a kind says about itself."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass

from leyden.client import Rollout
from leyden.records import LAST_WORDS
from leyden.types import FailureClass, Json, RolloutState
from leyden.visible import visible

COMPLETED = "completed"
ADVICE = {
    "turns_spent": "raise harness.max_turns, or let the harness do with fewer calls",
    "context_full": "raise model.context_tokens, or shorten the harness's prompt",
    "no_calls": "does the harness take its base URL from OPENAI_BASE_URL, or its family's variable?",
    "refused": "docs/protocols.md says what is served",
}
_LIMIT = re.compile(r"harness\.limits\.([a-z_]+)")


def outcome(rollout: Rollout) -> str:
    """The kind of a finished rollout's end; of several that apply the one that explains the others.

    `cancelled`, `infrastructure` (the machinery failed, nobody is scored), `timed_out`, `limit_NAME` (over
    harness.limits.NAME), `turns_spent` (harness.max_turns), `context_full` (model.context_tokens), `crashed` (an exit
    code other than 0, or a signal), `refused` (no call of it was served), `no_calls` (it made none), `completed`.
    """
    if rollout.state is RolloutState.CANCELLED:
        return "cancelled"
    if rollout.failure is FailureClass.INFRASTRUCTURE:
        return "infrastructure"
    if rollout.timed_out:
        return "timed_out"
    if found := _LIMIT.search((rollout.reason or "").partition(LAST_WORDS)[0]):
        return f"limit_{found[1]}"
    if "budget_exceeded" in rollout.refusals:
        return "turns_spent"
    if "context_length_exceeded" in rollout.refusals:
        return "context_full"
    if rollout.refusals and rollout.turns == 0:
        return "refused"
    if rollout.failure is FailureClass.AGENT:
        return "crashed"
    return "no_calls" if rollout.turns == 0 else COMPLETED


def words(rollout: Rollout) -> str:
    """What is known of an end that is not COMPLETED: the reason, and the first call that was not served."""
    said = [rollout.reason] if rollout.reason else []
    if rollout.refusals:
        code, text = next(iter(rollout.refusals.items()))
        said.append(f"a model call was refused ({code}): {text}")
    if rollout.exit_code == 0 and not rollout.reason:
        said.insert(0, "the harness ended with exit 0")
    return visible("; ".join(said))


def headline(rollout: Rollout) -> str:
    """`crashed: rollout ID: exit 1; last words: ...`, with what to do about it where that is known."""
    kind = outcome(rollout)
    advice = f". {ADVICE[kind]}" if kind in ADVICE else ""
    return f"{kind}: rollout {rollout.rollout_id}: {words(rollout) or 'no call of the model'}{advice}"


def count(rollouts: Iterable[Rollout]) -> dict[str, int]:
    return dict(Counter(map(outcome, rollouts)))


def first_failures(rollouts: Iterable[Rollout]) -> dict[str, Json]:
    """For each kind but COMPLETED the first rollout that ended so, and its words."""
    found: dict[str, Json] = {}
    for rollout in sorted(rollouts, key=lambda r: r.change):
        kind = outcome(rollout)
        if kind not in (COMPLETED, *found):
            found[kind] = {"rollout": rollout.rollout_id, "reason": words(rollout)}
    return found


def failures(counts: Mapping[str, int], *, without: Container[str] = ()) -> dict[str, int]:
    """The kinds of ends that are not COMPLETED, without those that the caller shows elsewhere."""
    return {kind: n for kind, n in counts.items() if kind != COMPLETED and kind not in without and n}


@dataclass(frozen=True, slots=True)
class FirstFailures:
    """Says the first rollout of each kind of failure as soon as it has ended, and no other."""

    say: Callable[[str], None]
    seen: set[str]

    def __call__(self, rollout: Rollout) -> None:
        kind = outcome(rollout)
        if kind not in (COMPLETED, "cancelled", *self.seen):
            self.seen.add(kind)
            self.say(f"first rollout that ended so: {headline(rollout)}")
