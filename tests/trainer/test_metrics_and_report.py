from __future__ import annotations

import orjson
import pytest

from leyden.trainer.metrics_log import MetricsLog, current, read_metrics
from leyden.trainer.report import summarize, write_report


def start(step, lineage):
    return {"event": "start", "step": step, "version": step, "lineage": lineage}


def step(number, lineage, **values):
    return {"event": "step", "step": number, "version": number, "lineage": lineage, **values}


def evaluation(number, value, low, high, lineage="a"):
    passes = [{"k": 1, "value": value, "interval_95": [low, high], "tasks": 8, "method": "wilson"}]
    return {
        "event": "eval", "step": number, "version": number, "lineage": lineage, "pass": passes,
        "coverage": 1.0, "missing": {}, "seconds": 2.0,
    }  # fmt: skip


def test_a_resume_supersedes_later_steps_and_keeps_them_labelled():
    """U02: step 2 skipped, a crash at 5, resumed from 4: every line stays in the file, one per step holds."""
    lines = [
        start(0, "a"),
        step(1, "a"),
        {"event": "skip", "step": 2, "version": 1, "lineage": "a"},
        step(3, "a"),
        evaluation(3, 0.5, 0.2, 0.8),
        step(4, "a"),
        step(5, "a"),
        start(4, "b"),
        step(5, "b"),
    ]
    kept = current(lines)
    assert [(line["event"], line["step"], line["lineage"]) for line in kept] == [
        ("start", 0, "a"), ("step", 1, "a"), ("skip", 2, "a"), ("step", 3, "a"), ("eval", 3, "a"),
        ("step", 4, "a"), ("start", 4, "b"), ("step", 5, "b"),
    ]  # fmt: skip


def test_log_survives_a_line_cut_short(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    log.append("step", step=1, version=1, lineage="a", data={"reward": 0.5})
    log.close()
    with path.open("ab") as file:
        file.write(b'{"event": "step", "st')
    log = MetricsLog(path)
    log.append("step", step=2, version=2, lineage="b", data={"reward": 1.0})
    log.close()
    assert [(line["step"], line["lineage"], line["reward"]) for line in read_metrics(path)] == [
        (1, "a", 0.5),
        (2, "b", 1.0),
    ]
    assert read_metrics(tmp_path / "none") == []


LINES = [
    start(0, "a"),
    evaluation(0, 0.25, 0.1, 0.5),
    step(
        1, "a", reward=0.25, rollouts=4, attempts=5, turns=9, sampled_tokens=90, samples=5, trained_tokens=80,
        trained_rollouts=3, excluded={"infrastructure": 1}, forks={"compaction": 2}, sample_limits={"cut": 1},
        max_logprob_diff=2e-5, seconds={"rollouts": 3.0, "update": 1.0}, groups=2, groups_without_spread=1,
        groups_of_one=0, groups_empty=0, outcomes={"completed": 3, "crashed": 1},
        first_failures={"crashed": {"rollout": "r3", "reason": "exit 1"}},
    ),
    {"event": "skip", "step": 2, "version": 1, "lineage": "a", "rollouts": 4, "excluded": {"no_calls": 4},
     "reward": None, "seconds": {"rollouts": 1.5}},
    step(3, "a", reward=0.9, rollouts=99),
    start(2, "b"),
    step(
        3, "b", reward=0.75, rollouts=4, attempts=4, turns=4, sampled_tokens=40, samples=4, trained_tokens=40,
        trained_rollouts=4, excluded={}, forks={}, max_logprob_diff=1e-5, outcomes={"crashed": 2},
        first_failures={"crashed": {"rollout": "r9", "reason": "exit 2"}},
        seconds={"rollouts": 2.0, "update": 1.0},
    ),
    evaluation(3, 0.75, 0.5, 0.9, "b"),
]  # fmt: skip


def test_summary():
    assert summarize(LINES) == {
        "steps": 3,
        "skipped_steps": 1,
        "policy_version": 3,
        "lineages": 2,
        "pass_at_1_before": 0.25,
        "pass_at_1_before_interval_95": [0.1, 0.5],
        "pass_at_1_after": 0.75,
        "pass_at_1_after_interval_95": [0.5, 0.9],
        "mean_reward_before": None,
        "mean_reward_after": None,
        "pass_threshold": None,
        "best": {
            "step": 3,
            "version": 3,
            "mean_reward": None,
            "pass_at_1": 0.75,
            "checkpoint": "checkpoints/step-000003",
        },
        "nothing_learned": None,
        "first_failures": {"crashed": {"rollout": "r3", "reason": "exit 1"}},
        "evaluations": [
            {
                "step": e["step"],
                "version": e["version"],
                "pass": e["pass"],
                "coverage": 1.0,
                "missing": {},
                "mean_reward": None,
                "outcomes": None,
            }
            for e in (LINES[1], LINES[-1])
        ],
        "counts": {
            "rollouts": 12,
            "attempts": 9,
            "turns": 13,
            "sampled_tokens": 130,
            "samples": 9,
            "trained_tokens": 120,
            "outcomes": {"completed": 3, "crashed": 3},
            "excluded": {"infrastructure": 1, "no_calls": 4},
            "forks": {"compaction": 2},
            "sample_limits": {"cut": 1},
            "unmet": {},
        },
        "samples_per_rollout": 9 / 7,
        "max_logprob_diff": 2e-5,
        "seconds": {"evaluation": 4.0, "rollouts": 6.5, "update": 2.0},
    }


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"groups_without_spread": 1}, None),
        ({"groups_without_spread": 2}, "rewards never differed within a group, so every advantage was 0"),
        ({"groups_of_one": 1, "groups_empty": 1}, "rewards never differed within a group, so every advantage was 0"),
        ({"groups_empty": 2, "turns": 0}, "no rollout made a model call that was served"),
    ],
)
def test_a_run_that_taught_nothing_says_why(values, why):
    line = {"groups": 2, "turns": 5, "groups_without_spread": 0, "groups_of_one": 0, "groups_empty": 0} | values
    assert summarize([start(0, "a"), step(1, "a", **line)])["nothing_learned"] == why
    learned = step(2, "a", groups=1, turns=1, groups_without_spread=0)
    assert summarize([start(0, "a"), step(1, "a", **line), learned])["nothing_learned"] is None


def test_summary_of_nothing():
    summary = summarize([])
    assert (summary["pass_at_1_before"], summary["samples_per_rollout"], summary["max_logprob_diff"]) == (None,) * 3


def test_a_single_evaluation_is_not_both_before_and_after():
    only_before, only_after = summarize(LINES[:2]), summarize([LINES[0], LINES[2], LINES[-1]])
    assert (only_before["pass_at_1_before"], only_before["pass_at_1_after"]) == (0.25, None)
    assert (only_after["pass_at_1_before"], only_after["pass_at_1_after"]) == (None, 0.75)


def test_report_files(tmp_path):
    assert orjson.loads(orjson.dumps(write_report(tmp_path, LINES))) == summarize(LINES)
    assert orjson.loads((tmp_path / "summary.json").read_bytes()) == summarize(LINES)
    assert (tmp_path / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["learning_curve.png", "summary.json"]
    write_report(tmp_path, [])
