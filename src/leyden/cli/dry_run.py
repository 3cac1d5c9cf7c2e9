"""`leyden train --dry-run`: the resolved settings and what would start. Starts and writes nothing."""

from __future__ import annotations

from collections.abc import Mapping

import yaml

from leyden.config import RunConfig
from leyden.doctor.preflight import before_training, check_backend, unheeded
from leyden.run_file import dump
from leyden.trainer.folder import checkpoint_step, newest_checkpoint
from leyden.trainer.tasks import Data


def describe(config: RunConfig, secret: bytes | None, parent: Mapping[str, str]) -> str:
    """Raises what `leyden train` would."""
    data = before_training(config, secret, parent)
    settings = yaml.safe_dump(dump(config), sort_keys=False, allow_unicode=True)
    lines = [*(f"note: {line}" for line in unheeded(config)), "would start"]
    return "\n".join([settings, *(f"# {line}" for line in lines), *(f"#   {line}" for line in plan(config, data))])


def plan(config: RunConfig, data: Data) -> list[str]:
    """One line per part of the run."""
    t, gateway, grader = config.trainer, config.gateway, config.grader
    train, validation = data.train, data.validation
    rollouts = t.groups_per_step * t.group_size
    ways = {"command": grader.command, "function": grader.function, "harness": grader.harness or None}
    way, what = next((name, value) for name, value in ways.items() if value)
    lines = [
        f"gateway     uses the one at {gateway.url}" if gateway.url
        else f"gateway     on {gateway.host}, port {gateway.port or 'any free one'}",
        f"engine      embedded, {config.model.path} on {config.embedded.device}, {config.embedded.slots} slots, "
        f"{config.model.context_tokens} tokens of context",
        f"controller  {config.controller.backend}, {config.controller.concurrency} harnesses at once"
        if config.controller.start else "controller  uses one that already runs",
        f"harness     {' '.join(config.harness.command)}",
        f"grader      {way}: {' '.join(what) if isinstance(what, list) else what}",
        f"memory      {check_backend(config)}",
        f"training    {_steps(config)} of {t.groups_per_step} groups x {t.group_size} = "
        f"{rollouts} rollouts; {len(train)} tasks, {t.steps * t.groups_per_step / len(train):.2f} epochs "
        f"(sha256 {train.sha256[:12]})",
    ]  # fmt: skip
    if validation is not None:
        tasks = min(len(validation), config.eval.tasks or len(validation))
        when = f"every {config.eval.every} steps" if config.eval.every else "only at the ends"
        lines.append(f"validation  {tasks} tasks x {config.eval.samples}, {when} (sha256 {validation.sha256[:12]})")
    lines.append(f"run folder  {config.run_dir}")
    return lines


def _steps(config: RunConfig) -> str:
    """`steps 5 to 30`: from the first, or the one after the newest checkpoint."""
    newest = newest_checkpoint(config.run_dir)
    done, last = (newest and checkpoint_step(newest)) or 0, config.trainer.steps
    return (
        f"steps {done + 1} to {last}"
        if done < last
        else f"nothing to do: {done} steps are done, trainer.steps is {last},"
    )
