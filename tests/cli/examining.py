"""A run file as `leyden doctor` sees it."""

from __future__ import annotations

import os
from pathlib import Path

from leyden.doctor.checkup import Checkup
from leyden.doctor.findings import Finding
from leyden.run_file import load


async def examine(run_file: Path, *overrides: str, patience_s: float = 300, secret: bytes | None = None) -> Checkup:
    parent = dict(os.environ)
    checkup = Checkup(load(run_file, list(overrides)), secret, parent, patience_s, lambda _: None, lambda _: None)
    await checkup.run()
    return checkup


def of(checkup: Checkup, check: str) -> Finding:
    (found,) = [f for f in checkup.findings if f.check == check]
    return found


def levels(checkup: Checkup) -> dict[str, str]:
    return {f.check: f.level.value for f in checkup.findings}
