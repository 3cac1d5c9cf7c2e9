"""Masks and ids of samples, asserted directly. The worked example is the one of
`leyden.trajectory.samples`.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from leyden.errors import CaptureError
from leyden.trajectory.samples import SampleCounts, build_samples
from leyden.trajectory.tree import build_tree
from leyden.types import FinishReason, Sample, Turn, VersionSpan


def turn(
    turn_id: int,
    delta: list[int],
    sampled: list[int],
    parent: int | None = None,
    logprobs: list[float] | str | None = "auto",
    rollout: str = "r1",
    attempt: int = 1,
    cause: str | None = None,
    spans: tuple[VersionSpan, ...] | None = None,
) -> Turn:
    values = [-float(i) for i in sampled] if logprobs == "auto" else logprobs
    return Turn(
        turn_id=turn_id,
        rollout_id=rollout,
        attempt=attempt,
        parent_id=parent,
        delta_P=np.array(delta, np.int32),
        sampled_T=np.array(sampled, np.int32),
        logprobs_T=None if values is None else np.array(values, np.float32),
        spans=(VersionSpan(0, len(sampled)),) if spans is None else spans,
        finish_reason=FinishReason.STOP,
        fork_cause=cause,
    )


def ids(sample: Sample) -> list[int]:
    return sample.ids_L.tolist()


def mask(sample: Sample) -> list[int]:
    return sample.mask_L.astype(int).tolist()


WORKED = [
    turn(1, [1, 2], [7, 9]),
    turn(2, [3], [8], parent=1),
    turn(3, [4, 5], [6], parent=1, cause="reply dropped"),
    turn(4, [1], [5, 5], cause="compaction"),
]


def test_worked_example():
    built = build_samples(WORKED)
    assert [(ids(s), mask(s), s.turn_ids) for s in built.samples] == [
        ([1, 2, 7, 9, 3, 8], [0, 0, 1, 1, 0, 1], (1, 2)),
        ([1, 2, 7, 9, 4, 5, 6], [0, 0, 0, 0, 0, 0, 1], (1, 3)),
        ([1, 5, 5], [0, 1, 1], (4,)),
    ]
    assert built.samples[0].logprobs_L.tolist() == [0, 0, -7, -9, 0, -8]
    assert built.samples[1].logprobs_L.tolist() == [0, 0, 0, 0, 0, 0, -6]
    assert built.counts == SampleCounts()
    first = built.samples[0]
    assert (first.ids_L.dtype, first.mask_L.dtype, first.logprobs_L.dtype) == (np.int32, np.bool_, np.float32)


def test_worked_example_with_a_leaf_left_out():
    built = build_samples(WORKED, max_tokens=6)
    assert [(ids(s), mask(s)) for s in built.samples] == [
        ([1, 2, 7, 9, 3, 8], [0, 0, 1, 1, 0, 1]),
        ([1, 5, 5], [0, 1, 1]),
    ]
    assert built.counts == SampleCounts(cut=0, left_out=1, tokens_left_out=1)


def test_worked_example_with_a_path_cut():
    built = build_samples(WORKED, max_tokens=5)
    assert [(ids(s), mask(s), s.turn_ids) for s in built.samples] == [
        ([1, 2, 7, 9], [0, 0, 1, 1], (1,)),
        ([1, 5, 5], [0, 1, 1], (4,)),
    ]
    assert built.counts == SampleCounts(cut=1, left_out=1, tokens_left_out=2)


def test_order_of_turns_given_does_not_matter():
    assert [ids(s) for s in build_samples(WORKED[::-1]).samples] == [ids(s) for s in build_samples(WORKED).samples]


def test_separator_after_the_assistant_turn_is_context():
    """The newline after the closing tag is in the next prompt, was never sampled and has no log-prob."""
    (sample,) = build_samples([turn(1, [1], [7, 151645]), turn(2, [198, 8, 9], [10], parent=1)]).samples
    assert ids(sample) == [1, 7, 151645, 198, 8, 9, 10]
    assert mask(sample) == [0, 1, 1, 0, 0, 0, 1]
    assert sample.logprobs_L.tolist() == [0, -7, -151645, 0, 0, 0, -10]


@pytest.mark.parametrize("stripped", [False, True])
def test_a_stop_token_that_was_not_recorded_is_context(stripped):
    """The server left the stop token out, the next prompt closes the turn with it: one sample, and what was
    not recorded as sampled is not trained.
    """
    sampled, closed = ([7], [2, 198, 8]) if stripped else ([7, 2], [198, 8])
    (sample,) = build_samples([turn(1, [1], sampled), turn(2, closed, [9], parent=1)]).samples
    assert ids(sample) == [1, 7, 2, 198, 8, 9]
    assert mask(sample) == [0, 1, int(not stripped), 0, 0, 1]


def test_another_closing_token_begins_another_tree():
    """The prompt closes the turn otherwise than it was sampled."""
    built = build_samples([turn(1, [1], [7, 2]), turn(2, [1, 7, 32007, 198, 8], [9], cause="rerendered_by_engine")])
    assert [(ids(s), mask(s)) for s in built.samples] == [
        ([1, 7, 2], [0, 1, 1]),
        ([1, 7, 32007, 198, 8, 9], [0, 0, 0, 0, 0, 1]),
    ]


def test_a_rendered_reply_begins_another_tree():
    """The arguments were written again with other blanks."""
    built = build_samples([turn(1, [1], [5, 6, 7]), turn(2, [1, 5, 9, 6, 7, 8], [4], cause="rerendered_by_engine")])
    assert [(ids(s), mask(s)) for s in built.samples] == [
        ([1, 5, 6, 7], [0, 1, 1, 1]),
        ([1, 5, 9, 6, 7, 8, 4], [0, 0, 0, 0, 0, 0, 1]),
    ]


def test_two_results_in_one_turn_are_context():
    (sample,) = build_samples([turn(1, [1], [7]), turn(2, [50, 51, 60, 61], [9], parent=1)]).samples
    assert (ids(sample), mask(sample)) == ([1, 7, 50, 51, 60, 61, 9], [0, 1, 0, 0, 0, 0, 1])


def test_compaction_gives_two_samples():
    """Turns 1 and 2 extend, 3 is the summary call, 4 starts from the summary, 5 extends 4."""
    built = build_samples(
        [
            turn(1, [1], [2]),
            turn(2, [3], [4], parent=1),
            turn(3, [5], [6], parent=2),
            turn(4, [1, 6], [7], cause="compaction"),
            turn(5, [8], [9], parent=4),
        ]
    )
    assert [(ids(s), mask(s)) for s in built.samples] == [
        ([1, 2, 3, 4, 5, 6], [0, 1, 0, 1, 0, 1]),
        ([1, 6, 7, 8, 9], [0, 0, 1, 0, 1]),
    ]


def test_empty_responses_give_no_sample():
    """Nothing sampled, nothing trained; a rollout without calls is an empty list."""
    built = build_samples([turn(1, [1, 2], [], logprobs=[])])
    assert built.samples == ()
    assert built.counts == SampleCounts(empty_responses=1)
    assert build_samples([]).samples == ()


def test_an_empty_leaf_does_not_split_a_path():
    built = build_samples([turn(1, [1], [2]), turn(2, [3], [], parent=1), turn(3, [4], [5], parent=1)])
    assert [(ids(s), mask(s)) for s in built.samples] == [([1, 2, 4, 5], [0, 1, 0, 1])]
    assert built.counts.empty_responses == 1


def test_an_empty_turn_inside_a_path_is_context():
    built = build_samples([turn(1, [1], []), turn(2, [3], [4], parent=1)])
    assert [(ids(s), mask(s)) for s in built.samples] == [([1, 3, 4], [0, 0, 1])]


def test_no_prompt_is_never_trained():
    """An answer to nothing, and whatever continues it, has no context to be trained on."""
    built = build_samples([turn(1, [], [3]), turn(2, [4], [5], parent=1), turn(3, [1], [6])])
    assert [ids(s) for s in built.samples] == [[1, 6]]
    assert built.counts == SampleCounts(no_prompt=2)


@pytest.mark.parametrize(
    "logprobs",
    [[-0.1, -0.2, -0.3, -0.4], [-0.1, -0.2], [-0.1, float("nan"), -0.3], [-0.1, float("-inf"), -0.3]],
)
def test_logprobs_that_do_not_fit_are_dropped_for_their_turn_alone(logprobs):
    """Never cut or padded; the other turn keeps its own."""
    built = build_samples([turn(1, [9], [1, 2, 3], logprobs=logprobs), turn(2, [9], [4], parent=1)])
    (sample,) = built.samples
    np.testing.assert_array_equal(sample.logprobs_L, np.array([0, np.nan, np.nan, np.nan, 0, -4], np.float32))
    assert mask(sample) == [0, 1, 1, 1, 0, 1]
    assert built.counts == SampleCounts(missing_logprobs=1, mismatched_logprobs=1)


def test_absent_logprobs_are_counted():
    built = build_samples([turn(1, [9], [1], logprobs=None)])
    assert np.isnan(built.samples[0].logprobs_L[1])
    assert built.counts == SampleCounts(missing_logprobs=1)


def test_limit_inside_an_observation_cuts_at_the_turn_before():
    """Ids, mask and log-probs end together, and the token count that weights use is 3."""
    built = build_samples([turn(1, [8], [1, 2, 3]), turn(2, [0] * 5, [4, 5, 6, 7], parent=1)], max_tokens=7)
    (sample,) = built.samples
    assert ids(sample) == [8, 1, 2, 3]
    assert mask(sample) == [0, 1, 1, 1]
    assert sample.logprobs_L.tolist() == [0, -1, -2, -3]
    assert built.counts == SampleCounts(cut=1, tokens_left_out=4)


def test_a_first_turn_over_the_limit_is_left_out():
    """A cut prompt would be trained as a context that the model never saw."""
    built = build_samples([turn(1, [1, 2, 3], [4])], max_tokens=3)
    assert built.samples == ()
    assert built.counts == SampleCounts(left_out=1, tokens_left_out=1)
    assert len(build_samples([turn(1, [1, 2, 3], [4])], max_tokens=4).samples) == 1


def test_no_token_is_added_or_masked_in_unless_it_was_sampled():
    """A response without an end-of-sequence id stays as it is; without a call there is no sample."""
    assert build_samples([]).samples == ()
    (sample,) = build_samples([turn(1, [1], [5, 6])]).samples
    assert (ids(sample), mask(sample)) == ([1, 5, 6], [0, 1, 1])


def test_control_tokens_in_tool_output_are_context():
    """Spans come from recorded calls, not from a search for control ids."""
    tail = [151645, 198, 151644, 77091, 198, 666]
    (sample,) = build_samples([turn(1, [1], [7]), turn(2, tail, [9], parent=1)]).samples
    assert mask(sample) == [0, 1, 0, 0, 0, 0, 0, 0, 1]


def test_every_sampled_token_is_trained_exactly_once():
    rng = np.random.default_rng(0)
    turns = []
    for turn_id in range(1, 60):
        parent = None if turn_id == 1 or rng.random() < 0.1 else int(rng.integers(1, turn_id))
        size = int(rng.integers(0, 4))
        turns.append(turn(turn_id, [1] * int(rng.integers(1, 4)), [turn_id] * size, parent))
    trained = Counter(int(token) for s in build_samples(turns).samples for token in s.ids_L[s.mask_L])
    assert trained == Counter(int(i) for t in turns for i in t.sampled_T)
    limited = build_samples(turns, max_tokens=12)
    kept = sum(int(s.mask_L.sum()) for s in limited.samples)
    assert all(len(s.ids_L) <= 12 for s in limited.samples)
    assert kept + limited.counts.tokens_left_out == sum(trained.values())


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        ([turn(2, [1], [2], parent=1)], "extends turn 1"),
        ([turn(1, [1], [2], parent=2), turn(2, [1], [2])], "extends turn 2"),
        ([turn(1, [1], [2]), turn(1, [1], [2])], "come twice"),
        ([turn(1, [1], [2]), turn(2, [1], [2], attempt=2)], "cannot form one tree"),
        ([turn(1, [1], [2]), turn(2, [1], [2], rollout="r2")], "cannot form one tree"),
        ([turn(1, [1], [2, 3], spans=(VersionSpan(0, 1),))], "version spans cover 1"),
    ],
)
def test_incomplete_records_are_refused(turns, message):
    with pytest.raises(CaptureError, match=message):
        build_tree(turns)
