"""What each conversation of an attempt was, and what its branches cost, by hand-made turns."""

from __future__ import annotations

import pytest

from leyden.trajectory.kinds import Fork, Kind, conversations, samples_without_side_calls
from leyden.types import Turn
from tests.trajectory.turns import turn

NEW = "new_conversation"
SYSTEM = list(range(100, 120))


def kinds(turns: list[Turn]) -> list[tuple[Kind, tuple[int, ...]]]:
    return [(c.kind, c.turns) for c in conversations(turns)]


def forks(turns: list[Turn]) -> list[Fork]:
    return [fork for c in conversations(turns) for fork in c.forks]


def test_a_title_call_before_the_first_main_call_is_a_side_call_and_no_fork() -> None:
    """Claude Code, opencode: the first turn has no cause, the main conversation says new_conversation."""
    turns = [
        turn(1, [1, 2, 3], [4]),
        turn(2, SYSTEM, [5], cause=NEW, tools=24),
        turn(3, [6], [7], 2, tools=24),
    ]
    assert kinds(turns) == [(Kind.SIDE_CALL, (1,)), (Kind.MAIN, (2, 3))]
    assert forks(turns) == []
    assert [s.turn_ids for s in samples_without_side_calls(turns)] == [(2, 3)]


def test_tools_decide_between_two_single_turns() -> None:
    assert kinds([turn(1, SYSTEM, [4]), turn(2, [1], [5], cause=NEW, tools=3)]) == [
        (Kind.SIDE_CALL, (1,)),
        (Kind.MAIN, (2,)),
    ]


@pytest.mark.parametrize("swapped", [False, True])
def test_the_longer_prompt_decides_where_neither_has_tools(swapped: bool) -> None:
    """aider's edit and its commit message: one turn each, no tools."""
    prompts = [[1, 2], SYSTEM] if swapped else [SYSTEM, [1, 2]]
    found = dict(kinds([turn(1, prompts[0], [4]), turn(2, prompts[1], [5], cause=NEW)]))
    main = 2 if swapped else 1
    assert found == {Kind.MAIN: (main,), Kind.SIDE_CALL: (3 - main,)}


def test_one_conversation_is_the_main_one() -> None:
    assert kinds([turn(1, [1], [2])]) == [(Kind.MAIN, (1,))]
    assert conversations([]) == ()


def test_a_sub_agent_lies_within_the_conversation_that_goes_on_after_it() -> None:
    turns = [
        turn(1, SYSTEM, [1], tools=4),
        turn(2, [50, 51], [2], cause=NEW, tools=3),
        *(turn(i, [60 + i], [i], i - 1, tools=3) for i in range(3, 9)),
        turn(9, [70], [3], 1, tools=4),
    ]
    assert kinds(turns) == [(Kind.MAIN, (1, 9)), (Kind.SUB_AGENT, (2, 3, 4, 5, 6, 7, 8))]
    assert forks(turns) == []


def test_a_sub_agent_by_its_words_is_one_even_after_the_main_conversation_ended() -> None:
    turns = [
        turn(1, SYSTEM, [1], tools=4),
        turn(2, [50], [2], cause="sub_agent", tools=3),
        turn(3, [51], [2], 2, tools=3),
    ]
    assert kinds(turns) == [(Kind.MAIN, (1,)), (Kind.SUB_AGENT, (2, 3))]


def test_agents_side_by_side_are_separate() -> None:
    turns = [
        turn(1, [1, 2], [3], tools=1),
        turn(2, [5, 6], [7], cause=NEW, tools=1),
        turn(3, [8], [9], 1, tools=1),
        turn(4, [8], [9], 2, tools=1),
        turn(5, [8], [9], 4, tools=1),
    ]
    assert kinds(turns) == [(Kind.SEPARATE, (1, 3)), (Kind.MAIN, (2, 4, 5))]


def test_branches_belong_to_the_conversation_whose_beginning_they_share() -> None:
    """And cost what their sample repeats: the shared path, or the whole prompt of a fresh tree."""
    turns = [
        turn(1, [1, 2, 3], [4]),
        turn(2, SYSTEM, [5, 5], cause=NEW, tools=2),
        turn(3, [6], [7], 2, tools=2),
        turn(4, [6, 6], [8], 2, cause="reply_dropped", tools=2),
        turn(5, [*SYSTEM, 9, 9], [7], cause="reply_rewritten", tools=2),
        turn(6, [1, 2, 3], [4], cause="repeated_request"),
        turn(7, [*SYSTEM, 1], [3], cause="compaction", tools=2),
        turn(8, [1], [3], 7, tools=2),
    ]
    assert kinds(turns) == [(Kind.SIDE_CALL, (1, 6)), (Kind.MAIN, (2, 3, 4, 5, 7, 8))]
    side, main = conversations(turns)
    assert (side.roots, side.forks) == ((1, 6), (Fork(6, "repeated_request", 3),))
    assert main.roots == (2, 5, 7)
    assert main.forks == (
        Fork(4, "reply_dropped", 22),
        Fork(5, "reply_rewritten", 22),
        Fork(7, "compaction", 21),
    )
    assert len(samples_without_side_calls(turns)) == 4


@pytest.mark.parametrize("cause", ["compaction", "history_rewritten"])
def test_what_looks_rewritten_is_none_if_the_conversation_goes_on_as_it_was(cause: str) -> None:
    turns = [
        turn(1, SYSTEM, [1], tools=4),
        turn(2, [*SYSTEM[:10], 7], [2], cause=cause),
        turn(3, [70], [3], 1, tools=4),
    ]
    assert kinds(turns) == [(Kind.MAIN, (1, 3)), (Kind.SIDE_CALL, (2,))]


def test_a_harness_that_never_continues_is_one_conversation() -> None:
    turns = [turn(1, [1], [9]), turn(2, SYSTEM, [5], cause=NEW)]
    turns += [turn(i, [*SYSTEM, *range(i)], [5], cause="reasoning_dropped_by_harness") for i in range(3, 7)]
    assert kinds(turns) == [(Kind.SIDE_CALL, (1,)), (Kind.MAIN, (2, 3, 4, 5, 6))]
    assert len(samples_without_side_calls(turns)) == 5


def test_without_continuity_conversations_are_told_apart_by_what_they_share() -> None:
    off = "continuity_off"
    turns = [turn(1, [1, 2, 3], [4]), turn(2, SYSTEM, [5], cause=off), turn(3, [*SYSTEM, 5, 6], [5], cause=off)]
    assert kinds(turns) == [(Kind.SIDE_CALL, (1,)), (Kind.MAIN, (2, 3))]
