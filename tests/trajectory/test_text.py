"""Prompts without messages: which turn a text continues."""

from __future__ import annotations

import numpy as np

from leyden.trajectory.causes import ForkCause
from leyden.trajectory.meaning import extend_key
from leyden.trajectory.nodes import Conversations, Node
from leyden.trajectory.text import TextContinuation, find_text, prompt_keys, root_cause


def node(turn_id: int, prompt: str | list[int], reply: str, *, stop_string: str | None = None) -> Node:
    keys = prompt_keys(prompt)
    message = {"role": "assistant", "content": reply}
    return Node(
        turn_id=turn_id,
        parent=None,
        delta_P=np.array([1], np.int32),
        sampled_T=np.array([2], np.int32),
        key=extend_key(keys[-1], message),
        prompt_key=keys[-1],
        first_key=keys[1],
        tools_key=b"",
        depth=len(prompt),
        reply=message,
        has_reasoning=False,
        stop_string=stop_string,
    )


def known(*nodes: Node) -> Conversations:
    conversations = Conversations()
    for one in nodes:
        conversations.add(one)
    return conversations


def test_a_text_continues_the_turn_with_the_longest_text_that_it_begins_with() -> None:
    first, second = node(1, "Q: é\nA:", " yes"), node(2, "Q: é\nA: yes\nQ: b\nA:", "")
    conversations = known(first, second)
    assert find_text(conversations, "Q: é\nA: yes\nQ: b\nA: more") == TextContinuation(None, second, " more")
    assert find_text(conversations, "Q: é\nA: yes\nQ: c") == TextContinuation(None, first, "\nQ: c")
    assert find_text(conversations, "Q: é\nA: yes") == TextContinuation(None, first, "")


def test_choices_of_one_call_are_told_apart() -> None:
    conversations = known(node(1, "p", "a"), node(2, "p", "ab"), node(3, "p", "a"))
    assert [find_text(conversations, text).parent.turn_id for text in ("pabc", "pac")] == [2, 3]  # type: ignore[union-attr]


def test_causes() -> None:
    conversations = known(node(1, "Q", "A"), node(2, "X", "Y", stop_string="Z"))
    causes = {text: find_text(conversations, text).cause for text in ("Q", "QB", "W", "XY", "")}
    assert causes == {
        "Q": ForkCause.REPEATED,
        "QB": ForkCause.REPLY_REWRITTEN,
        "W": ForkCause.NEW_CONVERSATION,
        "XY": ForkCause.STOP_STRING,
        "": ForkCause.NEW_CONVERSATION,
    }
    assert find_text(known(), "Q") == TextContinuation()


def test_ids_and_texts_are_different_prompts() -> None:
    conversations = known(node(1, [5, 6], "A"))
    assert root_cause(conversations, [5, 6]) == ForkCause.REPEATED
    assert root_cause(conversations, [5, 6, 7]) == ForkCause.REPLY_REWRITTEN
    assert root_cause(conversations, [5]) == ForkCause.NEW_CONVERSATION
    assert root_cause(conversations, "[5,6]") == ForkCause.NEW_CONVERSATION
