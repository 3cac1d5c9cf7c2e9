"""The commands. Each reads its settings, hands over to the package that does the work, and reports errors in one line.

Exit status: 0 done, 1 failed, 2 the run file or the command line is wrong, 3 it ran to its end and nothing came of it
(`train`: no reward ever differed, or no model call was served; `eval`: nothing to measure), 130 and 143 stopped by
SIGINT and SIGTERM.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import sys
import traceback
from pathlib import Path
from typing import Annotated

import typer

from leyden import __version__
from leyden.cli.screen import Screen, plain_console
from leyden.config import ControllerConfig
from leyden.errors import ConfigError, LeydenError
from leyden.extras import need
from leyden.run_file import load
from leyden.visible import LogFormatter, visible_lines

app = typer.Typer(
    name="leyden",
    help="Reinforcement learning of language-model agents through the harness that will be deployed.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

RunFile = Annotated[Path, typer.Argument(metavar="RUN.yaml", help="The run file.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY.SUB=VALUE]...", help="Settings that replace those of the run file.", show_default=False
    ),
]
WithParent = Annotated[bool, typer.Option("--with-parent", hidden=True, help="End when standard input closes.")]
MIN_SECRET_BYTES = 32


def run() -> None:
    try:
        app(standalone_mode=True)
    except LeydenError as error:
        Screen(plain_console(stderr=True)).error(str(error))
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            where = f"{error.filename}: " if error.filename else ""
            message = f"{where}{error.strerror}; make room, and the same command goes on"
            Screen(plain_console(stderr=True)).error(message)
        else:
            sys.stderr.write(visible_lines(traceback.format_exc()))
        sys.exit(1)


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and end.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log what happens inside.")] = False,
) -> None:
    if version:
        print(__version__)
        raise typer.Exit
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LogFormatter())
    logging.basicConfig(level=logging.DEBUG if verbose else logging.WARNING, handlers=[handler])
    logging.getLogger("leyden").setLevel(logging.DEBUG if verbose else logging.INFO)


@app.command()
def train(
    run_file: RunFile,
    overrides: Overrides = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the resolved settings and what would start.")
    ] = False,
) -> None:
    """Train; the same command resumes a run that was stopped."""
    config = load(run_file, overrides)
    need("leyden train", "embedded", *_extras_of(config.controller))
    if dry_run:
        from leyden.cli.dry_run import describe

        print(visible_lines(describe(config, _secret(), os.environ)))
        return
    from leyden.cli.training import run_training

    run_training(config, run_file, tuple(overrides or ()), _secret())


@app.command()
def gateway(run_file: RunFile, overrides: Overrides = None, with_parent: WithParent = False) -> None:
    """Run the gateway alone."""
    config = load(run_file, overrides)
    _keep_descriptors()
    from leyden.gateway.engines import engine_key
    from leyden.gateway.serving import serve

    key = engine_key(config.engine.api_key_env, os.environ)
    serve(config, with_parent=with_parent, secret=_secret(), engine_key=key)


@app.command()
def controller(run_file: RunFile, overrides: Overrides = None, with_parent: WithParent = False) -> None:
    """Run the controller alone, for a gateway that already runs."""
    config = load(run_file, overrides)
    _keep_descriptors()
    need("leyden controller", *(["kubernetes"] if config.controller.backend == "kubernetes" else []))
    from leyden.cli.controlling import run_until_stopped

    run_until_stopped(config, _secret(), with_parent=with_parent)


@app.command("eval")
def evaluate(
    run_file: RunFile,
    overrides: Overrides = None,
    checkpoint: Annotated[
        str, typer.Option(metavar="DIR", help="A checkpoint, `latest` or `best` (by validation) of the run, or `none`.")
    ] = "latest",
    k: Annotated[list[int] | None, typer.Option("-k", min=1, help="Report pass@K; may be given several times.")] = None,
    samples: Annotated[
        int | None, typer.Option(min=1, help="Rollouts per task; by default eval.samples, at least the largest K.")
    ] = None,
    split: Annotated[str, typer.Option(metavar="validation|train|FILE.jsonl", help="The tasks.")] = "validation",
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many tasks.")] = None,
) -> None:
    """Estimate pass@1 and pass@k of a checkpoint, with 95 % intervals."""
    config = load(run_file, overrides)
    need("leyden eval", *([] if config.engine.urls else ["embedded"]), *_extras_of(config.controller))
    from leyden.cli.evaluating import run_evaluation

    run_evaluation(
        config, run_file, tuple(overrides or ()), _secret(),
        checkpoint=checkpoint, ks=k or [1], samples=samples, split=split, limit=limit,
    )  # fmt: skip


@app.command()
def rollout(
    run_file: RunFile,
    overrides: Overrides = None,
    task: Annotated[str | None, typer.Option(metavar="JSON", help="The task.", show_default=False)] = None,
    index: Annotated[
        int | None, typer.Option(min=0, help="Which task of the split, from 0.", show_default="the first")
    ] = None,
    split: Annotated[str, typer.Option(metavar="validation|train|FILE.jsonl", help="The tasks.")] = "train",
    checkpoint: Annotated[
        str, typer.Option(metavar="DIR", help="A checkpoint, `latest` of the run, or `none`: the initial model.")
    ] = "latest",
) -> None:
    """Make one rollout by hand: print what an agent needs, wait while you run one, then grade and show it."""
    config = load(run_file, overrides)
    need("leyden rollout", *([] if config.engine.urls else ["embedded"]))
    from leyden.cli.by_hand import Choice, run_by_hand

    run_by_hand(run_file, tuple(overrides or ()), _secret(), choice=Choice(task, index, split), checkpoint=checkpoint)


@app.command()
def doctor(
    run_file: RunFile,
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of lines.")] = False,
    patience: Annotated[
        float, typer.Option(min=1, metavar="SECONDS", help="How long harness and grader may take together.")
    ] = 120,
) -> None:
    """Try everything that a run needs, without a GPU: a line per check, exit status 1 if there is a problem."""
    from leyden.cli.doctoring import run_doctor

    run_doctor(run_file, overrides, _secret(), as_json=as_json, patience_s=patience)


@app.command()
def show(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The folder of a run.", show_default=False)],
    rollout: Annotated[
        str | None, typer.Argument(metavar="[ROLLOUT]", help="A rollout id, or its beginning.", show_default=False)
    ] = None,
    rollouts: Annotated[bool, typer.Option("--rollouts", help="List rollouts instead of steps.")] = False,
    forks: Annotated[bool, typer.Option("--forks", help="Count forks by cause, and what they cost.")] = False,
    step: Annotated[int | None, typer.Option(help="Only rollouts of this step.")] = None,
    kind: Annotated[str | None, typer.Option(metavar="train|eval", help="Only rollouts of this kind.")] = None,
    state: Annotated[str | None, typer.Option(help="Only rollouts in this state, for example failed.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many rollouts, newest last.")] = 200,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead.")] = False,
) -> None:
    """Show the steps and evaluations of a run, its rollouts, or one trajectory with what was trained."""
    from leyden.cli.show import Filter, show_rollout, show_rollouts, show_steps

    chosen = Filter(step=step, kind=kind, state=state, limit=limit)
    if rollout is not None:
        show_rollout(run_dir, rollout, _secret(), as_json=as_json)
    elif rollouts or forks or chosen.narrows:
        show_rollouts(run_dir, chosen, _secret(), forks=forks, as_json=as_json)
    else:
        show_steps(run_dir, as_json=as_json)


def _keep_descriptors() -> None:
    """What the parent handed over (its lock) is for this process; the launcher, which outlives it, must not hold it."""
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if int(path.name) > 2:
                os.set_inheritable(int(path.name), False)


def _extras_of(controller: ControllerConfig) -> list[str]:
    """What the controller needs that this command starts."""
    return ["kubernetes"] if controller.backend == "kubernetes" and controller.start else []


def _secret() -> bytes | None:
    """The secret that programs of one run share, if the environment gives one; else it lies in the run folder."""
    text = os.environ.get("LEYDEN_SECRET")
    if text is None:
        return None
    if not text.isascii():
        raise ConfigError("LEYDEN_SECRET", "holds characters that are not ASCII; write its bytes as hexadecimal text")
    if len(text) < MIN_SECRET_BYTES:
        raise ConfigError("LEYDEN_SECRET", f"has {len(text)} bytes, at least {MIN_SECRET_BYTES} are needed")
    return text.encode()
