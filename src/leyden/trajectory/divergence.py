"""Where does a tree that begins afresh part from what its conversation had before? For people who read trajectories."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from leyden.trajectory.kinds import Conversation, shared_ids
from leyden.trajectory.tree import Tree
from leyden.types import Ids

COMPARED = 8


@dataclass(frozen=True, slots=True, eq=False)
class Divergence:
    """The first `shared` ids of a root's prompt are those of turn `turn_id` with its prompt; then it has `theirs`, the
    root `ours`. Both go on to their ends.
    """

    turn_id: int
    shared: int
    theirs: Ids
    ours: Ids


def divergence(tree: Tree, conversation: Conversation, root: int) -> Divergence | None:
    """Compared with the newest ends that the conversation had when `root` began; None for its beginning."""
    before = [turn_id for turn_id in conversation.turns if turn_id < root]
    continued = {tree.turns[turn_id].parent_id for turn_id in before}
    ends = [turn_id for turn_id in before if turn_id not in continued][-COMPARED:]
    prompt = tree.turns[root].delta_P
    divergences = [_part(tree, turn_id, prompt) for turn_id in ends]
    return max(divergences, key=lambda diverged: (diverged.shared, diverged.turn_id), default=None)


def _part(tree: Tree, turn_id: int, prompt: Ids) -> Divergence:
    turns = [tree.turns[one] for one in tree.path(turn_id)]
    held = np.concatenate([part for turn in turns for part in (turn.delta_P, turn.sampled_T)])
    shared = shared_ids(held, prompt)
    return Divergence(turn_id, shared, held[shared:], prompt[shared:])
