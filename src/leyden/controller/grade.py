"""Runs one grader function in a process of its own: `grade.py MODULE:FUNCTION FOLDER`.

The function gets the task and the workspace's path and returns the reward. An exception, or a value that is
not a finite number, ends the process with a non-zero code.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path


def main(target: str, folder: str) -> None:
    """Import the function from `folder`, call it, post what it returns."""
    own = Path(__file__).resolve().parent
    sys.path[:] = [folder, *(p for p in sys.path if Path(p or ".").resolve() != own)]
    module, _, name = target.partition(":")
    function = getattr(importlib.import_module(module), name)
    task = json.loads(Path(os.environ["LEYDEN_TASK"]).read_text(encoding="utf-8"))
    value = function(task, Path(os.environ["LEYDEN_WORKSPACE"]))
    from leyden.client.reward import post_reward

    post_reward(value)


if __name__ == "__main__":
    main(*sys.argv[1:])
