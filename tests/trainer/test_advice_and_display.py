from __future__ import annotations

import io

import pytest
from rich.console import Console

from leyden.trainer.advice import advice
from leyden.trainer.collect import Progress
from leyden.trainer.display import Display, named, progress_line, step_line


def step(number=1, **values):
    base = {
        "event": "step", "step": number, "version": number, "groups": 4, "groups_without_spread": 1, "reward": 0.5,
        "pass_rate": 0.5, "rollouts": 16, "excluded": {}, "samples": 16, "trained_rollouts": 16, "forks": {},
        "trained_tokens": 100, "entropy": 1.0, "grad_norm": 0.5, "max_logprob_diff": 1e-6, "mean_logprob_diff": 1e-7,
        "seconds": {"rollouts": 2.0, "update": 0.25},
    }  # fmt: skip
    return base | values


def test_a_healthy_run_is_left_alone():
    assert advice([step(n) for n in range(1, 20)]) == []
    assert advice([]) == []
    assert advice([{"event": "eval", "step": 0}]) == []


def test_silent_degeneracy_is_said():
    """U04: 95 % equal groups, a mismatch, entropy times three."""
    healthy = [step(n) for n in range(1, 6)]
    window = [step(n, groups=20, groups_without_spread=19) for n in range(6, 11)]
    assert advice(healthy + window) == [
        "95 of the 100 groups of the last 5 steps have equal rewards: almost nothing is learned; "
        "use easier or harder tasks, or a larger trainer.group_size"
    ]
    assert advice([step(groups_without_spread=4, reward=0.0)]) == [
        "all 4 groups of this step have equal rewards (mean 0): nothing was learned from it; "
        "use easier or harder tasks, or a larger trainer.group_size"
    ]
    assert advice([*healthy, step(6, entropy=3.5)]) == [
        "entropy rose from 1 to 3.5: the policy may be falling apart; lower optimizer.lr"
    ]
    assert advice([step(max_logprob_diff=2.0, mean_logprob_diff=0.1)]) == [
        "recorded log-probs differ from the trainer's by 0.1 on average, 2 at most: sampler and trainer do not "
        "compute the same distribution (temperature, precision, weights)"
    ]


def test_what_is_left_out_and_split_is_said():
    assert advice([step(excluded={"no_calls": 6, "infrastructure": 2})]) == [
        "8 of 16 rollouts were left out (infrastructure 2, no_calls 6); "
        "does the harness use OPENAI_BASE_URL (or its family's variable)?"
    ]
    assert advice([step(excluded={"no_calls": 8}, outcomes={"context_full": 8})]) == [
        "8 of 16 rollouts were left out (no_calls 8)"
    ]
    assert advice([step(excluded={"infrastructure": 7})]) == []
    assert advice([step(samples=48, forks={"compaction": 3, "rewritten history": 20})]) == [
        "3.0 samples per rollout: prompts do not extend what was recorded; "
        "the most frequent cause is 'rewritten history'"
    ]


def test_progress_line():
    assert progress_line("step 3", Progress(0, 8, None, 0.4)) == "step 3  [....................]  0/8 rollouts, 0 s"
    assert progress_line("step 3", Progress(4, 8, 0.25, 6.0)) == (
        "step 3  [##########..........]  4/8 rollouts, reward 0.250, 6 s, about 6 s left"
    )
    assert progress_line("step 3", Progress(8, 8, 0.5, 9.0)).endswith("8/8 rollouts, reward 0.500, 9 s")


def test_step_line():
    line = step(7, excluded={"infrastructure": 1}, samples=20, forks={"a": 1, "b": 3}, sample_limits={"cut": 2})
    assert step_line(line, 60) == (
        "step 7/60 | reward 0.500, pass 0.50 | groups without spread 1/4 | left out infrastructure 1 | "
        "1.25 samples/rollout | forks b 3, a 1 | cut 2 | 100 tokens | entropy 1 | grad 0.5 | logprob diff 1e-06 | "
        "rollouts 2.0s update 0.2s"
    )
    ends = {"completed": 9, "crashed": 4, "timed_out": 2, "infrastructure": 1}
    assert "| ended crashed 4, timed_out 2 | left out infrastructure 1 |" in step_line({**line, "outcomes": ends}, 60)
    skipped = {"event": "skip", "step": 2, "why": "every advantage is 0", "seconds": {"rollouts": 1.0}, "reward": None}
    assert step_line(skipped, 60) == "step 2/60 | skipped: every advantage is 0 | rollouts 1.0s"


def test_named():
    assert named({"a": 1, "c": 2, "b": 2}) == "b 2, c 2, a 1"
    assert named({}) == ""


def test_without_a_terminal_lines_are_plain_and_the_live_line_is_rare():
    screen = io.StringIO()
    display = Display(Console(file=screen, width=200))
    display.live("step 1 ...")
    display.line("step 1 done")
    display.warn("careful")
    display.clear()
    assert screen.getvalue() == "step 1 done\nwarning: careful\n"


@pytest.mark.parametrize("width", [40, 200])
def test_on_a_terminal_the_live_line_is_replaced(width):
    screen = io.StringIO()
    display = Display(Console(file=screen, width=width, force_terminal=True, color_system=None))
    display.live("first " * 20)
    display.live("second")
    display.line("stays")
    display.clear()
    text = screen.getvalue()
    assert text.index("first") < text.index("second") < text.index("stays")
    assert text.endswith("stays\n")


@pytest.mark.parametrize("terminal", [True, False])
def test_the_display_shows_what_it_is_given_and_obeys_none_of_it(terminal):
    screen = io.StringIO()
    console = Console(file=screen, width=200, force_terminal=terminal, color_system=None)
    display = Display(console)
    display.warn("first failure: \x1b]52;c;aGk=\x07 [/zzz]\nstep 5/5 | reward 1.000")
    display.clear()
    text = screen.getvalue()
    assert text == "warning: first failure: \\x1b]52;c;aGk=\\x07 [/zzz]\\nstep 5/5 | reward 1.000\n"
