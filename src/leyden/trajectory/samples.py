"""From a tree of turns to training samples. Pure numpy.

A sample is a root-to-leaf path with a loss mask. What the model sampled is trained once: a token shared by two leaves
belongs to the first kept leaf, leaves being taken in the order of their turn ids. Everything else (prompts, tool
output, templates, tokens that an earlier leaf trains) is context with mask 0. Which tokens were sampled is known from
the recorded calls alone; ids are never searched for control tokens, and none is ever added.

Worked example. Turn 2 continues turn 1 (a tool answered); turn 3 starts again from turn 1 (a reply was
dropped); turn 4 is a fresh conversation (compaction):

    turn 1  root         delta [1, 2]    sampled [7, 9]
    turn 2  child of 1   delta [3]       sampled [8]
    turn 3  child of 1   delta [4, 5]    sampled [6]
    turn 4  root         delta [1]       sampled [5, 5]

    leaf 2  ids  [1, 2, 7, 9, 3, 8]      mask [0, 0, 1, 1, 0, 1]     turns 1, 2
    leaf 3  ids  [1, 2, 7, 9, 4, 5, 6]   mask [0, 0, 0, 0, 0, 0, 1]  turns 1, 3
    leaf 4  ids  [1, 5, 5]               mask [0, 1, 1]              turn 4

With max_tokens 6 turn 3 does not fit: leaf 3 is left out, for turn 1 is trained by leaf 2 already. With
max_tokens 5 turns 2 and 3 do not fit and the path is cut after turn 1:

    leaf 1  ids  [1, 2, 7, 9]            mask [0, 0, 1, 1]           turn 1      (1 cut, 1 left out)
    leaf 4  as above
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from leyden.trajectory.tree import Tree, build_tree
from leyden.types import Logprobs, Sample, Turn


@dataclass(frozen=True, slots=True)
class SampleCounts:
    """What building samples met. `cut + left_out` is the number of leaves longer than the limit.

    cut                  samples that end at a turn boundary because the rest was over the limit
    left_out             leaves over the limit that gave no sample of their own
    tokens_left_out      sampled tokens over the limit, trained by no sample
    empty_responses      turns that sampled nothing
    no_prompt            turns without any prompt id (and what follows them): never trained
    missing_logprobs     turns trained without recorded log-probs
    mismatched_logprobs  those of them whose log-probs had another length, or a value that is not finite
    """

    cut: int = 0
    left_out: int = 0
    tokens_left_out: int = 0
    empty_responses: int = 0
    no_prompt: int = 0
    missing_logprobs: int = 0
    mismatched_logprobs: int = 0


@dataclass(frozen=True, slots=True)
class RolloutSamples:
    samples: tuple[Sample, ...]
    counts: SampleCounts


def build_samples(turns: Sequence[Turn], max_tokens: int | None = None) -> RolloutSamples:
    """The samples of one attempt, in leaf order. `max_tokens` bounds the length of each.

    Turns are kept whole: one that ends beyond the limit is left out together with what continues it. Raises
    CaptureError if the turns are not one attempt's complete record.
    """
    whole = build_tree(turns)
    prompted = whole.keep(_with_prompt(whole))
    tree = _without_empty_ends(prompted)
    fitting = _without_empty_ends(tree.keep(t for t in tree.turns if _fits(tree, t, max_tokens)))
    samples, owned = [], set[int]()
    for leaf in fitting.leaves():
        samples.append(_sample(fitting, leaf, owned))
        owned.update(fitting.path(leaf))
    return RolloutSamples(tuple(samples), _counts(whole, prompted, tree, fitting, max_tokens))


def trainable_logprobs(turn: Turn) -> Logprobs | None:
    """The turn's log-probs, or None unless there is one finite value for each sampled id (never cut or padded)."""
    logprobs = turn.logprobs_T
    if logprobs is None or len(logprobs) != len(turn.sampled_T) or not np.isfinite(logprobs).all():
        return None
    return logprobs


def _sample(tree: Tree, leaf: int, owned: set[int]) -> Sample:
    path = tree.path(leaf)
    ids, masks, logprobs = [], [], []
    for turn_id in path:
        turn = tree.turns[turn_id]
        context, sampled = len(turn.delta_P), len(turn.sampled_T)
        trained = turn_id not in owned
        known = trainable_logprobs(turn)
        recorded = np.full(sampled, np.nan, np.float32) if known is None else known
        ids += [turn.delta_P, turn.sampled_T]
        masks += [np.zeros(context, np.bool_), np.full(sampled, trained)]
        logprobs += [np.zeros(context, np.float32), recorded if trained else np.zeros(sampled, np.float32)]
    return Sample(
        rollout_id=tree.turns[leaf].rollout_id,
        ids_L=np.concatenate(ids).astype(np.int32, copy=False),
        mask_L=np.concatenate(masks),
        logprobs_L=np.concatenate(logprobs).astype(np.float32, copy=False),
        turn_ids=path,
    )


def _fits(tree: Tree, turn_id: int, max_tokens: int | None) -> bool:
    return max_tokens is None or tree.end_tokens[turn_id] <= max_tokens


def _with_prompt(tree: Tree) -> list[int]:
    """Turns whose conversation starts with at least one prompt id."""
    kept: list[int] = []
    seen: set[int] = set()
    for turn_id, turn in tree.turns.items():
        if len(turn.delta_P) > 0 if turn.parent_id is None else turn.parent_id in seen:
            kept.append(turn_id)
            seen.add(turn_id)
    return kept


def _without_empty_ends(tree: Tree) -> Tree:
    """Without turns that sampled nothing and are continued by none that did."""
    useful: set[int] = set()
    for turn_id in reversed(tree.turns):
        if len(tree.turns[turn_id].sampled_T) or any(child in useful for child in tree.children[turn_id]):
            useful.add(turn_id)
    return tree.keep(useful)


def _counts(whole: Tree, prompted: Tree, tree: Tree, fitting: Tree, max_tokens: int | None) -> SampleCounts:
    trained = [turn for turn in fitting.turns.values() if len(turn.sampled_T)]
    missing = [turn for turn in trained if trainable_logprobs(turn) is None]
    over = [leaf for leaf in tree.leaves() if not _fits(tree, leaf, max_tokens)]
    cut = len(_cut_ends(tree, fitting, over))
    return SampleCounts(
        cut=cut,
        left_out=len(over) - cut,
        tokens_left_out=sum(len(turn.sampled_T) for t, turn in tree.turns.items() if t not in fitting.turns),
        empty_responses=sum(not len(turn.sampled_T) for turn in whole.turns.values()),
        no_prompt=len(whole.turns) - len(prompted.turns),
        missing_logprobs=len(missing),
        mismatched_logprobs=sum(turn.logprobs_T is not None for turn in missing),
    )


def _cut_ends(tree: Tree, fitting: Tree, over: list[int]) -> set[int]:
    """The kept leaves at which a longer path was cut."""
    ends: set[int] = set()
    for leaf in over:
        ends.update([t for t in tree.path(leaf) if t in fitting.turns][-1:])
    return ends & set(fitting.leaves())
