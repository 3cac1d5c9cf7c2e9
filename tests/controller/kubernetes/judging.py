"""Recorded shapes of Jobs, and what is judged of them."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

from leyden.controller.backends.kubernetes.states import (
    Patience,
    Seen,
    Verdict,
)
from leyden.controller.backends.kubernetes.verdict import verdict
from leyden.controller.jobs import Exit

SHAPES = Path(__file__).parent / "shapes"


PATIENCE = Patience(queue_s=600, image_s=60, save_s=120)


def at(clock: str) -> float:
    return datetime.fromisoformat(f"2026-11-30T{clock}Z").timestamp()


def seen(shape: str, **changes: Any) -> Seen:
    recorded = json.loads((SHAPES / f"{shape}.json").read_text())
    return Seen(**{"job": recorded["job"], "pods": recorded["pods"], "events": recorded["events"]} | changes)


def judge(what: Seen, clock: str) -> Verdict:
    return verdict(what, PATIENCE, at(clock))


def own(code: int | None, started: str, ended: str, signal: int | None = None, note: str | None = None) -> Exit:
    return Exit(code, signal, at(started), at(ended), note=note)


def failed(error: str, started: str, ended: str) -> Exit:
    return Exit(None, None, at(started), at(ended), error=error)


def gone(what: Seen) -> frozenset[str]:
    return frozenset(p["metadata"]["uid"] for p in what.pods)


def keeper_of(what: Seen) -> dict[str, Any]:
    (found,) = [c for c in what.pods[0]["status"]["containerStatuses"] if c["name"] == "keep"]
    done: dict[str, Any] = found["state"]["terminated"]
    return done


def replace_gone(what: Seen) -> Seen:
    return Seen(what.job, what.pods, what.events, gone(what))
