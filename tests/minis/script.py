"""What the model says to mini-swe-agent, by cell, task and turn; and how often its template forks that. Pure."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tests.qwen_speech import said

FAMILIES = ("qwen3", "qwen3.5")
HISTORIES: tuple[Literal["template", "keep"], ...] = ("template", "keep")
MODES: tuple[Literal["tools", "text"], ...] = ("tools", "text")
TURNS = (6, 9)
END = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
WORDS = (
    *("the test in web.py fails because", "naïve café", "index", "off by one", "日本語のテスト", "I look at", "\tpath"),
    *("parse_header()", "0x1F600", "🙂", "assertEqual", "don't", "{'a': [1, 2]}", "  twice  ", "ünïcödé", "retry"),
)


@dataclass(frozen=True)
class Cell:
    """`reasoning`: three of four replies hold some."""

    family: str
    mode: Literal["tools", "text"]
    reasoning: bool
    history: Literal["template", "keep"]


@dataclass(frozen=True)
class Reply:
    text: str
    reasoning: str | None
    commands: tuple[str, ...]


CELLS = [
    Cell(family, mode, reasoning, history)
    for family in FAMILIES
    for history in HISTORIES
    for mode in MODES
    for reasoning in (False, True)
]


def task_of(cell: Cell, number: int) -> str:
    return f"task {cell.mode} {'reasoning' if cell.reasoning else 'plain'} {number}"


def answer(family: str, prompt: str) -> str:
    """The reply to a rendered prompt: of the task that it names, after as many replies as it shows."""
    found = re.search(r"solve this issue: task (tools|text) (reasoning|plain) (\d+)\n", prompt)
    assert found is not None
    mode, reasoning, number = found.groups()
    reply = replies(mode, reasoning == "reasoning", int(number))[prompt.count("<|im_start|>assistant\n") - 1]
    if mode == "text":
        block = f"THOUGHT: {reply.text}\n\n```mswea_bash_command\n{reply.commands[0]}\n```"
        return said(family, block, reasoning=reply.reasoning)
    calls = [("bash", f'{{ "command":  {json.dumps(command)} }}') for command in reply.commands]
    return said(family, reply.text, reasoning=reply.reasoning, calls=calls)


def replies(mode: str, reasoning: bool, number: int) -> list[Reply]:
    """All that the model says in one rollout."""
    rng = random.Random(f"{mode} {reasoning} {number}")
    spoken = [_reply(rng, mode, reasoning) for _ in range(rng.randint(*TURNS) - 1)]
    return [*spoken, Reply(_words(rng), _words(rng) if reasoning else None, (END,))]


def _reply(rng: random.Random, mode: str, reasoning: bool) -> Reply:
    thought = "\n\n".join(_words(rng) for _ in range(rng.randint(1, 3))) if reasoning and rng.random() < 0.75 else None
    commands = tuple(_command(rng) for _ in range(2 if mode == "tools" and rng.random() < 0.2 else 1))
    text = "" if mode == "tools" and rng.random() < 0.3 else _words(rng)
    return Reply(text, thought, commands)


def _words(rng: random.Random) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(4, 16)))


def _command(rng: random.Random) -> str:
    said = _words(rng).replace("'", '"')
    return rng.choice([f"echo '{said}' >> notes; cat notes", f"printf '%s\\n\\n' '{said}'", f"echo '{said}'; false"])


def template_forks(requests: Sequence[Sequence[dict[str, Any]]]) -> int:
    """How often the families' own templates take back what a prompt or a reply showed, over one rollout's requests.

    They show the reasoning of the replies after the last user message, and of no others. A turn shows what its
    prompt shows and what it says itself.
    """
    forks = 0
    before: set[int] = set()
    for messages in requests:
        thoughtful = {i for i, m in enumerate(messages) if m["role"] == "assistant" and m.get("reasoning_content")}
        asked = max(i for i, m in enumerate(messages) if m["role"] == "user")
        shown = {i for i in thoughtful if i > asked}
        latest = max((i for i, m in enumerate(messages) if m["role"] == "assistant"), default=-1)
        forks += not (before | ({latest} & thoughtful)) <= shown
        before = shown
    return forks
