"""summary.json and learning_curve.png from the lines of metrics.jsonl. Written whole or not at all."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import orjson

from leyden.trainer.folder import checkpoint_name
from leyden.trainer.metrics_log import best_evaluation, current, pass_at_1
from leyden.types import Json

EVALUATION = ("step", "version", "mean_reward", "pass", "coverage", "missing", "outcomes")
COUNTED = ("rollouts", "attempts", "turns", "sampled_tokens", "samples", "trained_tokens")
COUNTED_BY_NAME = ("outcomes", "excluded", "forks", "sample_limits", "unmet")


def summarize(lines: Sequence[Json]) -> Json:
    """One object for a whole run, over the lines that hold.

    `pass_at_1_before` and `_after`, like `mean_reward_before` and `_after`, are those of the first and the last
    evaluation, null without one. `nothing_learned` says why no update can have taught anything, null where one did;
    `best` is the evaluation whose checkpoint is kept, `first_failures` has for each way a training rollout failed the
    first one. Counts are of training rollouts; `seconds` are per phase over all lines that hold, `lineages` how often
    the run was started.
    """
    kept = current(lines)
    evals = [line for line in kept if line["event"] == "eval"]
    steps = [line for line in kept if line["event"] in ("step", "skip")]
    counts: Json = {name: sum(line.get(name) or 0 for line in steps) for name in COUNTED}
    for name in COUNTED_BY_NAME:
        counts[name] = dict(sum((Counter(line.get(name) or {}) for line in steps), Counter()))
    trained_rollouts = sum(line.get("trained_rollouts") or 0 for line in steps)
    before = next((e for e in evals if e["step"] == 0), None)
    after = next((e for e in reversed(evals) if e["step"] > 0), None)
    return {
        "steps": max((line["step"] for line in steps), default=0),
        "skipped_steps": sum(line["event"] == "skip" for line in steps),
        "policy_version": max((line["version"] for line in kept), default=0),
        "lineages": len({line["lineage"] for line in lines}),
        "pass_at_1_before": pass_at_1(before, "value"),
        "pass_at_1_before_interval_95": pass_at_1(before, "interval_95"),
        "pass_at_1_after": pass_at_1(after, "value"),
        "pass_at_1_after_interval_95": pass_at_1(after, "interval_95"),
        "mean_reward_before": before and before.get("mean_reward"),
        "mean_reward_after": after and after.get("mean_reward"),
        "pass_threshold": next((e["pass_threshold"] for e in reversed(evals) if "pass_threshold" in e), None),
        "evaluations": [{k: e.get(k) for k in EVALUATION} for e in evals],
        "best": _best(kept),
        "nothing_learned": nothing_learned(steps),
        "counts": counts,
        "first_failures": _first_failures(steps),
        "samples_per_rollout": counts["samples"] / trained_rollouts if trained_rollouts else None,
        "max_logprob_diff": max(
            (line["max_logprob_diff"] for line in steps if "max_logprob_diff" in line), default=None
        ),
        "seconds": _seconds(kept),
    }


def nothing_learned(steps: Sequence[Json]) -> str | None:
    """Why the steps of a run cannot have taught the model anything, or None."""
    if not steps or any(_with_spread(line) for line in steps):
        return None
    if not any(line.get("turns") for line in steps):
        return "no rollout made a model call that was served"
    return "rewards never differed within a group, so every advantage was 0"


def _best(lines: Sequence[Json]) -> Json | None:
    """The best of the evaluations; `checkpoint` is null for the initial model."""
    best = best_evaluation(lines)
    if best is None:
        return None
    folder = f"checkpoints/{checkpoint_name(best['step'])}" if best["step"] else None
    facts = {name: best.get(name) for name in ("step", "version", "mean_reward")}
    return {**facts, "pass_at_1": pass_at_1(best, "value"), "checkpoint": folder}


def _with_spread(line: Json) -> int:
    """Groups of a step with rewards that differ."""
    without = sum(line.get(name) or 0 for name in ("groups_without_spread", "groups_of_one", "groups_empty"))
    return int(line.get("groups") or 0) - without


def _first_failures(steps: Sequence[Json]) -> Json:
    found: Json = {}
    for line in steps:
        found = (line.get("first_failures") or {}) | found
    return found


def write_report(run_dir: Path, lines: Sequence[Json]) -> Json:
    """Write both files into `run_dir` and return the summary."""
    summary = summarize(lines)
    write_atomically(run_dir / "summary.json", orjson.dumps(summary, option=orjson.OPT_INDENT_2))
    draw_curve(run_dir / "learning_curve.png", current(lines))
    return summary


def write_atomically(path: Path, content: bytes) -> None:
    """Replace `path` in one rename, so that a reader or a crash never sees half of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.touch(mode=0o600)  # tasks and settings are the user's own
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def draw_curve(path: Path, lines: Iterable[Json]) -> None:
    """Validation pass@1 with its 95 % band, and the mean training reward, over steps."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    kept = list(lines)
    rewards = [(line["step"], line["reward"]) for line in kept if line.get("reward") is not None]
    passes = [(e["step"], e["pass"][0]) for e in kept if e["event"] == "eval" and pass_at_1(e, "value") is not None]
    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(xlabel="step", ylim=(-0.02, max([1.02, *(r for _, r in rewards)])))
    if rewards:
        axes.plot(*zip(*rewards, strict=True), color="0.6", linewidth=1, label="training reward (mean)")
    if passes:
        steps = [step for step, _ in passes]
        low, high = zip(*(p["interval_95"] for _, p in passes), strict=True)
        axes.fill_between(steps, low, high, alpha=0.2, color="C0", label="95 %")
        axes.plot(steps, [p["value"] for _, p in passes], "o-", color="C0", label="validation pass@1")
    if rewards or passes:
        axes.legend(loc="best")
    axes.grid(alpha=0.3)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    figure.savefig(temporary, format="png", dpi=120)
    temporary.replace(path)


def _seconds(lines: Iterable[Json]) -> dict[str, float]:
    total: Counter[str] = Counter()
    for line in lines:
        seconds = line.get("seconds") or {}
        total.update({"evaluation": seconds} if isinstance(seconds, int | float) else seconds)
    return {name: round(value, 3) for name, value in total.items()}
