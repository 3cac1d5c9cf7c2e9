from __future__ import annotations

from dataclasses import replace

import pytest

from leyden.client import Rollout
from leyden.records import LAST_WORDS
from leyden.trainer.outcomes import FirstFailures, count, first_failures, headline, outcome, words
from leyden.types import FailureClass, RolloutState

DONE = Rollout(
    rollout_id="r1", group_id="g", kind="train", step=1, slot=0, member=0, task={}, state=RolloutState.SUCCEEDED,
    attempt=1, change=1, reward=1.0, failure=None, reason=None, exit_code=0, timed_out=False, turns=3,
    sampled_tokens=9, min_version=0, max_version=0, held_s=0.0,
)  # fmt: skip
FAILED = replace(DONE, state=RolloutState.FAILED, failure=FailureClass.AGENT, exit_code=1, reason="exit 1")
CONTEXT = {"context_length_exceeded": "This model's maximum context length is 100 tokens"}


@pytest.mark.parametrize(
    ("rollout", "kind"),
    [
        (DONE, "completed"),
        (FAILED, "crashed"),
        (replace(FAILED, exit_code=-9, reason="killed by SIGKILL"), "crashed"),
        (replace(FAILED, turns=0), "crashed"),
        (replace(FAILED, timed_out=True, reason="timeout after 5.0 s"), "timed_out"),
        (replace(FAILED, reason="OOMKilled: over harness.limits.memory_bytes 9 (exit 137)"), "limit_memory_bytes"),
        (replace(FAILED, reason=f"exit 1{LAST_WORDS}see harness.limits.pids"), "crashed"),
        (replace(FAILED, refusals={"budget_exceeded": "may make 3"}), "turns_spent"),
        (replace(DONE, refusals={"budget_exceeded": "may make 3"}), "turns_spent"),
        (replace(FAILED, refusals=CONTEXT), "context_full"),
        (replace(DONE, turns=0, refusals=CONTEXT), "context_full"),
        (replace(DONE, turns=0, refusals={"invalid_json": "no"}), "refused"),
        (replace(DONE, refusals={"invalid_json": "no"}), "completed"),
        (replace(DONE, turns=0), "no_calls"),
        (replace(FAILED, failure=FailureClass.INFRASTRUCTURE), "infrastructure"),
        (replace(FAILED, state=RolloutState.CANCELLED, failure=None), "cancelled"),
    ],
)
def test_the_kind_of_an_end(rollout: Rollout, kind: str) -> None:
    assert outcome(rollout) == kind


def test_the_words_of_an_end_are_its_own() -> None:
    crashed = replace(FAILED, reason=f"exit 2{LAST_WORDS}python: can't open file 'agent.py'\x1b[2J")
    assert words(crashed) == r"exit 2; last words: python: can't open file 'agent.py'\x1b[2J"
    assert headline(replace(DONE, turns=0, refusals=CONTEXT)) == (
        "context_full: rollout r1: the harness ended with exit 0; a model call was refused (context_length_exceeded): "
        "This model's maximum context length is 100 tokens. raise model.context_tokens, or shorten the harness's prompt"
    )
    assert headline(replace(DONE, turns=0)).startswith("no_calls: rollout r1: the harness ended with exit 0. does the")


def test_counts_and_the_first_of_each_kind() -> None:
    rollouts = [replace(FAILED, rollout_id="r3", change=3), DONE, replace(FAILED, rollout_id="r2", change=2)]
    assert count(rollouts) == {"crashed": 2, "completed": 1}
    assert first_failures(rollouts) == {"crashed": {"rollout": "r2", "reason": "exit 1"}}


def test_the_first_failure_of_each_kind_is_said_once() -> None:
    said: list[str] = []
    report = FirstFailures(said.append, set())
    for rollout in (DONE, FAILED, replace(FAILED, rollout_id="r2"), replace(DONE, rollout_id="r3", turns=0)):
        report(rollout)
    assert [text.split(": ")[1:3] for text in said] == [["crashed", "rollout r1"], ["no_calls", "rollout r3"]]
