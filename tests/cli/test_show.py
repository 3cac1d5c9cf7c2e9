from __future__ import annotations

import io
import json

import numpy as np
import pytest
from rich.console import Console

from leyden.cli.forks import fork_table, shown_forks
from leyden.cli.screen import Screen
from leyden.cli.show import Filter, evaluation_table, heading, rollout_table, step_table, task_name, untrained
from leyden.cli.trajectory import trajectory_json, trajectory_lines
from leyden.client import Rollout
from leyden.errors import ConfigError
from leyden.types import FinishReason, Turn, VersionSpan


def turn(turn_id, delta, sampled, parent=None, cause=None, spans=None, tools=0):
    return Turn(
        turn_id, "r1", 1, parent, np.array(delta, np.int32), np.array(sampled, np.int32),
        np.full(len(sampled), -0.5, np.float32), spans or (VersionSpan(3, len(sampled)),), FinishReason.STOP, cause,
        tools=tools,
    )  # fmt: skip


def decode(ids):
    return " ".join(map(str, ids.tolist())).replace("0", "\n")


def rollout(number=0, **values):
    base = {
        "rollout_id": f"train-{number}", "group_id": "g", "kind": "train", "step": 2, "slot": 1, "member": number,
        "state": "succeeded", "attempt": 1, "change": 9, "reward": 1.0, "turns": 2, "sampled_tokens": 30,
        "min_version": 1, "max_version": 1, "started": 10.0, "finished": 12.5, "exit_code": 0, "forks": {},
    }  # fmt: skip
    return Rollout.from_json(base | values)


def text(parts) -> list[list[str]]:
    """Cells of each row."""
    _, rows, _ = parts
    return [list(row) for row in rows]


def test_one_trajectory():
    turns = [
        turn(1, [1, 2], [7, 9]),
        turn(2, [3], [8], 1),
        turn(5, [4, 0, 4], [6], 1, "reply dropped", (VersionSpan(3, 0), VersionSpan(4, 1))),
        turn(6, [1], [5, 5, 5, 5, 5, 5], None, "compaction"),
    ]
    lines = [line.plain for line in trajectory_lines(turns, decode, max_tokens=6)]
    assert lines == [
        "turn 1 starts | version 3 | 2 context, 2 sampled | logprob mean -0.500 | stop | sample 1",
        "| 1 2",
        "> 7 9",
        "turn 2 continues 1 | version 3 | 1 context, 1 sampled | logprob mean -0.500 | stop | sample 1",
        "| 3",
        "> 8",
        "turn 5 continues 1 | version 3 (0 tokens), 4 (1 tokens) | 3 context, 1 sampled | logprob mean -0.500 | stop"
        " | not trained | fork: reply dropped",
        "| 4 ",
        "|  4",
        "x 6",
        "turn 6 starts | version 3 | 1 context, 6 sampled | logprob mean -0.500 | stop | not trained"
        " | fork: compaction",
        "~ as turn 5 for 1 tokens, then nothing instead of '2 7 9 4 \\n 4 6'",
        "| 1",
        "x 5 5 5 5 5 5",
        "1 samples: turns 1, 2: 3 of 6 tokens trained",
    ]
    assert [line.plain for line in trajectory_lines([], decode)] == ["no model call was recorded"]


def test_a_rendered_reply_is_shown_beside_the_sampled_one():
    """Which turn, and both texts, cut to a length."""

    def spelled(text):
        return [ord(letter) for letter in text]

    def read(ids):
        return "".join(map(chr, ids.tolist()))

    turns = [
        turn(1, spelled("user: go. "), spelled('{"a":1}' + "x" * 80)),
        turn(2, spelled('user: go. {"a": 1}' + "x" * 80), spelled("done"), None, "rerendered_by_engine"),
    ]
    lines = [line.plain for line in trajectory_lines(turns, read)]
    assert "~ as turn 1 for 15 tokens, then ' 1}xxxxxxxxx' instead of '1}xxxxxxxxxx'" in lines
    assert lines[-1].startswith("2 samples: ")
    long = trajectory_lines(turns, lambda ids: read(ids) * 20)
    (diverged,) = [line.plain for line in long if line.plain.startswith("~")]
    assert len(diverged) < 200


def test_heading(tmp_path):
    failed = rollout(state="failed", failure="agent", reward=0.0, exit_code=1, timed_out=True, reason="exit 1")
    assert [line.plain for line in heading(failed, tmp_path)] == [
        "train-0",
        "train step 2, task slot 1, member 0, attempt 1",
        "failed (agent), reward 0, timed out",
        "exit 1",
        f"2 turns, 30 sampled tokens, held 0.0 s; logs in {tmp_path}/attempts/train-0/1",
    ]


def with_side_call():
    """A title call first, the main conversation with a reply dropped, rewritten at its end."""
    return [
        turn(1, [1, 2], [3]),
        turn(2, [7] * 10, [4, 4], None, "new_conversation", tools=2),
        turn(3, [5], [6], 2, tools=2),
        turn(4, [5, 5], [6], 2, "reply_dropped", tools=2),
        turn(5, [7] * 8, [6], None, "history_rewritten", tools=2),
    ]


def test_rollouts():
    found = [rollout(0, forks={"any": 3}), rollout(1, state="failed", failure="agent", reward=None, reason="no")]
    branches = "history_rewritten 1, reply_dropped 1, side_call 1"
    assert text(rollout_table(found, 7, {"train-0": with_side_call()})) == [
        ["train-0", "train", "2", "slot 1", "succeeded", "1", "1.000", "2", "30", "1-1", "2.5", branches, "", ""],
        ["train-1", "train", "2", "slot 1", "failed (agent)", "1", "", "2", "30", "1-1", "2.5", "", "crashed", "no"],
    ]
    assert shown_forks([turn(2, [1], [2], 1)]) == {}


def test_a_side_call_is_shown_as_one_and_not_as_a_fork():
    headers = [line.plain for line in trajectory_lines(with_side_call(), decode) if line.plain.startswith("turn")]
    assert [header.partition("sample ")[2] for header in headers] == [
        "1 | side_call",
        "2",
        "2",
        "3 | fork: reply_dropped",
        "4 | fork: history_rewritten",
    ]


def test_forks_by_cause_and_what_they_cost():
    turns_of = {"a": with_side_call(), "b": [turn(1, [1] * 5, [2])], "c": [], "d": [turn(2, [1], [2], 1)]}
    table = fork_table(turns_of)
    assert text(table) == [
        ["main", "history_rewritten", "1", "1", "8"],
        ["main", "reply_dropped", "1", "1", "12"],
        ["side_call", "conversation", "1", "1", "3"],
    ]
    assert table[2] == (
        "2 rollouts, 2.50 samples each, 2.00 without side calls; forks repeat 20 of 47 tokens (42.6%); "
        "1 with an incomplete record left out"
    )
    assert fork_table({})[2] == "no rollout has a recorded turn"


def test_filters():
    assert not Filter().narrows
    assert Filter(step=2, kind="train", state="succeeded").takes(rollout())
    assert not Filter(step=3).takes(rollout())
    assert not Filter(state="failed").takes(rollout())
    with pytest.raises(ConfigError, match="--kind: 'x' is not train or eval"):
        Filter(kind="x").check()
    with pytest.raises(ConfigError, match="--state: 'x' is not one of queued, running, grading"):
        Filter(state="x").check()


def test_steps():
    step = {
        "event": "step", "step": 1, "version": 1, "reward": 0.5, "pass_rate": 0.5, "groups_without_spread": 1,
        "groups": 2, "outcomes": {"completed": 3, "crashed": 1},
        "excluded": {"no_calls": 1}, "samples": 5, "trained_tokens": 90, "entropy": 1.5,
        "grad_norm": 0.25, "max_logprob_diff": 1e-6, "seconds": {"rollouts": 2.0, "update": 0.5},
    }  # fmt: skip
    skip = {**step, "event": "skip", "step": 2, "reward": None, "pass_rate": None, "why": "every advantage is 0"}
    evaluation = {
        "event": "eval", "step": 2, "version": 1, "seconds": 3.0, "tasks": 4, "samples": 2, "rewarded": 7,
        "rollouts": 8, "mean_reward": 0.5, "missing": {"infrastructure": 1}, "checkpoint": "/r/checkpoints/step-000002",
        "pass": [{"k": 1, "value": 0.25, "interval_95": [0.1, 0.5]}, {"k": 2, "value": None, "interval_95": None}],
    }  # fmt: skip
    assert text(step_table(json.loads(json.dumps([step, skip, evaluation])))) == [
        ["1", "1", "0.500", "0.50", "1/2", "crashed 1", "no_calls 1", "5", "90", "1.5", "0.25", "1e-06", "2.5", ""],
        ["2", "1", "", "", "1/2", "crashed 1", "no_calls 1", "5", "90", "1.5", "0.25", "1e-06", "2.5",
         "skipped: every advantage is 0"],
    ]  # fmt: skip
    common = ["step-000002", "1", "4", "2", "7/8", "0.500"]
    assert text(evaluation_table([evaluation])) == [
        [*common, "1", "0.250", "[0.100, 0.500]", "infrastructure 1", "", "3.0", ""],
        [*common, "2", "no data", "", "infrastructure 1", "", "3.0", ""],
    ]


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"kind": "eval"}, "an evaluation"),
        ({"state": "running"}, "not finished"),
        ({"state": "failed", "failure": "infrastructure"}, "left out (infrastructure)"),
        ({"state": "cancelled"}, "left out (cancelled)"),
        ({"turns": 0}, "left out (no_calls)"),
        ({"reward": None}, "left out (no_reward)"),
        ({}, None),
        ({"state": "failed", "failure": "agent", "reward": 0.0}, None),
    ],
)
def test_what_is_sampled_is_not_always_trained(values, why):
    assert untrained(rollout(**values)) == why
    turns = [turn(1, [1, 2], [7, 9])]
    lines = [line.plain for line in trajectory_lines(turns, decode, untrained=why)]
    (shown,) = trajectory_json(turns, decode, untrained=why)
    if why is None:
        assert lines[2:] == ["> 7 9", "1 samples: turns 1: 2 of 4 tokens trained"]
        assert shown["sample"] == 1
    else:
        assert lines[2:] == [
            "x 7 9", f"1 samples: turns 1: 2 of 4 tokens sampled; nothing of it is trained: {why}",
        ]  # fmt: skip
        assert "not trained" in lines[0] and shown["sample"] is None


def test_a_task_is_named_as_it_names_itself():
    assert task_name(rollout(task={"id": "django-11099", "name": "x"})) == "django-11099"
    assert task_name(rollout(task={"task_id": 7})) == "7"
    assert task_name(rollout(task={"id": True, "name": ["x"]})) == "slot 1"


def printed(width, call):
    written = io.StringIO()
    console = Console(file=written, width=width, highlight=False, markup=False, emoji=False)
    call(Screen(console))
    return written.getvalue()


@pytest.mark.parametrize("width", [40, 80, 120, 300])
def test_no_cell_is_cut_at_any_width(width):
    long = rollout(
        0, rollout_id="train-00001-0000-000", task={"id": "a-task-with-a-long-name-of-its-own"}, reward=0.123,
        state="failed", failure="agent", reason="exit 1: FileNotFoundError: agent.py is not there",
    )  # fmt: skip
    shown = printed(width, lambda screen: screen.table(*rollout_table([long], 1, {})))
    assert "…" not in shown and max(map(len, shown.splitlines())) <= width
    for cell in ("train-00001-0000-000", "a-task-with-a-long-name-of-its-own", "0.123", "failed (agent)"):
        assert cell in " ".join(shown.split())


HOSTILE = [
    ("\x1b[2J\x1b]52;c;aGk=\x07", r"\x1b[2J\x1b]52;c;aGk=\x07"),
    ("[/zzz] [bold]x[/bold] :smile:", "[/zzz] [bold]x[/bold] :smile:"),
    ("\x9b31m", r"\x9b31m"),
    ("a\rb\x08\x7f", r"a\rb\x08\x7f"),
    ("abc\u202etxt.exe\u2066", r"abc\u202etxt.exe\u2066"),
    ("line\u2028line", r"line\u2028line"),
    ("half \ud83d", r"half \ud83d"),
]


@pytest.mark.parametrize(("raw", "shown"), HOSTILE)
def test_what_strangers_say_is_shown_and_never_obeyed(raw, shown, tmp_path):
    """In tasks, reasons, model text and tool output; as table, as paragraphs, as lines and as JSON."""
    hostile = rollout(task={"id": raw}, reason=raw, state="failed", failure="agent")
    turns = [turn(1, [1], [2], None)]
    for width in (60, 300):
        table = printed(
            width,
            lambda screen: screen.table(
                *rollout_table([hostile], 1, {}),
            ),
        )
        assert shown.replace(" ", "") in "".join(table.split()) and raw not in table.replace(shown, "")
    lines = [*heading(hostile, tmp_path), *trajectory_lines(turns, lambda ids: raw)]
    text = printed(300, lambda screen: [screen.line(*line) for line in lines])
    assert text.count(shown) == 4
    as_json = printed(80, lambda screen: screen.json(trajectory_json(turns, lambda ids: raw)))
    assert as_json.isascii() and json.loads(as_json)[0]["sampled"] == raw
    error = printed(300, lambda screen: screen.error(f"{raw}\nerror: forged"))
    assert error == f"error: {shown}\n  error: forged\n"
    for output in (text, as_json, error):
        assert not set(output) & set("\x1b\x07\x08\x7f\x9b\r\u202e\u2028")


def test_newlines_in_a_cell_or_line_forge_nothing(tmp_path):
    reason = "exit 1\ntrain-9 succeeded reward 1"
    text = printed(300, lambda screen: screen.table(*rollout_table([rollout(reason=reason)], 1, {})))
    assert r"exit 1\ntrain-9 succeeded" in text
