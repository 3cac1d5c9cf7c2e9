"""The harness that `leyden rollout` starts: it hands its environment to a person, and ends when that person is done.

Run by path, under any interpreter: `python handover.py FOLDER`, where FOLDER holds two named pipes.
"""

from __future__ import annotations

import json
import os
import sys

ENVIRONMENT, DONE = "environment", "done"


def main(folder: str) -> None:
    with open(os.path.join(folder, ENVIRONMENT), "w") as pipe:  # noqa: PTH118, PTH123  (any interpreter)
        json.dump(dict(os.environ), pipe)
    with open(os.path.join(folder, DONE)) as pipe:  # noqa: PTH118, PTH123
        pipe.read()


if __name__ == "__main__":
    main(sys.argv[1])
