"""The demo's training at full length, over seeds, judged on tasks that chose no setting.

    make bench-learning       or: python benchmarks/bench_learning.py [--seeds 0 1 2] [--steps 50]

Each seed is a run of its own from the committed base model, through the real mini-swe-agent; pass@1 is measured on the
`test` split of examples/micro_swe (held out by template and by names). Writes build/bench/learning.json and .png.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from common import RESULTS, ROOT, leyden, report

EXAMPLE = ROOT / "examples" / "micro_swe"
DATA = ROOT / "build" / "micro_swe"


def train(seed: int, steps: int, tasks: int) -> dict[str, Any]:
    """The summary of one run; a run that was interrupted is resumed, a finished one is read."""
    run_dir = RESULTS / "learning" / f"seed-{seed}-steps-{steps}"
    settings = {
        "run_dir": run_dir,
        "data.validation": DATA / "test.jsonl",
        "trainer.seed": seed,
        "trainer.steps": steps,
        "eval.tasks": tasks,
        "eval.every": 20,
    }
    overrides = [f"{key}={value}" for key, value in settings.items()]
    subprocess.run(leyden("train", str(EXAMPLE / "run.yaml"), *overrides), check=True, cwd=ROOT)
    summary: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    return summary


def curve(summary: dict[str, Any]) -> list[tuple[int, float, list[float]]]:
    """(step, pass@1, interval) of each evaluation."""
    points = []
    for evaluation in summary["evaluations"]:
        one = next(p for p in evaluation["pass"] if p["k"] == 1)
        points.append((evaluation["step"], one["value"], one["interval_95"]))
    return points


def plot(curves: dict[int, list[tuple[int, float, list[float]]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for seed, points in curves.items():
        steps, values = [p[0] for p in points], [p[1] for p in points]
        (line,) = axes.plot(steps, values, marker="o", label=f"seed {seed}")
        axes.fill_between(
            steps, [p[2][0] for p in points], [p[2][1] for p in points], alpha=0.15, color=line.get_color()
        )
    axes.set(xlabel="step", ylabel="pass@1 on held-out tasks", ylim=(0, 1), title="micro_swe through mini-swe-agent")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def row(seed: int, summary: dict[str, Any]) -> list[Any]:
    before, after = summary["pass_at_1_before"], summary["pass_at_1_after"]
    (low, high), (low_after, high_after) = (summary[f"pass_at_1_{w}_interval_95"] for w in ("before", "after"))
    return [
        seed,
        f"{before:.3f} [{low:.3f}, {high:.3f}]",
        f"{after:.3f} [{low_after:.3f}, {high_after:.3f}]",
        after - before,
        high < low_after,
        summary["samples_per_rollout"],
        f"{summary['max_logprob_diff']:.1e}",
        sum(summary["counts"]["excluded"].values()),
        round(sum(summary["seconds"].values())),
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--tasks", type=int, default=128, help="held-out tasks per evaluation")
    arguments = parser.parse_args()
    subprocess.run([sys.executable, str(EXAMPLE / "tasks.py"), "--out", str(DATA)], check=True, cwd=ROOT)
    summaries = {seed: train(seed, arguments.steps, arguments.tasks) for seed in arguments.seeds}
    curves = {seed: curve(summary) for seed, summary in summaries.items()}
    columns = [
        "seed",
        "pass@1 before",
        "pass@1 after",
        "rise",
        "apart",
        "samples/rollout",
        "logprob diff",
        "excluded",
        "s",
    ]
    report("learning", columns, [row(seed, s) for seed, s in summaries.items()], curves=curves, steps=arguments.steps)
    plot(curves, RESULTS / "learning.png")
    print(RESULTS / "learning.png")


if __name__ == "__main__":
    main()
