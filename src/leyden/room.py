"""Free space under a run folder: rollouts wait before it is used up."""

from __future__ import annotations

import shutil
from pathlib import Path


def shortage(run_dir: Path, min_free_bytes: int) -> str | None:
    """Why no rollout is started now, or None."""
    try:
        free = shutil.disk_usage(run_dir).free
    except OSError:
        return None  # what is wrong there is said where it is used
    if free >= min_free_bytes:
        return None
    return (
        f"{run_dir} has {free / 1e9:.2f} GB free and controller.min_free_bytes asks for {min_free_bytes / 1e9:.2f} GB: "
        "no rollout is started until there is room (docs/disk.md says what may go)"
    )
