"""Why a request continues nothing, from what it shows."""

from __future__ import annotations

from typing import Any

import pytest

from leyden.trajectory.causes import PIECE_CHARS, ForkCause, _stands_in, sibling_cause
from leyden.trajectory.meaning import prefix_keys
from leyden.trajectory.nodes import Conversations
from tests.trajectory.messages import OTHER_TOOLS, TOOLS, assistant, known, node, search, system, tool, user

SUMMARY = "<summary>\nThe user wants hi.txt.\nI wrote the first line of hi.txt and the test passes now.\n</summary>"
TOLD = "I wrote the first line of hi.txt and the test passes now."
PROMPT = "Find every place where hi.txt is opened, and say which of them closes it."
ASK = [system("s"), user("write hi.txt")]
CALL = assistant("", "hm", [("task", {"prompt": PROMPT, "kind": "search"})])
TWO = [*ASK, CALL, tool("ok")]


def after(*replies: Any) -> Conversations:
    """A conversation of as many turns; each reply but the last was answered by a tool."""
    messages, turns = list(ASK), known()
    for number, reply in enumerate(replies, start=1):
        turns.add(node(number, messages, reply, parent=turns.nodes.get(number - 1)))
        messages = [*messages, reply, tool("ok")]
    return turns


def cause(turns: Conversations, messages: list[Any], tools: bytes = TOOLS) -> Any:
    parent, _, found = search(turns, messages, tools)
    assert parent is None
    return found


SUMMED_UP = after(assistant("one"), assistant("two"), assistant(SUMMARY))


@pytest.mark.parametrize(
    "messages",
    [
        [ASK[0], user(f"So far: {TOLD} Go on.")],
        [*ASK, user(f'{{"summary": "{TOLD}"}}')],
        [ASK[0], user([{"type": "text", "text": "Before:"}, {"type": "text", "text": TOLD}])],
        [ASK[0], user("x"), assistant("Understood."), user(TOLD)],
    ],
)
def test_compaction_quotes_what_was_sampled(messages: list[Any]) -> None:
    assert cause(SUMMED_UP, messages) is ForkCause.COMPACTION


def test_without_a_system_message_the_same_tools_tell_compaction_from_a_review() -> None:
    review = [user(f"Rate this answer: {TOLD}")]
    assert cause(SUMMED_UP, review) is ForkCause.COMPACTION
    assert cause(SUMMED_UP, review, OTHER_TOOLS) is ForkCause.NEW_CONVERSATION
    assert cause(SUMMED_UP, [system("you rate"), *review]) is ForkCause.NEW_CONVERSATION


def test_an_error_message_that_quotes_the_reply_is_no_compaction() -> None:
    """mini-swe-agent leaves a reply that it cannot read out, and quotes it."""
    assert cause(after(assistant(SUMMARY)), [*ASK, user(f"No command found in: {TOLD}")]) is ForkCause.REPLY_DROPPED


def test_a_summary_in_the_middle_of_what_was_kept_is_a_compaction() -> None:
    """The first exchange stays, the rest becomes a summary: a branch under the first turn."""
    first = SUMMED_UP.nodes[1]
    messages = [*ASK, first.reply, tool("ok"), user(f"Then: {TOLD}")]
    assert search(SUMMED_UP, messages) == (1, 2, None)
    assert sibling_cause(SUMMED_UP, first, messages, prefix_keys(messages)) is ForkCause.COMPACTION


@pytest.mark.parametrize("words", [PROMPT, f"You are a helper. {PROMPT} Be brief."])
def test_a_sub_agent_begins_with_the_words_of_an_open_call(words: str) -> None:
    turns = after(assistant("one"), CALL)
    assert cause(turns, [system("helper"), user(words)], OTHER_TOOLS) is ForkCause.SUB_AGENT
    assert cause(turns, [ASK[0], user(words)]) is ForkCause.SUB_AGENT


def test_a_short_prompt_of_a_sub_agent_is_known_if_it_is_the_whole_message() -> None:
    turns = after(assistant("", None, [("task", {"prompt": "fix it", "tools": []})]))
    assert cause(turns, [system("helper"), user("fix it\n")]) is ForkCause.SUB_AGENT
    assert cause(turns, [system("helper"), user("please fix it")]) is ForkCause.NEW_CONVERSATION


def test_the_words_of_an_answered_call_begin_no_sub_agent() -> None:
    turns = after(CALL, assistant("done"))
    assert cause(turns, [system("helper"), user(PROMPT)]) is ForkCause.NEW_CONVERSATION


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([*ASK, CALL, tool("(left out)"), assistant("two"), tool("ok")], ForkCause.HISTORY_REWRITTEN),
        ([system("s, 12:01"), *TWO[1:]], ForkCause.HISTORY_REWRITTEN),
        ([ASK[0], user("trimmed"), assistant("two"), tool("ok")], ForkCause.HISTORY_REWRITTEN),
        ([*TWO, assistant("TWO"), tool("ok")], ForkCause.REPLY_REWRITTEN),
        ([*TWO, assistant("two"), assistant("mine"), tool("ok")], ForkCause.UNSAMPLED_REPLY),
        ([*TWO, user("never mind")], ForkCause.REPLY_DROPPED),
        ([*ASK, user("never mind")], ForkCause.REPLY_DROPPED),
        ([*ASK, assistant("", None, [("task", CALL["tool_calls"][0]["function"]["arguments"])]), tool("ok")],
         ForkCause.REASONING_DROPPED),
        ([*ASK, CALL | {"reasoning_content": "a digest"}, tool("ok")], ForkCause.REPLY_REWRITTEN),
        ([ASK[0], user("something else")], ForkCause.NEW_CONVERSATION),
        ([system("title"), user("write hi.txt")], ForkCause.NEW_CONVERSATION),
        (TWO, ForkCause.REPEATED),
    ],
)  # fmt: skip
def test_causes_of_a_request_after_two_turns(messages: list[Any], expected: ForkCause) -> None:
    turns = after(CALL, assistant("two"))
    turns = known(*turns.nodes.values())
    parent, _, found = search(turns, messages)
    if parent is not None:
        found = sibling_cause(turns, turns.nodes[parent], messages, prefix_keys(messages))
    assert found is expected


def test_two_samples_of_one_prompt_are_each_continued() -> None:
    one, two = node(1, ASK, assistant("a")), node(2, ASK, assistant("b"))
    turns = known(one, two)
    assert search(turns, [*ASK, assistant("a"), user("on")]) == (1, 1, None)
    assert search(turns, [*ASK, assistant("b"), user("on")]) == (2, 1, None)
    assert cause(turns, [*ASK, assistant("c"), user("on")]) is ForkCause.REPLY_REWRITTEN


@pytest.mark.parametrize("before", [0, PIECE_CHARS - 60, PIECE_CHARS - 1, PIECE_CHARS, 3 * PIECE_CHARS - 30])
def test_a_quote_is_found_wherever_it_stands_in_a_long_text(before: int) -> None:
    quote = "the words of a reply that are long enough to tell it from others"
    text = " " * before + quote + " " * PIECE_CHARS
    assert _stands_in(quote, text)
    assert not _stands_in(quote, text.replace("reply", "repl"))
