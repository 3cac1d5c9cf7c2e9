"""How often conversations forked, why, and what that cost: `leyden show RUN_DIR --forks`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from leyden.cli.screen import TableParts
from leyden.errors import CaptureError
from leyden.trajectory.kinds import Kind, conversations, fork_counts
from leyden.trajectory.samples import build_samples
from leyden.types import Json, Turn

ORDER = tuple(Kind)


@dataclass(slots=True)
class Row:
    """One cause in conversations of one kind; the cause `conversation` stands for whole conversations."""

    times: int = 0
    rollouts: set[str] = field(default_factory=set)
    tokens: int = 0

    def add(self, rollout_id: str, tokens: int) -> None:
        self.times += 1
        self.rollouts.add(rollout_id)
        self.tokens += tokens


@dataclass(slots=True)
class ForkSums:
    """Sums over rollouts. `tokens` are those of all samples, `extra` those that forks alone put there."""

    rows: dict[tuple[Kind, str], Row] = field(default_factory=lambda: defaultdict(Row))
    rollouts: int = 0
    samples: int = 0
    side_samples: int = 0
    tokens: int = 0
    extra: int = 0
    unreadable: int = 0

    def add(self, rollout_id: str, turns: Sequence[Turn], max_tokens: int | None) -> None:
        try:
            samples = build_samples(turns, max_tokens).samples
            found = conversations(turns)
        except CaptureError:
            self.unreadable += 1
            return
        kind_of = {turn_id: c.kind for c in found for turn_id in c.turns}
        self.rollouts += 1
        self.samples += len(samples)
        self.side_samples += sum(kind_of[s.turn_ids[-1]] is Kind.SIDE_CALL for s in samples)
        self.tokens += sum(len(s.ids_L) for s in samples)
        for one in found:
            for fork in one.forks:
                self.rows[one.kind, fork.cause].add(rollout_id, fork.extra_tokens)
                self.extra += fork.extra_tokens
            if one.kind is not Kind.MAIN:
                own = sum(len(s.ids_L) for s in samples if s.turn_ids[-1] in one.turns)
                self.rows[one.kind, "conversation"].add(rollout_id, own)

    def ordered(self) -> list[tuple[tuple[Kind, str], Row]]:
        """The rows by kind, the most frequent cause first."""
        return sorted(self.rows.items(), key=lambda item: (ORDER.index(item[0][0]), -item[1].times, item[0][1]))

    def as_json(self) -> Json:
        rows = [
            {"conversation": kind, "cause": cause, "times": r.times, "rollouts": len(r.rollouts), "tokens": r.tokens}
            for (kind, cause), r in self.ordered()
        ]
        names = ("rollouts", "samples", "side_samples", "tokens", "extra", "unreadable")
        return {"branches": rows, **{name: getattr(self, name) for name in names}}


def count_forks(turns_of: Mapping[str, Sequence[Turn]], max_tokens: int | None = None) -> ForkSums:
    """Rollouts without a turn do not count."""
    sums = ForkSums()
    for rollout_id, turns in turns_of.items():
        if turns:
            sums.add(rollout_id, turns, max_tokens)
    return sums


def fork_table(turns_of: Mapping[str, Sequence[Turn]], max_tokens: int | None = None) -> TableParts:
    """A row per kind of conversation and cause, and in the title what all of it comes to."""
    sums = count_forks(turns_of, max_tokens)
    rows = [
        (kind, cause, str(row.times), str(len(row.rollouts)), str(row.tokens)) for (kind, cause), row in sums.ordered()
    ]
    return ("conversation", "cause", "times", "rollouts", "tokens"), rows, _title(sums)


def shown_forks(turns: Sequence[Turn]) -> dict[str, int]:
    """`fork_counts`, or nothing for an incomplete record."""
    try:
        return fork_counts(turns)
    except CaptureError:
        return {}


def _title(sums: ForkSums) -> str:
    if not sums.rollouts:
        return "no rollout has a recorded turn"
    each = f"{sums.samples / sums.rollouts:.2f} samples each"
    if sums.side_samples:
        each += f", {(sums.samples - sums.side_samples) / sums.rollouts:.2f} without side calls"
    share = sums.extra / sums.tokens if sums.tokens else 0.0
    title = f"{sums.rollouts} rollouts, {each}; forks repeat {sums.extra} of {sums.tokens} tokens ({share:.1%})"
    return title + (f"; {sums.unreadable} with an incomplete record left out" if sums.unreadable else "")
