from __future__ import annotations

import typing
from typing import Any

import orjson
import pytest
from openai.types import CompletionCreateParams, completion_create_params

from leyden.errors import RequestError
from leyden.protocols import ChatChoice, ChatReply, ChatRequest, openai_completions
from leyden.protocols.fields import FIELDS, FieldClass, check_fields
from leyden.types import FinishReason
from tests.protocols.calls import NO_CALL

REQUEST = ChatRequest("m", prompt="x", include_usage=True)


def parse(**changes: Any) -> ChatRequest:
    return openai_completions.parse({"model": "m", "prompt": "x", **changes}, NO_CALL)


def answer(text: str = "hi", finish: FinishReason = FinishReason.STOP, n: int = 1) -> ChatReply:
    return ChatReply(7, "policy", 123, 10, [ChatChoice({"role": "assistant", "content": text}, finish, 5)] * n)


@pytest.mark.parametrize(
    ("prompt", "expected"), [("x", "x"), (["x"], "x"), ([3, 4], [3, 4]), ([[3, 4]], [3, 4]), ([0], [0])]
)
def test_prompts(prompt: Any, expected: Any) -> None:
    assert parse(prompt=prompt).prompt == expected


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (None, "prompt is missing"),
        ("", "prompt is empty"),
        ([], "prompt is empty"),
        ([""], "prompt is empty"),
        ([[]], "prompt is empty"),
        (["a", "b"], "prompt holds 2 prompts"),
        ([[1], [2]], "prompt holds 2 prompts"),
        (3, "prompt is a number; send a string or a list of token ids"),
        ({}, "prompt is an object"),
        ([1, "a"], r"prompt\[1\] is 'a'; token ids are 0 to 2147483647"),
        ([True], r"prompt\[0\] is True"),
        ([-1], r"prompt\[0\] is -1"),
        ([2**31], r"prompt\[0\] is 2147483648"),
        ([1.0], r"prompt\[0\] is 1.0"),
    ],
)
def test_prompts_that_are_refused(prompt: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        parse(prompt=prompt)
    assert (caught.value.status, str(caught.value.param).partition("[")[0]) == (400, "prompt")


def test_tokens_default_to_16_as_the_protocol_says() -> None:
    assert parse().max_tokens == 16
    assert parse(max_tokens=None).max_tokens is None
    assert parse(max_tokens=300).max_tokens == 300
    with pytest.raises(RequestError, match="max_tokens is 0; allowed is 1 to"):
        parse(max_tokens=0)


def test_every_field_has_its_class() -> None:
    for name, kind in FIELDS["openai-completions"].items():
        if kind is FieldClass.REFUSED:
            with pytest.raises(RequestError, match=name) as caught:
                check_fields("openai-completions", {name: {"x": 1}})
            assert caught.value.param == name
        else:
            expected = (name,) if kind is FieldClass.IGNORED else ()
            assert check_fields("openai-completions", {name: "x"}) == expected


def test_the_table_holds_every_parameter_of_the_official_sdk() -> None:
    plain, streamed = typing.get_args(CompletionCreateParams)
    documented = typing.get_type_hints(plain) | typing.get_type_hints(streamed)
    assert len(documented) == len(typing.get_type_hints(completion_create_params.CompletionCreateParamsBase)) + 1
    assert set(documented) <= set(FIELDS["openai-completions"])


def test_defaults_of_refused_fields_are_no_request_for_them() -> None:
    request = parse(echo=False, suffix="", best_of=1, logit_bias={}, add_special_tokens=True, user=None)
    assert request.ignored == ()
    assert parse(n=3, best_of=3).n == 3
    for changes in ({"echo": True}, {"suffix": "s"}, {"best_of": 2}, {"n": 2, "best_of": 1}, {"logit_bias": {"5": 1}}):
        with pytest.raises(RequestError, match="is not supported"):
            parse(**changes)


def test_plain_reply() -> None:
    assert openai_completions.reply(answer(), REQUEST) == {
        "id": "cmpl-7",
        "object": "text_completion",
        "created": 123,
        "model": "policy",
        "choices": [{"index": 0, "text": "hi", "logprobs": None, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15},
    }


def test_a_cut_reply_says_length() -> None:
    answered = openai_completions.reply(answer(finish=FinishReason.LENGTH), REQUEST)
    assert answered["choices"][0]["finish_reason"] == "length"


def test_stream_events() -> None:
    events = list(openai_completions.stream(answer(n=2), REQUEST))
    assert events[-1] == b"data: [DONE]\n\n"
    chunks = [orjson.loads(event.removeprefix(b"data: ")) for event in events[:-1]]
    assert all((chunk["id"], chunk["object"]) == ("cmpl-7", "text_completion") for chunk in chunks)
    parts = [(c["index"], c["text"], c["finish_reason"]) for chunk in chunks for c in chunk["choices"]]
    assert parts == [(0, "hi", None), (0, "", "stop"), (1, "hi", None), (1, "", "stop")]
    assert (chunks[-1]["choices"], chunks[-1]["usage"]["completion_tokens"]) == ([], 10)
