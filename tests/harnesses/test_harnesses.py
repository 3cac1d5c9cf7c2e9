"""The scripted engine, its spelling and its script; the launchers and the page that shows them.

The harnesses themselves run under `make harnesses`.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from tokenizers import Tokenizer

from leyden.config import RunConfig
from leyden.gateway.render import ModelRenderer
from tests.gateway.conftest import make_config
from tests.harnesses import engine, script
from tests.harnesses.cases import LAUNCHERS, SMOKE, VARIANTS, Case
from tests.harnesses.engine import Engine
from tests.harnesses.install import PACKAGES
from tests.harnesses.report import problems
from tests.harnesses.run import Outcome
from tests.harnesses.spelling import Speller

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "harnesses.md"
BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}, "wait": {"type": "boolean"}},
            "required": ["command", "wait"],
        },
    },
}
ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say hi."}]


@pytest.fixture(scope="module")
def tokenizer(tokenizer_path: Path) -> Tokenizer:
    return engine.load(tokenizer_path)


@pytest.fixture(scope="module")
def renderer(tokenizer_path: Path) -> ModelRenderer:
    return ModelRenderer(str(tokenizer_path), "qwen3", "template")


def parsed(renderer: ModelRenderer, tokenizer: Tokenizer, messages: list[Any], tools: list[Any]) -> Any:
    """The message that the engine's answer to these messages spells."""
    prompt = renderer.render(messages, tools)
    answer = Engine(tokenizer, script.with_tools).answer({"prompt_ids": prompt, "stop": [], "max_tokens": 1000})
    return renderer.parse(answer["token_ids"], prompt, tools, call_prefix="call_1_", stop_string=None)


def test_a_conversation_with_tools_has_three_replies(renderer: ModelRenderer, tokenizer: Tokenizer) -> None:
    first = parsed(renderer, tokenizer, ASKED, [BASH])
    assert first["content"] == "I will  run it.\n\n  Now."
    assert first["reasoning_content"].strip() == "I need  a shell."
    assert [call["function"] for call in first["tool_calls"]] == [
        {"name": "bash", "arguments": {"command": "echo one café >> hi.txt", "wait": False}}
    ]
    result = {"role": "tool", "content": "ok", "tool_call_id": "x"}
    second = parsed(renderer, tokenizer, [*ASKED, first, result], [BASH])
    assert "reasoning_content" not in second
    commands = [call["function"]["arguments"]["command"] for call in second["tool_calls"]]
    assert commands == ["echo two >> hi.txt", "echo three >> hi.txt"]
    third = parsed(renderer, tokenizer, [*ASKED, first, result, second, result, result], [BASH])
    assert third["content"].strip() == "Done.  All said hi." and "tool_calls" not in third


def test_a_conversation_without_tools_is_a_side_call(renderer: ModelRenderer, tokenizer: Tokenizer) -> None:
    assert parsed(renderer, tokenizer, ASKED, [])["content"] == '{"title": "Say hi"}'


def test_spelling_keeps_the_text_and_changes_the_ids(tokenizer: Tokenizer) -> None:
    text = "<think>the quick brown fox</think>\n\n<tool_call>café</tool_call>"
    ids = Speller(tokenizer, share=1.0).ids(text)
    canonical = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert len(ids) > len(canonical) and ids == Speller(tokenizer, share=1.0).ids(text)
    assert Speller(tokenizer, share=0.0).ids(text) == canonical


def test_a_stop_string_ends_the_answer_and_keeps_its_tokens(tokenizer: Tokenizer) -> None:
    def says(_: script.Shown) -> str:
        return "one</code>two"

    answer = Engine(tokenizer, says).answer({"prompt_ids": [1], "stop": ["x", "</code>"], "max_tokens": 100})
    assert answer["stop_string"] == "</code>"
    assert tokenizer.decode(answer["token_ids"]).startswith("one</code>")
    assert "two" not in tokenizer.decode(answer["token_ids"])
    assert len(answer["logprobs"]) == len(answer["token_ids"]) == answer["spans"][0][1]


async def test_faults_come_first_once_for_each_prompt(tokenizer: Tokenizer) -> None:
    scripted = Engine(tokenizer, lambda _: "hi", ("429", "503", "cut"))
    asked = {"prompt_ids": [1, 2], "stop": [], "max_tokens": 100}
    async with engine.serving(scripted) as url, aiohttp.ClientSession() as client:
        async with client.post(f"{url}/generate", json=asked) as answer:
            assert (answer.status, answer.headers["Retry-After"]) == (429, "2")
        async with client.post(f"{url}/generate", json=asked) as answer:
            assert answer.status == 503
        with pytest.raises(aiohttp.ClientPayloadError):
            async with client.post(f"{url}/generate", json=asked) as answer:
                await answer.read()
        assert not scripted.answered.is_set()
        async with client.post(f"{url}/generate", json=asked) as answer:
            body = json.loads(await answer.read())
    assert tokenizer.decode(body["token_ids"]) == "hi"
    assert scripted.faults_given == 3 and scripted.answered_with == {(1, 2): body["token_ids"]}


@pytest.mark.parametrize("case", LAUNCHERS, ids=lambda case: case.name)
def test_a_launcher_is_the_section_of_a_run_file_and_stands_in_the_docs(
    case: Case, tmp_path: Path, tokenizer_path: Path
) -> None:
    text = (HERE / "launchers" / case.file).read_text()
    section = yaml.safe_load(text)
    assert list(section) == ["harness"]
    made = make_config(tmp_path, tokenizer_path, **section)
    assert isinstance(made, RunConfig) and made.harness.env["HOME"] == "{{ workspace }}/.."
    assert text in PAGE.read_text(), f"docs/harnesses.md does not show launchers/{case.file} as it is"


@pytest.mark.parametrize("case", [*LAUNCHERS, *VARIANTS], ids=lambda case: case.name)
def test_the_docs_show_what_is_expected_of_a_case(case: Case) -> None:
    forks = ", ".join(f"{cause}: {count}" for cause, count in case.forks.items()) or "-"
    streamed, samples = "yes" if case.streamed else "no", 1 + sum(case.forks.values())
    cells = (case.name, case.protocol, streamed, case.turns, case.side_calls, samples, forks)
    assert f"| {' | '.join(map(str, cells))} |\n" in PAGE.read_text()


def test_seventeen_launchers_of_fourteen_packages() -> None:
    assert len(LAUNCHERS) == 17
    assert {case.package for case in LAUNCHERS} == set(PACKAGES)
    assert len({case.name for case in (*LAUNCHERS, *VARIANTS)}) == 17 + len(VARIANTS)
    assert set(SMOKE) <= {case.name for case in LAUNCHERS}


def test_problems_name_what_differs() -> None:
    case = LAUNCHERS[0]
    shown = {"protocol": case.protocol, "turns": 3, "samples": 1, "counts_equal": True, "exact": True}
    good = Outcome(case.name, "plain", finished=True, exit_code=0, reward=1.0, reason="", **shown)
    assert problems(case, good) == []
    broken = Outcome.broken(case.name, "plain", "TimeoutError: ")
    assert problems(case, broken)[0] == "not finished: exit code None, reward None, TimeoutError: "
    forked = Outcome(**{**good.__dict__, "samples": 2, "forks": {"reply_rewritten": 1}})
    assert problems(case, forked) == ["forks {'reply_rewritten': 1}, not {}", "samples 2, not 1"]
    assert problems(case, replace(good, mode="faults", faults=12)) == []
    assert problems(case, replace(good, mode="faults", faults=9)) == ["faults 9, not 12"]
