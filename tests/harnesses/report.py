"""What a run should have shown, and the table of what it did. Pure but for writing the file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path

from rich.table import Table

from tests.harnesses.cases import Case
from tests.harnesses.run import FAULTS, Outcome

SHORTEST_HOLD_S = 30.0
PROBES = 1  # after a cut answer the gateway asks the engine for one token, with a prompt that also meets each fault
COLUMNS = (
    "harness",
    "run",
    "finished",
    "protocol",
    "streamed",
    "turns",
    "side",
    "samples",
    "forks",
    "ids = log-probs",
    "ids exact",
)


def problems(case: Case, outcome: Outcome) -> list[str]:
    """How the outcome differs from what is expected of the case; nothing if all is well."""
    expected = {
        "protocol": case.protocol,
        "streamed": case.streamed,
        "turns": case.turns,
        "side_calls": case.side_calls,
        "forks": dict(case.forks),
        "samples": 1 + sum(case.forks.values()),
        "counts_equal": True,
        "exact": True,
        "refused": [],
        "faults": (case.turns + PROBES) * len(FAULTS) if outcome.mode == "faults" else 0,
    }
    found = asdict(outcome)
    wrong = [f"{name} {found[name]}, not {value}" for name, value in expected.items() if found[name] != value]
    if outcome.mode == "pause" and outcome.held_s < SHORTEST_HOLD_S:
        wrong.append(f"held for {outcome.held_s} s only")
    if not outcome.finished:
        wrong.insert(0, f"not finished: exit code {outcome.exit_code}, reward {outcome.reward}, {outcome.reason}")
    return wrong


def table(outcomes: Iterable[tuple[Case, Outcome]]) -> Table:
    made = Table(*COLUMNS, box=None, pad_edge=False)
    for case, outcome in outcomes:
        made.add_row(
            outcome.name,
            outcome.mode,
            _word(outcome.finished),
            outcome.protocol,
            _word(outcome.streamed),
            str(outcome.turns),
            str(outcome.side_calls),
            str(outcome.samples),
            ", ".join(f"{cause} {count}" for cause, count in outcome.forks.items()) or "-",
            _word(outcome.counts_equal),
            _word(outcome.exact),
            f"{outcome.seconds:.1f}",
            "; ".join(problems(case, outcome)),
        )
    return made


def write(path: Path, outcomes: Iterable[tuple[Case, Outcome]], skipped: Mapping[str, str]) -> None:
    runs = [asdict(outcome) | {"problems": problems(case, outcome)} for case, outcome in outcomes]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"runs": runs, "skipped": dict(skipped)}, indent=1) + "\n")


def _word(value: bool) -> str:
    return "yes" if value else "no"
