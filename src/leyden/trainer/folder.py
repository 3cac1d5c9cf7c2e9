"""Names in a run folder that need no torch to be found."""

from __future__ import annotations

import re
from pathlib import Path

CHECKPOINT = re.compile(r"step-(\d+)")


def checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints in `folder` by step. An incomplete one has another name."""
    return sorted(filter(checkpoint_step, folder.glob("step-*")), key=lambda path: checkpoint_step(path) or 0)


def newest_checkpoint(run_dir: Path) -> Path | None:
    """The complete checkpoint of the highest step."""
    return next(reversed(checkpoints(run_dir / "checkpoints")), None)


def checkpoint_name(step: int) -> str:
    return f"step-{step:06d}"


def checkpoint_step(path: Path) -> int | None:
    """The step in a checkpoint's name; None for another name or a folder that is none."""
    name = CHECKPOINT.fullmatch(path.name)
    return int(name[1]) if name and path.is_dir() else None
