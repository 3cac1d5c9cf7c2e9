"""Which messages are equal, value by value."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyden.trajectory.meaning import message_key, prefix_keys
from tests.trajectory.messages import assistant, system, tool, user


def with_arguments(arguments: Any) -> Any:
    return assistant("", None, [("f", arguments)])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": 1.0}, {"a": 1}),
        ({"a": -0.0}, {"a": 0}),
        ({"a": 1e3}, {"a": 1000}),
        ({"a": [1.50, {"b": 2.0}]}, {"a": [1.5, {"b": 2}]}),
        ({"a": 2**53 + 1}, {"a": float(2**53)}),
        ('{"a": 12345678901234567890123}', {"a": 1.2345678901234568e22}),
        ('{"a": 1e999}', {"a": None}),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ('{ "b" : "\\u00e9", "a": "\\/" }', {"a": "/", "b": "é"}),
        ('{"a": 1, "a": 2}', {"a": 2}),
        ("{oops", "{oops"),
    ],
)
def test_equal_arguments(one: Any, other: Any) -> None:
    assert message_key(with_arguments(one)) == message_key(with_arguments(other))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": 1}, {"a": "1"}),
        ({"a": 1}, {"a": True}),
        ({"a": 0}, {"a": False}),
        ({"a": 0}, {"a": None}),
        ({"a": None}, {}),
        ({"a": 1.5}, {"a": 1}),
        ({"a": [1, 2]}, {"a": [2, 1]}),
        ({"a": "x "}, {"a": "x"}),
        ({"a": "é"}, {"a": "e\u0301"}),
        ("{oops", {}),
        ("[1]", {"a": 1}),
        (f'{{"a": {"[" * 300}{"]" * 300}}}', {"a": None}),
        ('{"a": "\\ud800"}', {"a": None}),
    ],
)
def test_other_arguments(one: Any, other: Any) -> None:
    assert message_key(with_arguments(one)) != message_key(with_arguments(other))


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(st.dictionaries(st.text(), values, max_size=4))
def test_any_arguments_mean_the_same_as_their_text(arguments: dict[str, Any]) -> None:
    text = json.dumps(arguments, indent=1)
    assert message_key(with_arguments(text)) == message_key(with_arguments(json.loads(text)))


def test_blanks_count_in_what_the_harness_says_and_not_around_what_the_model_said() -> None:
    assert message_key(assistant(" a\n", "\nb ")) == message_key(assistant("a", "b"))
    assert message_key(assistant("a", " \n")) == message_key(assistant("a"))
    assert message_key(assistant("a b")) != message_key(assistant("a  b"))
    assert message_key(user("a ")) != message_key(user("a"))
    assert message_key(tool("a\n")) != message_key(tool("a"))


def test_roles_names_and_places_count_and_ids_do_not() -> None:
    assert len({message_key(m) for m in (system("a"), user("a"), tool("a"), assistant("a"))}) == 4
    call = assistant("", None, [("f", {}), ("g", {})])
    renamed = call | {"tool_calls": [c | {"id": "x"} for c in call["tool_calls"]]}
    assert message_key(call) == message_key(renamed)
    assert message_key(call) != message_key(assistant("", None, [("g", {}), ("f", {})]))
    assert message_key(tool("a") | {"tool_call_id": "1", "name": "f"}) == message_key(tool("a"))


def test_prefixes_are_told_apart_by_where_messages_end() -> None:
    one, other = [user("ab"), user("c")], [user("a"), user("bc")]
    assert prefix_keys(one)[2] != prefix_keys(other)[2]
    assert prefix_keys(one)[0] == prefix_keys(other)[0] == b""
    assert prefix_keys([*one, user("d")])[:3] == prefix_keys(one)
