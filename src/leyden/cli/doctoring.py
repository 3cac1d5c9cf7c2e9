"""`leyden doctor`: a line per check while it goes, or one JSON document at the end."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from leyden.cli.signals import Stopped, run_until_signal
from leyden.client import read_or_create_secret
from leyden.config import RunConfig
from leyden.doctor.findings import Finding, Level, ok, problem
from leyden.errors import ConfigError
from leyden.run_file import load
from leyden.trainer.display import Display

STYLES = {Level.OK: "", Level.WARNING: "yellow", Level.PROBLEM: "red", Level.SKIPPED: "dim"}


def run_doctor(
    run_file: Path, overrides: list[str] | None, secret: bytes | None, *, as_json: bool, patience_s: float
) -> None:
    """Print the findings. Exits with 1 if one is a problem."""
    if logging.getLogger().level > logging.DEBUG:  # what goes wrong is a finding here
        for name in ("", "leyden"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    display = Display(Console(stderr=as_json, soft_wrap=True, highlight=False))

    def report(finding: Finding) -> None:
        if not as_json:
            show(finding, display)

    findings, logs = _examine(run_file, overrides, secret, patience_s, report, display)
    passed = not any(f.level is Level.PROBLEM for f in findings)
    if as_json:
        document = {"ok": passed, "findings": [asdict(f) for f in findings], "logs": logs and str(logs)}
        print(json.dumps(document, indent=2, ensure_ascii=True))
    elif logs:
        display.line(f"the logs are in {logs}")
    sys.exit(0 if passed else 1)


def show(finding: Finding, display: Display) -> None:
    display.line(finding.line, STYLES[finding.level])
    for line in finding.detail:
        display.line(f"         | {line}", "dim")


def _examine(
    run_file: Path,
    overrides: list[str] | None,
    secret: bytes | None,
    patience_s: float,
    report: Callable[[Finding], None],
    display: Display,
) -> tuple[list[Finding], Path | None]:
    """The findings, and where the logs of a harness or grader with a problem are."""
    try:
        config = load(run_file, overrides)
    except ConfigError as error:
        finding = problem("run file", str(error), "docs/run-file.md lists all keys")
        report(finding)
        return [finding], None
    from leyden.doctor.checkup import Checkup

    first = ok("run file", str(run_file))
    report(first)
    checkup = Checkup(
        config=config,
        secret=secret or _secret_of(config),
        parent=dict(os.environ),
        patience_s=patience_s,
        report=report,
        live=lambda check: display.live(f"checking: {check}"),
    )
    try:
        run_until_signal(checkup.run(), on_stop=lambda: display.line("stopping"))
    except Stopped as stopped:
        sys.exit(stopped.exit_status)
    finally:
        display.clear()
    return [first, *checkup.findings], checkup.kept


def _secret_of(config: RunConfig) -> bytes | None:
    """The secret in the run folder, if the run has been started before."""
    return read_or_create_secret(config.run_dir) if (config.run_dir / "secret").exists() else None
