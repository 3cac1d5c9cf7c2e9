"""What was each conversation of an attempt: the main one, a side call, a sub-agent? And what did its forks cost?

While an attempt runs nobody can tell: a title call may come before the agent's first call, and is then the first turn.
Afterwards the shape shows it. Pure: the turns of one attempt in, conversations out.

A conversation is a set of trees: one that began by itself, and those that began because the ids of an earlier one could
not be continued. Which of several conversations such a tree belongs to is seen by its first ids: it shares most with
its own. With `continuity: off` no cause says more, and a tree belongs where it shares half of the first prompt.

    turn 1  root  [title call]            no tools                   side_call
    turn 2  root  [system, user]          new_conversation, tools    main
    turn 3  child of 2
    turn 4  root  [system, user, ...]     reply_rewritten            main's second tree: one fork

A side call is a conversation of single turns without tools beside the main one. A sub-agent begins with the words of a
tool call, or begins and ends within a conversation that goes on after it. The main conversation is the one with the
most turns that is neither, then with the most tools, then with the longest prompt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from leyden.trajectory.causes import ForkCause
from leyden.trajectory.samples import build_samples
from leyden.trajectory.tree import Tree, build_tree
from leyden.types import Ids, Sample, Turn

BEGINNINGS = frozenset({ForkCause.NEW_CONVERSATION, ForkCause.SUB_AGENT})
DOUBTFUL = frozenset({ForkCause.COMPACTION, ForkCause.HISTORY_REWRITTEN})


class Kind(StrEnum):
    """`separate` is a conversation of its own that is none of the others: agents side by side, or one after another."""

    MAIN = "main"
    SIDE_CALL = "side_call"
    SUB_AGENT = "sub_agent"
    SEPARATE = "separate"


@dataclass(frozen=True, slots=True)
class Fork:
    """A turn that does not simply go on, in a conversation that it did not begin.

    `extra_tokens` is the context that its sample holds and an earlier one held already: the shared path for a second
    child, the whole prompt for a tree that begins afresh.
    """

    turn_id: int
    cause: str
    extra_tokens: int


@dataclass(frozen=True, slots=True)
class Conversation:
    """`roots` and `turns` in the order of their ids; `tools` is the most that one of them offered."""

    kind: Kind
    roots: tuple[int, ...]
    turns: tuple[int, ...]
    tools: int
    forks: tuple[Fork, ...]


def conversations(turns: Sequence[Turn]) -> tuple[Conversation, ...]:
    """The conversations of one attempt in the order of their first turns.

    Raises CaptureError if the turns are not one attempt's complete record.
    """
    tree = build_tree(turns)
    groups = _grouped(tree)
    main = _main(tree, groups)
    return tuple(_conversation(tree, group, _kind(tree, group, main)) for group in groups)


@dataclass(slots=True, eq=False)
class _Group:
    """Trees of one conversation: their turns, in order of ids, and the first root's ids."""

    roots: list[int]
    turns: list[int]
    cause: str | None
    prompt_P: Ids
    continued: bool

    def within(self, other: _Group) -> bool:
        """Whether `other` was there before and went on afterwards."""
        return other is not self and other.turns[0] < self.turns[0] and self.turns[-1] < other.turns[-1]


def _grouped(tree: Tree) -> list[_Group]:
    trees = _trees(tree)
    groups: list[_Group] = []
    for root, members in trees.items():
        turn = tree.turns[root]
        owner = _owner(tree, groups, turn, members)
        if owner is not None:
            owner.roots.append(root)
            owner.turns = sorted([*owner.turns, *members])
            owner.continued = owner.continued or len(members) > 1
        else:
            groups.append(_Group([root], members, turn.fork_cause, turn.delta_P, len(members) > 1))
    return groups


def _trees(tree: Tree) -> dict[int, list[int]]:
    """The turns under each root, roots in order."""
    root_of: dict[int, int] = {}
    for turn_id, turn in tree.turns.items():
        root_of[turn_id] = turn_id if turn.parent_id is None else root_of[turn.parent_id]
    members: dict[int, list[int]] = {}
    for turn_id, root in root_of.items():
        members.setdefault(root, []).append(turn_id)
    return members


def _owner(tree: Tree, groups: Sequence[_Group], turn: Turn, members: Sequence[int]) -> _Group | None:
    """The conversation that a root carries on; None if it begins one."""
    if turn.fork_cause is None or turn.fork_cause in BEGINNINGS:
        return None
    nearest = max(reversed(groups), key=lambda group: shared_ids(group.prompt_P, turn.delta_P), default=None)
    if nearest is None or (turn.fork_cause in DOUBTFUL and _outlived(tree, nearest, members)):
        return None
    if turn.fork_cause == ForkCause.CONTINUITY_OFF:
        unlike = 2 * shared_ids(nearest.prompt_P, turn.delta_P) < len(nearest.prompt_P)
        return None if unlike else nearest
    return nearest


def shared_ids(a: Ids, b: Ids) -> int:
    """How many first ids are the same."""
    size = min(len(a), len(b))
    differ = np.flatnonzero(a[:size] != b[:size])
    return int(differ[0]) if len(differ) else size


def _outlived(tree: Tree, owner: _Group, members: Sequence[int]) -> bool:
    """Whether turns that the owner's trees hold already go on after `members`: then these are no continuation."""
    return any(turn_id > members[-1] and tree.turns[turn_id].parent_id is not None for turn_id in owner.turns)


def _main(tree: Tree, groups: Sequence[_Group]) -> _Group | None:
    def rank(group: _Group) -> tuple[bool, int, int, int]:
        aside = group.cause == ForkCause.SUB_AGENT or any(group.within(other) and other.continued for other in groups)
        return not aside, len(group.turns), _tools(tree, group), len(group.prompt_P)

    return max(groups, key=rank, default=None)


def _kind(tree: Tree, group: _Group, main: _Group | None) -> Kind:
    if group is main or main is None:
        return Kind.MAIN
    if not group.continued and not _tools(tree, group):
        return Kind.SIDE_CALL
    return Kind.SUB_AGENT if group.cause == ForkCause.SUB_AGENT or group.within(main) else Kind.SEPARATE


def _tools(tree: Tree, group: _Group) -> int:
    return max(tree.turns[turn_id].tools for turn_id in group.turns)


def _conversation(tree: Tree, group: _Group, kind: Kind) -> Conversation:
    began = group.roots[0]
    turns = [tree.turns[turn_id] for turn_id in group.turns]
    forks = [_fork(tree, turn) for turn in turns if turn.fork_cause is not None and turn.turn_id != began]
    return Conversation(kind, tuple(group.roots), tuple(group.turns), _tools(tree, group), tuple(forks))


def _fork(tree: Tree, turn: Turn) -> Fork:
    extra = len(turn.delta_P) if turn.parent_id is None else tree.end_tokens[turn.parent_id]
    return Fork(turn.turn_id, str(turn.fork_cause), extra)


def fork_counts(turns: Sequence[Turn]) -> dict[str, int]:
    """Forks of one attempt by cause, and its conversations beside the main one by kind."""
    found = conversations(turns)
    causes = Counter(fork.cause for one in found for fork in one.forks)
    return dict(causes + Counter(str(one.kind) for one in found if one.kind is not Kind.MAIN))


def samples_without_side_calls(turns: Sequence[Turn], max_tokens: int | None = None) -> tuple[Sample, ...]:
    """`build_samples` without those that end in a side call: what continuity is measured by."""
    aside = {turn for c in conversations(turns) if c.kind is Kind.SIDE_CALL for turn in c.turns}
    return tuple(s for s in build_samples(turns, max_tokens).samples if s.turn_ids[-1] not in aside)
