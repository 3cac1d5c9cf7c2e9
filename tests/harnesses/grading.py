"""The grader of the scripted task: did the harness do what the model said?"""

from __future__ import annotations

from pathlib import Path
from typing import Any


def grade(task: dict[str, Any], workspace: Path) -> float:
    """1 if each file of the task's `leaves` holds its lines, in any order: calls may run at once."""
    return float(all(_lines(workspace / name) >= set(lines) for name, lines in task["leaves"].items()))


def _lines(path: Path) -> set[str]:
    return set(path.read_text().splitlines()) if path.exists() else set()
