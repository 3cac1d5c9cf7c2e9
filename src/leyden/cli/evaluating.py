"""`leyden eval`: pass@k of a checkpoint in a run folder of its own, so that it may run beside training."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import orjson

from leyden.cli.screen import Screen, TableParts
from leyden.cli.signals import Stopped, run_until_signal
from leyden.cli.training import NOTHING
from leyden.config import RunConfig
from leyden.doctor.preflight import before_rollouts
from leyden.errors import ConfigError
from leyden.trainer.display import Display, named
from leyden.trainer.evaluate import EvalResult
from leyden.trainer.folder import checkpoint_name, newest_checkpoint
from leyden.trainer.metrics_log import best_evaluation, read_metrics
from leyden.trainer.tasks import TaskSet, read_tasks


def run_evaluation(
    config: RunConfig,
    run_file: Path,
    overrides: tuple[str, ...],
    secret: bytes | None,
    *,
    checkpoint: str,
    ks: Sequence[int],
    samples: int | None,
    split: str,
    limit: int | None,
) -> None:
    """Print a table and write result.json. Raises ConfigError for options that contradict each other."""
    before_rollouts(config, secret, os.environ)
    tasks = choose_tasks(config, split, limit)
    samples = choose_samples(ks, samples, config.eval.samples)
    folder = choose_checkpoint(config.run_dir, config.engine.urls, checkpoint)
    name = "engines" if config.engine.urls else folder.name if folder else "initial"
    run_dir = config.run_dir / "eval" / f"{time.strftime('%Y%m%d-%H%M%S')}-{name}"
    settings = config.model_copy(update={"run_dir": run_dir})
    display = Display()
    what = ", ".join(config.engine.urls) or folder or "the initial model"
    display.line(f"evaluating {what} on {len(tasks)} tasks x {samples}")
    from leyden.trainer.run import Command, evaluate_once

    command = Command(run_file, (*overrides, f"run_dir={json.dumps(str(run_dir))}"), secret)
    work = evaluate_once(settings, tasks, command, display, folder=folder, samples=samples, ks=sorted(set(ks)))
    try:
        result = run_until_signal(work, on_stop=lambda: display.line("stopping"))
    except Stopped as stopped:
        sys.exit(stopped.exit_status)
    finally:
        display.clear()
    document = {"checkpoint": folder and str(folder), "tasks_sha256": tasks.sha256, **result.as_json()}
    path = run_dir / "result.json"
    path.write_bytes(orjson.dumps(document, option=orjson.OPT_INDENT_2))
    Screen().table(*table(result))
    display.line(f"written to {path}")
    if result.nothing_measured:
        display.line(f"nothing was measured: {result.nothing_measured}", "red")
        for kind, first in result.first_failures.items():
            display.line(f"first {kind}: rollout {first['rollout']}: {first['reason']}", "red")
        sys.exit(NOTHING)


def choose_tasks(config: RunConfig, split: str, limit: int | None) -> TaskSet:
    """The first `limit` tasks of a split; without it, of validation as many as training looks at (`eval.tasks`)."""
    if split == "train":
        tasks = read_tasks(config.data.train, "data.train")
    elif split == "validation":
        if config.data.validation is None:
            raise ConfigError("--split", "the run file has no data.validation; give --split train or a JSON-lines file")
        tasks = read_tasks(config.data.validation, "data.validation")
        limit = config.eval.tasks if limit is None else limit
    else:
        tasks = read_tasks(Path(split), "--split")
    return replace(tasks, tasks=tasks.tasks[:limit])


def choose_samples(ks: Sequence[int], samples: int | None, configured: int) -> int:
    """Rollouts per task: enough for the largest k."""
    if samples is None:
        return max(configured, *ks)
    if samples < max(ks):
        raise ConfigError("--samples", f"{samples} samples a task cannot give pass@{max(ks)}; use at least {max(ks)}")
    return samples


def choose_checkpoint(run_dir: Path, engines: Sequence[str], wanted: str) -> Path | None:
    """None is the initial model; so is `latest` of a run without a checkpoint. Engines that run already hold
    what they hold.
    """
    if engines and wanted not in ("none", "latest"):
        raise ConfigError(
            "--checkpoint", f"{wanted} cannot be loaded into the engines of engine.urls; leave one of the two out"
        )
    if wanted == "none" or engines:
        return None
    if wanted == "latest":
        return newest_checkpoint(run_dir)
    if wanted == "best":
        return best_checkpoint(run_dir)
    folder = Path(wanted)
    if not folder.is_dir():
        raise ConfigError("--checkpoint", f"{wanted} is not a folder; give one of {run_dir}/checkpoints, or none")
    return folder


def best_checkpoint(run_dir: Path) -> Path | None:
    """That of the best validation of the run; None is the initial model. Raises ConfigError where there is none."""
    best = best_evaluation(read_metrics(run_dir / "metrics.jsonl"))
    if best is None:
        raise ConfigError("--checkpoint", f"no validation of {run_dir} has a result; give latest or a folder")
    if best["step"] == 0:
        return None
    folder = run_dir / "checkpoints" / checkpoint_name(best["step"])
    if not folder.is_dir():
        raise ConfigError("--checkpoint", f"the best validation was at step {best['step']}, but {folder} is gone")
    return folder


def table(result: EvalResult) -> TableParts:
    """One row per k."""
    missing = f", missing: {named(result.missing)}" if result.missing else ""
    mean = "none" if result.mean_reward is None else f"{result.mean_reward:.3f}"
    title = (
        f"step {result.step}, policy version {result.version}: {result.rewarded} of {result.rollouts} rollouts "
        f"rewarded{missing}; mean reward {mean}, a pass is a reward of at least {result.pass_threshold:g}"
    )
    rows = []
    for e in result.estimates:
        value, interval = ("no data", "") if e.value is None else (f"{e.value:.3f}", f"[{e.low:.3f}, {e.high:.3f}]")
        rows.append((str(e.k), value, interval, str(e.tasks), e.method))
    return ("k", "pass@k", "95 % interval", "tasks", "interval by"), rows, title
