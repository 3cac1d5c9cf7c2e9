"""A task as the harness leaves it."""

import json
from pathlib import Path
from typing import Any

import grade


def lay_out(row: dict[str, Any], folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    for name, text in row["files"].items():
        (folder / name).write_text(text)
    write_trajectory(folder, "Submitted")
    return folder


def write_trajectory(folder: Path, exit_status: str) -> None:
    (folder / grade.TRAJECTORY).write_text(json.dumps({"info": {"exit_status": exit_status}}))
