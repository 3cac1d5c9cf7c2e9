"""`leyden train --dry-run`: the resolved settings and what would start. Starts and writes nothing."""

from __future__ import annotations

import yaml

from leyden.cli.app import dump
from leyden.config import RunConfig
from leyden.errors import ConfigError
from leyden.gateway.render import check_template_kwargs
from leyden.trainer.folder import checkpoint_step, newest_checkpoint
from leyden.trainer.tasks import TaskSet, read_tasks


def describe(config: RunConfig) -> str:
    """Raises ConfigError for engines that cannot be trained and data files that cannot be read."""
    check_trainable(config)
    check_template_kwargs(config.model.renderer, config.model.template_kwargs)
    train = read_tasks(config.data.train, "data.train")
    path = config.data.validation
    validation = None if path is None else read_tasks(path, "data.validation")
    settings = yaml.safe_dump(dump(config), sort_keys=False, allow_unicode=True)
    return "\n".join([settings, "# would start", *(f"#   {line}" for line in plan(config, train, validation))])


def check_trainable(config: RunConfig) -> None:
    """Raises ConfigError for engines that the trainer cannot update."""
    if config.engine.urls or config.engine.kind != "leyden":
        raise ConfigError(
            "engine",
            "the embedded trainer updates no engine but its own: leave engine.urls and engine.kind out to train; "
            "`leyden gateway` and `leyden eval` take them",
        )


def plan(config: RunConfig, train: TaskSet, validation: TaskSet | None) -> list[str]:
    """One line per part of the run."""
    t, gateway, grader = config.trainer, config.gateway, config.grader
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
        f"training    steps {_first_step(config)} to {t.steps} of {t.groups_per_step} groups x {t.group_size} = "
        f"{rollouts} rollouts; {len(train)} tasks, {t.steps * t.groups_per_step / len(train):.2f} epochs "
        f"(sha256 {train.sha256[:12]})",
    ]  # fmt: skip
    if validation is not None:
        tasks = min(len(validation), config.eval.tasks or len(validation))
        when = f"every {config.eval.every} steps" if config.eval.every else "only at the ends"
        lines.append(f"validation  {tasks} tasks x {config.eval.samples}, {when} (sha256 {validation.sha256[:12]})")
    lines.append(f"run folder  {config.run_dir}")
    return lines


def _first_step(config: RunConfig) -> int:
    """1, or the one after the newest checkpoint."""
    newest = newest_checkpoint(config.run_dir)
    return 1 + ((newest and checkpoint_step(newest)) or 0)
