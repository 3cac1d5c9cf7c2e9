"""The turns of one attempt as a tree: a turn is the child of the turn whose tokens its prompt extends exactly.

A node stores only its own tokens, so a position in a sequence is a sum along the path from the root.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from leyden.errors import CaptureError
from leyden.types import Turn


@dataclass(frozen=True, slots=True)
class Tree:
    """Turns by id in ascending order, the children of each, and `end_tokens`: the length of the path up to
    and including the turn's sampled ids."""

    turns: dict[int, Turn]
    children: dict[int, tuple[int, ...]]
    end_tokens: dict[int, int]

    def path(self, turn_id: int) -> tuple[int, ...]:
        """Turn ids from the root to `turn_id`."""
        reverse = [turn_id]
        while (parent := self.turns[reverse[-1]].parent_id) is not None:
            reverse.append(parent)
        return tuple(reversed(reverse))

    def leaves(self) -> tuple[int, ...]:
        """Turns without children, in order of turn ids."""
        return tuple(t for t in self.turns if not self.children[t])

    def keep(self, turn_ids: Iterable[int]) -> Tree:
        """The tree without the other turns. `turn_ids` must hold the parents of what it holds."""
        kept = set(turn_ids)
        return Tree(
            turns={t: turn for t, turn in self.turns.items() if t in kept},
            children={t: tuple(c for c in self.children[t] if c in kept) for t in self.children if t in kept},
            end_tokens={t: end for t, end in self.end_tokens.items() if t in kept},
        )


def build_tree(turns: Sequence[Turn]) -> Tree:
    """Order turns by id and link them.

    Raises CaptureError if they are not one attempt's complete record: another rollout or attempt among them,
    an id twice, a parent that is missing or younger, version spans that do not add up to the sampled ids.
    """
    ordered = {turn.turn_id: turn for turn in sorted(turns, key=lambda t: t.turn_id)}
    if len(ordered) != len(turns):
        raise CaptureError(f"rollout {turns[0].rollout_id}: {len(turns) - len(ordered)} turn ids come twice")
    children: dict[int, list[int]] = {turn_id: [] for turn_id in ordered}
    end_tokens: dict[int, int] = {}
    first = next(iter(ordered.values()), None)
    for turn_id, turn in ordered.items():
        _check(turn, first)
        start = 0
        if turn.parent_id is not None:
            if turn.parent_id not in end_tokens:
                raise CaptureError(
                    f"rollout {turn.rollout_id}: turn {turn_id} extends turn {turn.parent_id}, "
                    "which is not an earlier committed turn of this attempt"
                )
            children[turn.parent_id].append(turn_id)
            start = end_tokens[turn.parent_id]
        end_tokens[turn_id] = start + len(turn.delta_P) + len(turn.sampled_T)
    return Tree(ordered, {t: tuple(c) for t, c in children.items()}, end_tokens)


def _check(turn: Turn, first: Turn | None) -> None:
    if first is not None and (turn.rollout_id, turn.attempt) != (first.rollout_id, first.attempt):
        raise CaptureError(
            f"turns of rollout {turn.rollout_id} attempt {turn.attempt} and of rollout {first.rollout_id} "
            f"attempt {first.attempt} cannot form one tree"
        )
    covered = sum(span.length for span in turn.spans)
    if covered != len(turn.sampled_T):
        raise CaptureError(
            f"rollout {turn.rollout_id}: turn {turn.turn_id} has {len(turn.sampled_T)} sampled ids, "
            f"but its version spans cover {covered}"
        )
