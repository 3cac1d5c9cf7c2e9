"""`leyden train`."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

from leyden.cli.signals import Stopped, run_until_signal
from leyden.config import RunConfig
from leyden.trainer.display import Display, named
from leyden.trainer.folder import newest_checkpoint
from leyden.types import Json

NOTHING = 3  # the exit status of what ran to its end and came to nothing
LEFT = ("summary.json", "learning_curve.png", "tensorboard", "attempts", "logs")


def run_training(config: RunConfig, run_file: Path, overrides: tuple[str, ...], secret: bytes | None) -> None:
    display = Display()
    from leyden.doctor.preflight import before_training, unheeded
    from leyden.trainer.run import Command, train

    data = before_training(config, secret, os.environ)
    for line in unheeded(config):
        display.line(f"note: {line}")
    command = Command(run_file, overrides, secret)
    again = shlex.join(["leyden", "train", str(run_file), *overrides])
    try:
        summary = run_until_signal(
            train(config, data, command, display),
            on_stop=lambda: display.line("stopping: the step's writes are finished first (once more to end at once)"),
        )
    except Stopped as stopped:
        display.line(f"stopped; resume with: {again}")
        sys.exit(stopped.exit_status)
    finally:
        display.clear()
    for line in [*closing_lines(config.run_dir, summary), *ways_on(config, run_file, overrides)]:
        display.line(line)
    if summary["nothing_learned"]:
        for line in nothing_lines(summary):
            display.line(line, "red")
        sys.exit(NOTHING)


def closing_lines(run_dir: Path, summary: Json) -> list[str]:
    """What a user wants to know of a finished run."""
    lines = [f"finished {summary['steps']} steps, policy version {summary['policy_version']}"]
    for when in ("before", "after"):
        value, interval = summary[f"pass_at_1_{when}"], summary[f"pass_at_1_{when}_interval_95"]
        mean = summary.get(f"mean_reward_{when}")
        if value is not None:
            known = "" if mean is None else f", mean reward {mean:.3f}"
            lines.append(f"validation pass@1 {when:6} {value:.3f} [{interval[0]:.3f}, {interval[1]:.3f}]{known}")
    if best := summary.get("best"):
        where = run_dir / best["checkpoint"] if best["checkpoint"] else "the initial model"
        lines.append(f"best validation pass@1 {best['pass_at_1']:.3f} at step {best['step']}: {where}")
    seconds = ", ".join(f"{phase} {value:.1f}" for phase, value in summary["seconds"].items())
    lines.append(f"seconds: {seconds}")
    lines += [f"{name:20}{run_dir / name}" for name in LEFT]
    return lines


def nothing_lines(summary: Json) -> list[str]:
    """That a run taught nothing, why, and how its rollouts ended."""
    lines = [f"nothing was learned: {summary['nothing_learned']}"]
    ended = {kind: n for kind, n in summary["counts"]["outcomes"].items() if n}
    lines.append(f"rollouts ended {named(ended)}")
    lines += [
        f"first {kind}: rollout {first['rollout']}: {first['reason']}"
        for kind, first in summary["first_failures"].items()
    ]
    return lines


def ways_on(config: RunConfig, run_file: Path, overrides: tuple[str, ...]) -> list[str]:
    """The newest checkpoint, and the two commands that use it."""
    checkpoint = newest_checkpoint(config.run_dir)
    if checkpoint is None:
        return []
    measured = ["leyden", "eval", str(run_file), *overrides, "--checkpoint", str(checkpoint)]
    if config.data.validation is None:
        measured += ["--split", "train"]
    served = ["vllm", "serve", str(checkpoint), "--served-model-name", config.model.name]
    return [
        f"{'checkpoint':20}{checkpoint}, a Hugging Face folder",
        f"{'measure it':20}{shlex.join(measured)}",
        f"{'serve it':20}{shlex.join(served)}",
    ]
