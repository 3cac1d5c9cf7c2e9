"""metrics.jsonl: what happened, one JSON object a line, only ever appended.

Every line has `event` (start, step, skip, publish, checkpoint, eval), `step`, `version`, `lineage` and
`time`. A `start` line says from which step its lineage goes on: lines of later steps that stand before it are
superseded, and `current` leaves them out. They stay in the file, labelled by their lineage. A last line that
a crash cut short is ignored.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import orjson

from leyden.types import Json


class MetricsLog:
    """Appends lines that survive a crash of the machine: each is synced before `append` returns."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab")
        if path.stat().st_size and not path.read_bytes().endswith(b"\n"):
            self._file.write(b"\n")

    def append(self, event: str, *, step: int, version: int, lineage: str, data: Mapping[str, Any]) -> Json:
        at = {"event": event, "step": step, "version": version, "lineage": lineage, "time": time.time()}
        line = {**at, **data}
        self._file.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))
        self._file.flush()
        os.fsync(self._file.fileno())
        return line

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[Json]:
    """All complete lines, superseded ones included; empty without a file."""
    if not path.exists():
        return []
    lines = []
    for raw in path.read_bytes().splitlines():
        try:
            line = orjson.loads(raw)
        except orjson.JSONDecodeError:
            continue
        if isinstance(line, dict):
            lines.append(line)
    return lines


def current(lines: Iterable[Json]) -> list[Json]:
    """The lines that hold: each `start` at step s drops what stands before it for steps after s."""
    kept: list[Json] = []
    for line in lines:
        if line["event"] == "start":
            kept = [earlier for earlier in kept if earlier["step"] <= line["step"]]
        kept.append(line)
    return kept


def best_evaluation(lines: Iterable[Json]) -> Json | None:
    """The evaluation that holds with the highest pass@1, then the highest mean reward; of equal ones the earliest."""

    def rank(line: Json) -> tuple[float, float]:
        mean = line.get("mean_reward")
        return pass_at_1(line) or 0.0, -math.inf if mean is None else mean

    known = [line for line in current(lines) if line["event"] == "eval" and pass_at_1(line) is not None]
    return max(known, key=rank, default=None)


def pass_at_1(evaluation: Json | None, field: str = "value") -> Any:
    return next((p[field] for p in (evaluation or {}).get("pass", []) if p["k"] == 1), None)
