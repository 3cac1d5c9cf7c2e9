from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from leyden.trajectory.causes import ForkCause, sibling_cause
from leyden.trajectory.continuity import extended
from leyden.trajectory.meaning import prefix_keys
from leyden.trajectory.nodes import Node
from tests.trajectory.messages import OTHER_TOOLS, assistant, known, node, search, system, user

ASK = [system("s"), user("u")]
FIRST = node(1, ASK, assistant("a", "thought", [("run", {"x": 1, "y": 2})]))


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([*ASK, FIRST.reply, user("more")], (1, 1, None)),
        ([*ASK, assistant("a", " thought\n", [("run", {"y": 2, "x": 1})]), user("more")], (1, 1, None)),
        ([*ASK, user("format error")], (None, 0, ForkCause.REPLY_DROPPED)),
        ([*ASK, assistant("a", None, [("run", {"x": 1, "y": 2})]), user("m")], (None, 0, ForkCause.REASONING_DROPPED)),
        ([*ASK, assistant("A"), user("more")], (None, 0, ForkCause.REPLY_REWRITTEN)),
        ([*ASK, FIRST.reply, assistant("mine"), user("more")], (None, 0, ForkCause.UNSAMPLED_REPLY)),
        ([system("s"), user("a summary")], (None, 0, ForkCause.NEW_CONVERSATION)),
        ([system("title this"), user("u")], (None, 0, ForkCause.NEW_CONVERSATION)),
        (ASK, (None, 0, ForkCause.REPEATED)),
    ],
)
def test_what_a_request_continues(messages: list[Any], expected: tuple[int | None, int, Any]) -> None:
    assert search(known(FIRST), messages) == expected


def test_a_first_turn_is_no_fork() -> None:
    assert search(known(), ASK) == (None, 0, None)


def test_changed_tools_and_stop_strings_are_never_bridged() -> None:
    assert search(known(FIRST), [*ASK, FIRST.reply, user("m")], OTHER_TOOLS) == (None, 0, ForkCause.TOOLS_CHANGED)
    stopped = node(1, ASK, assistant("a"), stop_string="END")
    assert search(known(stopped), [*ASK, stopped.reply, user("m")]) == (None, 0, ForkCause.STOP_STRING)


def test_the_longest_prefix_wins_and_sub_agents_find_their_own_parents() -> None:
    main = node(1, ASK, assistant("a"))
    later = node(2, [*ASK, main.reply, user("b")], assistant("c"), parent=main)
    side = node(3, [system("sub"), user("task")], assistant("s"))
    conversations = known(main, later, side)
    assert search(conversations, [*ASK, main.reply, user("b"), later.reply, user("d")]) == (2, 1, None)
    assert search(conversations, [system("sub"), user("task"), side.reply, user("go on")]) == (3, 1, None)
    assert search(conversations, [*ASK, main.reply, user("other")]) == (1, 1, None)


def test_siblings_are_named() -> None:
    main = node(1, ASK, assistant("a"))
    child_messages = [*ASK, main.reply, user("b")]
    child = node(2, child_messages, assistant("c"), parent=main)
    conversations = known(main, child)

    def cause(parent: Node | None, messages: list[Any]) -> Any:
        return sibling_cause(conversations, parent, messages, prefix_keys(messages))

    assert cause(main, child_messages) is ForkCause.REPEATED
    assert cause(main, [*child_messages, user("format error")]) is ForkCause.REPLY_DROPPED
    assert cause(main, [*child_messages, assistant("C"), user("d")]) is ForkCause.REPLY_REWRITTEN
    assert cause(main, [*ASK, main.reply, user("another way")]) is ForkCause.PARALLEL
    assert cause(child, [*child_messages, child.reply, user("d")]) is None
    assert cause(None, ASK) is ForkCause.REPEATED


def test_ids_that_extend_a_turn_find_it_without_its_messages() -> None:
    main = node(1, ASK, assistant("a"), delta=(1, 2), sampled=(3,))
    child = node(2, ASK, assistant("b"), parent=main, delta=(4,), sampled=(5,))
    conversations = known(main, child)

    def parent(*ids: int) -> int | None:
        found = extended(conversations, np.array(ids, np.int32))
        return found.turn_id if found else None

    assert parent(1, 2, 3, 9) == 1
    assert parent(1, 2, 3, 4, 5, 9) == 2
    assert parent(1, 2, 3, 4, 5) == 2
    assert parent(1, 2, 3) == 1
    assert parent(1, 2) is None
    assert parent(1, 2, 9, 4) is None
    assert child.prompt_ids() == [1, 2, 3, 4]


def test_a_node_survives_the_store() -> None:
    again = Node.from_json(FIRST.to_json(), turn_id=1, parent=None, delta_P=FIRST.delta_P, sampled_T=FIRST.sampled_T)
    for field in dataclasses.fields(Node):
        assert np.array_equal(getattr(again, field.name), getattr(FIRST, field.name)), field.name


def test_the_order_of_keys_and_ids_of_calls_do_not_count_but_types_do() -> None:
    def key(arguments: Any) -> bytes:
        return prefix_keys([assistant("", None, [("f", arguments)])])[1]

    assert key({"a": 1, "b": 2}) == key({"b": 2, "a": 1})
    assert key({"a": 1}) != key({"a": "1"})
    assert key("{oops") != key({})
