"""How harnesses resend the history, with the real tokenizers of Qwen3 and Qwen3.5 and ids that no tokenizer chooses.

Each way of `SAME` was seen in a harness. What a resent reply means decides: the turn is continued by its exact ids, or
a branch begins whose cause is named.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from leyden.config import RunConfig
from leyden.gateway.render import ModelRenderer
from leyden.trajectory.kinds import Kind, conversations, fork_counts, samples_without_side_calls
from tests.gateway.conftest import Gateway, make_config, serving
from tests.gateway.test_chat import call, sdk
from tests.harnesses.spelling import Speller
from tests.qwen_speech import Calls, said
from tests.qwen_tokenizers import qwen_tokenizer_folder

FAMILIES = ("qwen3", "qwen3.5")
TASK: list[Any] = [{"role": "system", "content": "You are an agent."}, {"role": "user", "content": "Say hi in hi.txt"}]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}, "timeout": {"type": "number"}, "options": {"type": "object"}},
        },
    },
}
COMMAND = "printf 'caf\u00e9\\n' >> hi.txt && cat \"hi.txt\""
ARGUMENTS = (
    '{ "command":  "printf \'caf\\u00e9\\\\n\' >> hi.txt && cat \\"hi.txt\\"",  "timeout": 1.0, '
    '"options": {"b": 2e1, "a": [1.50, true, null]} }'
)
REASONING = "I need  a shell.\n\nThen I look."
TEXT = "I will run it. "

Message = dict[str, Any]
Resend = Callable[[Message], Message]


@cache
def renderer(family: str, thinking_history: Any = "template") -> ModelRenderer:
    return ModelRenderer(str(qwen_tokenizer_folder(family)), family, thinking_history)


@pytest.fixture(params=FAMILIES)
async def gateway(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Gateway]:
    family = request.param
    made = renderer(family)
    async with serving(config_of(tmp_path, family), made) as running:
        running.engine.spell = Speller(made._tokenizer._backend, share=0.7).ids
        yield running


def config_of(
    tmp_path: Path, family: str, thinking_history: str = "template", continuity: str = "semantic"
) -> RunConfig:
    model = {"renderer": family, "thinking_history": thinking_history, "continuity": continuity}
    return make_config(tmp_path, qwen_tokenizer_folder(family), model=model)


def family_of(gateway: Gateway) -> str:
    return gateway.config.model.renderer


def with_arguments(write: Callable[[Any], str]) -> Resend:
    def resend(message: Message) -> Message:
        calls = [
            c | {"function": c["function"] | {"arguments": write(json.loads(c["function"]["arguments"]))}}
            for c in message["tool_calls"]
        ]
        return message | {"tool_calls": calls}

    return resend


def javascript(value: Any) -> str:
    """`JSON.stringify`: no blanks, 1.0 as 1."""

    def plain(item: Any) -> Any:
        if isinstance(item, dict):
            return {key: plain(part) for key, part in item.items()}
        if isinstance(item, list):
            return [plain(part) for part in item]
        return int(item) if isinstance(item, float) and item.is_integer() else item

    return json.dumps(plain(value), separators=(",", ":"), ensure_ascii=False)


def backwards(value: Any) -> Any:
    return {key: backwards(value[key]) for key in reversed(value)} if isinstance(value, dict) else value


def renamed_ids(message: Message) -> Message:
    return message | {"tool_calls": [c | {"id": f"toolu_{i}"} for i, c in enumerate(message["tool_calls"])]}


def without(name: str) -> Resend:
    return lambda message: {key: value for key, value in message.items() if key != name}


SAME: dict[str, Resend] = {
    "as it came": lambda m: m,
    "arguments re-dumped by Python, ASCII": with_arguments(json.dumps),
    "arguments re-dumped by Python, raw": with_arguments(lambda v: json.dumps(v, ensure_ascii=False)),
    "arguments re-dumped by JavaScript": with_arguments(javascript),
    "arguments with other key order": with_arguments(lambda v: json.dumps(backwards(v))),
    "arguments escaped throughout": with_arguments(lambda v: json.dumps(v).replace("h", "\\u0068")),
    "reasoning trimmed": lambda m: m | {"reasoning_content": m["reasoning_content"].strip()},
    "reasoning with a line end": lambda m: m | {"reasoning_content": m["reasoning_content"] + "\n"},
    "reasoning under another key": lambda m: without("reasoning_content")(m) | {"reasoning": m["reasoning_content"]},
    "reasoning under both keys": lambda m: m | {"reasoning": m["reasoning_content"]},
    "text as parts": lambda m: m | {"content": [{"type": "text", "text": m["content"]}]},
    "text in two parts": lambda m: m | {"content": [{"type": "text", "text": t} for t in (TEXT[:4], TEXT[4:])]},
    "text trimmed": lambda m: m | {"content": m["content"].strip()},
    "calls renamed": renamed_ids,
    "keys of the SDK": lambda m: m | {"provider_specific_fields": {"refusal": None}, "audio": None, "annotations": []},
}


async def first_turn(gateway: Gateway, text: str = TEXT) -> tuple[str, Any, Message]:
    """One turn with reasoning, text and a call: the rollout, its client, the reply as the SDK hands it over."""
    reply = said(family_of(gateway), text, reasoning=REASONING, calls=[("bash", ARGUMENTS)])
    gateway.engine.replies = [reply, said(family_of(gateway), "Done.")]
    rollout_id, key = await gateway.start_rollout()
    client = sdk(gateway, key)
    answer = await call(client, TASK, tools=[TOOL])
    return rollout_id, client, answer.choices[0].message.model_dump(exclude_none=True)


def result(message: Message, output: Any = "café\n") -> list[Message]:
    return [{"role": "tool", "tool_call_id": c["id"], "content": output} for c in message["tool_calls"]]


@pytest.mark.parametrize("way", SAME)
async def test_what_means_the_same_goes_on_by_the_exact_ids(gateway: Gateway, way: str) -> None:
    rollout_id, client, reply = await first_turn(gateway)
    assert json.loads(reply["tool_calls"][0]["function"]["arguments"]) == json.loads(ARGUMENTS)
    resent = SAME[way](reply)
    await call(client, [*TASK, resent, *result(resent)], tools=[TOOL])
    one, two = await gateway.turns(rollout_id)
    assert (two.parent_id, two.fork_cause) == (one.turn_id, None)
    held = [*one.delta_P, *one.sampled_T]
    assert gateway.engine.requests[1].prompt_ids[: len(held)] == held
    assert gateway.renderer.render([*TASK, reply, *result(reply)], [TOOL])[: len(held)] != held


@pytest.mark.parametrize("content", ["", None, "left out"])
async def test_a_reply_without_text_comes_back_with_null_empty_or_no_content(
    gateway: Gateway, content: str | None
) -> None:
    rollout_id, client, reply = await first_turn(gateway, "")
    resent = without("content")(reply) | ({} if content == "left out" else {"content": content})
    await call(client, [*TASK, resent, *result(resent)], tools=[TOOL])
    one, two = await gateway.turns(rollout_id)
    assert (two.parent_id, two.fork_cause) == (one.turn_id, None)


@pytest.mark.parametrize(
    ("resend", "cause"),
    [
        (without("reasoning_content"), "reasoning_dropped_by_harness"),
        (lambda m: m | {"reasoning_content": "A summary."}, "reply_rewritten"),
        (lambda m: m | {"content": "Something else."}, "reply_rewritten"),
        (with_arguments(lambda v: json.dumps(v | {"timeout": 2})), "reply_rewritten"),
        (with_arguments(lambda v: json.dumps(v | {"timeout": "1"})), "reply_rewritten"),
        (with_arguments(lambda v: json.dumps(v | {"options": {}})), "reply_rewritten"),
    ],
)
async def test_what_means_something_else_is_a_branch_with_its_cause(
    gateway: Gateway, resend: Resend, cause: str
) -> None:
    rollout_id, client, reply = await first_turn(gateway)
    resent = resend(reply)
    await call(client, [*TASK, resent, *result(resent)], tools=[TOOL])
    _, two = await gateway.turns(rollout_id)
    assert (two.parent_id, two.fork_cause) == (None, cause)
    assert gateway.engine.requests[1].prompt_ids == gateway.renderer.render(
        [*TASK, shape(resent), *result(resent)], [TOOL]
    )


def shape(message: Message) -> Message:
    """As protocols parse it: arguments as an object."""
    return with_arguments(lambda value: value)(message)  # type: ignore[arg-type, return-value]


async def test_calls_as_text_with_the_result_as_a_user_message(gateway: Gateway) -> None:
    """smolagents tells the call in the reply's text, and the result in a user message."""
    rollout_id, client, reply = await first_turn(gateway)
    text = f"{reply['content'].strip()}\nCalling tools:\n[{reply['tool_calls'][0]['function']!r}]"
    history = [*TASK, {"role": "assistant", "content": text}, {"role": "user", "content": "Observation:\ncafé"}]
    await call(client, history, tools=[TOOL])
    _, two = await gateway.turns(rollout_id)
    assert (two.parent_id, two.fork_cause) == (None, "reply_rewritten")


@pytest.mark.parametrize("merged", [False, True])
async def test_two_results_apart_or_in_one_message(gateway: Gateway, merged: bool) -> None:
    """What was rendered is what is recorded, in one sample; both results are context."""
    calls = [("bash", {"command": "ls"}), ("bash", {"command": "pwd"})]
    gateway.engine.replies = [said(family_of(gateway), calls=calls), said(family_of(gateway), "Done.")]
    rollout_id, key = await gateway.start_rollout()
    client = sdk(gateway, key)
    reply = (await call(client, TASK, tools=[TOOL])).choices[0].message.model_dump(exclude_none=True)
    assert len(reply["tool_calls"]) == 2
    results = [{"role": "user", "content": "one\n\ntwo"}] if merged else result(reply, "out")
    await call(client, [*TASK, reply, *results], tools=[TOOL])
    one, two = await gateway.turns(rollout_id)
    assert (two.parent_id, two.fork_cause) == (one.turn_id, None)
    shown = "one\n\ntwo" if merged else "\n".join(["<tool_response>\nout\n</tool_response>"] * 2)
    assert gateway.renderer.decode(two.delta_P).startswith(f"\n<|im_start|>user\n{shown}<|im_end|>\n")


async def test_three_interleaved_conversations_find_their_own_turns(gateway: Gateway) -> None:
    """Agents of one rollout with the same system prompt and tools, whose calls come in any order."""
    rollout_id, key = await gateway.start_rollout()
    client = sdk(gateway, key)
    family = family_of(gateway)
    histories: list[list[Any]] = [[TASK[0], {"role": "user", "content": f"Task {name}"}] for name in "abc"]
    order = [0, 1, 0, 2, 2, 1, 0, 1, 2, 2]
    for number, who in enumerate(order):
        gateway.engine.replies = [said(family, f"turn {number}", calls=[("bash", {"command": f"echo {number}"})])]
        reply = (await call(client, histories[who], tools=[TOOL])).choices[0].message.model_dump(exclude_none=True)
        histories[who] += [with_arguments(javascript)(reply), *result(reply, str(number))]
    turns = await gateway.turns(rollout_id)
    newest: dict[int, int] = {}
    for who, turn in zip(order, turns, strict=True):
        assert turn.parent_id == newest.get(who)
        newest[who] = turn.turn_id
    assert [t.fork_cause for t in turns if t.parent_id is None] == [None, "new_conversation", "new_conversation"]


async def test_what_each_conversation_was_shows_afterwards(gateway: Gateway) -> None:
    """A title call comes first, a sub-agent begins with the words of a call, the history becomes a summary."""
    rollout_id, key = await gateway.start_rollout()
    client, family = sdk(gateway, key), family_of(gateway)
    find = "Find every place where hi.txt is opened and tell me which of them closes it."
    summary = "So far hi.txt was written and each place that opens it was found, two in all."

    async def ask(messages: list[Any], text: str, calls: Calls = (), tools: list[Any] | None = None) -> list[Any]:
        gateway.engine.replies = [said(family, text, calls=calls)]
        options = {"tools": tools} if tools else {}
        reply = (await call(client, messages, **options)).choices[0].message.model_dump(exclude_none=True)
        return [*messages, reply, *result(reply)] if calls else [*messages, reply]

    await ask([{"role": "system", "content": "Write a title."}, TASK[1]], "Saying hi")
    delegate = TOOL | {"function": {"name": "task", "parameters": {"properties": {"prompt": {"type": "string"}}}}}
    main = await ask(TASK, "", [("task", {"prompt": find})], [TOOL, delegate])
    helper = [{"role": "system", "content": "You look things up."}, {"role": "user", "content": find}]
    helper = await ask(helper, "", [("bash", {"command": "grep hi.txt"})], [TOOL])
    await ask(helper, "Two places.", tools=[TOOL])
    main = await ask([*main, {"role": "user", "content": "Sum up."}], summary, tools=[TOOL, delegate])
    main = [*TASK, {"role": "user", "content": f"Before:\n{summary}\nGo on."}]
    main = await ask(main, "", [("bash", {"command": "ls"})], [TOOL, delegate])
    await ask(main, "Done.", tools=[TOOL, delegate])

    turns = await gateway.turns(rollout_id)
    roots = [(t.turn_id, t.fork_cause) for t in turns if t.parent_id is None]
    assert roots == [(1, None), (2, "new_conversation"), (3, "sub_agent"), (6, "compaction")]
    assert [(c.kind, c.turns) for c in conversations(turns)] == [
        (Kind.SIDE_CALL, (1,)),
        (Kind.MAIN, (2, 5, 6, 7)),
        (Kind.SUB_AGENT, (3, 4)),
    ]
    assert fork_counts(turns) == {"compaction": 1, "side_call": 1, "sub_agent": 1}
    assert len(samples_without_side_calls(turns)) == 3


@pytest.mark.parametrize("history", ["template", "keep"])
async def test_reasoning_that_never_closed(tmp_path: Path, history: str) -> None:
    """It stopped inside its reasoning: the template would close it, which the sampled ids do not."""
    made = renderer("qwen3", history)
    async with serving(config_of(tmp_path, "qwen3", history), made) as gateway:
        gateway.engine.replies = ["<think>\nwhat now"]
        rollout_id, key = await gateway.start_rollout()
        client = sdk(gateway, key)
        reply = (await call(client, TASK)).choices[0].message.model_dump(exclude_none=True)
        assert (reply["content"], reply["reasoning_content"].strip()) == ("", "what now")
        await call(client, [*TASK, reply, {"role": "user", "content": "Go on."}])
        turns = await gateway.turns(rollout_id)
        assert [(t.parent_id, t.fork_cause) for t in turns] == [(None, None), (None, "reasoning_not_closed")]


@pytest.mark.parametrize("history", ["template", "keep"])
@pytest.mark.parametrize("family", FAMILIES)
async def test_the_template_forks_once_for_each_reply_with_reasoning(tmp_path: Path, family: str, history: str) -> None:
    """User messages after each reply: what the harness resends of earlier reasoning is nowhere in the prompt any more,
    so only the reply just given decides.
    """
    thoughts = [None, "first thought", None, None, "second thought", "third thought", None]
    made = renderer(family, history)
    async with serving(config_of(tmp_path, family, history), made) as gateway:
        gateway.engine.spell = Speller(made._tokenizer._backend, share=0.7).ids
        gateway.engine.replies = [said(family, f"Reply {i}.", reasoning=t) for i, t in enumerate(thoughts)]
        rollout_id, key = await gateway.start_rollout()
        client, messages = sdk(gateway, key), list(TASK)
        for number in range(len(thoughts)):
            reply = (await call(client, messages)).choices[0].message.model_dump(exclude_none=True)
            messages += [reply, {"role": "user", "content": f"Observation {number}."}]
        turns = await gateway.turns(rollout_id)
    forked = ["reasoning_dropped_by_template" if before and history == "template" else None for before in thoughts]
    assert [t.fork_cause for t in turns] == [None, *forked[:-1]]
    assert [t.parent_id is None for t in turns[1:]] == [cause is not None for cause in forked[:-1]]


async def test_a_fresh_root_holds_the_reasoning_that_the_template_keeps(tmp_path: Path) -> None:
    """A branch in a tool cycle shows earlier reasoning, so the next user message begins another."""
    made = renderer("qwen3")
    async with serving(config_of(tmp_path, "qwen3"), made) as gateway:
        run = [("bash", {"command": "ls"})]
        gateway.engine.replies = [said("qwen3", reasoning="thought one", calls=run), said("qwen3", calls=run), "Done."]
        rollout_id, key = await gateway.start_rollout()
        client, messages = sdk(gateway, key), list(TASK)
        for changed in ("ls", "changed by the harness"):
            reply = (await call(client, messages, tools=[TOOL])).choices[0].message.model_dump(exclude_none=True)
            reply["tool_calls"][0]["function"]["arguments"] = json.dumps({"command": changed})
            messages += [reply, *result(reply)]
            messages[1] = TASK[1] | {"content": "rewritten"}
        await call(client, messages, tools=[TOOL])
        await call(client, [*messages, {"role": "assistant", "content": "Done."}, TASK[1]], tools=[TOOL])
        turns = await gateway.turns(rollout_id)
    causes = [None, "history_rewritten", "reply_rewritten", "reasoning_dropped_by_template"]
    assert [t.fork_cause for t in turns] == causes
    shown = ["thought one" in made.decode(t.delta_P) for t in turns]
    assert shown == [False, True, True, False]


async def test_without_continuity_turns_are_linked_where_their_ids_go_on_by_themselves(tmp_path: Path) -> None:
    """Canonical ids do; others are rendered back to other ids."""
    made = renderer("qwen3")
    async with serving(config_of(tmp_path, "qwen3", continuity="off"), made) as gateway:
        speller = Speller(made._tokenizer._backend, share=1.0)
        rollout_id, key = await gateway.start_rollout()
        client, messages = sdk(gateway, key), list(TASK)
        for number, spell in enumerate([None, speller.ids, None]):
            gateway.engine.spell, gateway.engine.replies = spell, [f"Reply number {number}."]
            reply = (await call(client, messages)).choices[0].message.model_dump(exclude_none=True)
            messages += [reply, {"role": "user", "content": "On."}]
        one, two, three = await gateway.turns(rollout_id)
    assert (two.parent_id, two.fork_cause) == (one.turn_id, None)
    assert (three.parent_id, three.fork_cause) == (one.turn_id, "continuity_off")
