"""What `leyden doctor` makes of a rehearsal."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from leyden.doctor.findings import problem
from leyden.doctor.rehearsal import Refused, Rehearsed, advice_for, judge_grader, judge_harness, judge_wishes
from leyden.records import Rollout
from leyden.types import RolloutState


def seen(**changes: Any) -> Rehearsed:
    """A rehearsal in which all went well, but for `changes`."""
    rollout = Rollout(
        rollout_id="r", group_id="g", kind="eval", step=0, slot=0, member=0, state=RolloutState.SUCCEEDED, attempt=1,
        change=1, reward=0.5, exit_code=0, turns=1, sampled_tokens=5, min_version=0, max_version=0,
    )  # fmt: skip
    of_rollout = {k: changes.pop(k) for k in list(changes) if k in Rollout.__dataclass_fields__}
    known = {"protocols": {"openai-chat": 1}, "refused": (), "error": None, "harness_log": (), "grader_log": ()}
    return Rehearsed(rollout=replace(rollout, **of_rollout), **(known | changes))


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"protocols": {"gemini": 2, "chat": 1}}, "ok       harness      model calls: 2 gemini, 1 chat; exit 0"),
        ({"exit_code": -11}, "ok       harness      model calls: 1 openai-chat; killed by signal 11"),
        (
            {"protocols": {}, "exit_code": None, "state": RolloutState.FAILED, "reason": "exec: not found"},
            "problem  harness      it did not run to its end: exec: not found",
        ),
        (
            {"protocols": {}, "exit_code": None, "state": RolloutState.RUNNING, "error": "it was not over after 9 s"},
            "problem  harness      it did not run to its end: it was not over after 9 s",
        ),
    ],
)  # fmt: skip
def test_judgement_of_a_harness(changes, line):
    assert judge_harness(seen(**changes)).line == line


def test_judgement_of_a_grader():
    refusal = Refused("POST", "/api/reward", 422, "the reward must be a finite number")
    late = seen(reward=None, state=RolloutState.GRADING, error="it was not over after 9 s", grader_log=("working",))
    assert judge_grader(late, by_harness=False).line.startswith(
        "problem  grader       no reward: it was not over after 9 s; "
    )
    assert judge_grader(late, by_harness=False).detail == ("working",)
    none = seen(reward=None, refused=(refusal,), harness_log=("posted nan",))
    assert "no reward: POST /api/reward: 422 the reward must be" in judge_grader(none, by_harness=True).what
    assert judge_grader(none, by_harness=True).detail == ("posted nan",)


def test_advice_for_a_call_that_is_refused():
    long = Refused("POST", "/v1/chat/completions", 400, "This model's maximum context length is 448 tokens, but ...")
    assert advice_for(long) == "raise model.context_tokens, or shorten the harness's prompt"
    assert advice_for(replace(long, text="n must be 1")) == "docs/protocols.md says what is served"


def test_a_finding_is_one_line():
    assert problem("harness", "first\nsecond  third", "do\tthis").line == (
        "problem  harness      first second third; do this"
    )


def test_what_the_harness_asks_for_and_does_not_get_is_a_warning() -> None:
    assert judge_wishes(seen()) == []
    (finding,) = judge_wishes(seen(unmet={"tool_choice": 2, "response_format": 1}))
    assert finding.line.startswith("warning")
    assert finding.what == "the harness asks for what it does not get: response_format, tool_choice"
