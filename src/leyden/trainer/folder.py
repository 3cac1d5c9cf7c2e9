"""Names in a run folder that need no torch to be found."""

from __future__ import annotations

import re
from pathlib import Path

CHECKPOINT = re.compile(r"step-(\d+)")


def newest_checkpoint(run_dir: Path) -> Path | None:
    """The complete checkpoint of the highest step. An incomplete one has another name."""
    found = [(step, path) for path in (run_dir / "checkpoints").glob("step-*") if (step := checkpoint_step(path))]
    return max(found)[1] if found else None


def checkpoint_name(step: int) -> str:
    return f"step-{step:06d}"


def checkpoint_step(path: Path) -> int | None:
    """The step in a checkpoint's name; None for another name or a folder that is none."""
    name = CHECKPOINT.fullmatch(path.name)
    return int(name[1]) if name and path.is_dir() else None
