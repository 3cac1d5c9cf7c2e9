"""Training samples per rollout of mini-swe-agent, and what re-rendered history would give.

    make bench-samples        or: python benchmarks/bench_samples.py [--rollouts 64]

The real mini-swe-agent, in tool-call and text mode, through a gateway with the tokenizers of Qwen3 and Qwen3.5. The
model is a script whose replies are spelled in ids that the tokenizer would not choose, as sampling does now and then.
One sample per rollout is right, and beside it as many as the chat template itself begins anew: counted from the calls
by the template's rule. The same calls with the same replies under `continuity: off` show what rendering each call
afresh gives, where turns are joined only if their ids go on by themselves. Ends with 1 if a cell is not as it should.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
import tempfile
from pathlib import Path

from common import ROOT, report

sys.path.insert(0, str(ROOT))

from tests.minis.measure import Row, measure, started
from tests.minis.script import CELLS, FAMILIES, HISTORIES

COLUMNS = ["tokenizer", "mode", "reasoning", "thinking_history", "rollouts", "turns", "fewest", "respelled",
           "samples/rollout", "re-rendered", "forks", "template's own", "right"]  # fmt: skip


async def run(rollouts: int, workers: int) -> list[Row]:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        async with started(workers) as minis:
            for family, history in itertools.product(FAMILIES, HISTORIES):
                cells = [cell for cell in CELLS if (cell.family, cell.history) == (family, history)]
                rows += await measure(cells, rollouts, Path(folder) / f"{family}-{history}", minis)
    return rows


def line(row: Row) -> list[object]:
    cell = row.cell
    forks = ", ".join(f"{cause} {count}" for cause, count in row.forks.items()) or "none"
    return [
        *(cell.family, cell.mode, "yes" if cell.reasoning else "no", cell.history, row.rollouts, row.turns),
        *(row.fewest_turns, f"{row.respelled / row.turns:.0%}", row.samples, row.rerendered, forks),
        *(sum(row.expected.values()), "yes" if row.right else "NO"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=64, help="in each of the 16 cells")
    parser.add_argument("--workers", type=int, default=2, help="processes that run the harness")
    chosen = parser.parse_args()
    rows = asyncio.run(run(chosen.rollouts, chosen.workers))
    report("samples", COLUMNS, [line(row) for row in rows], rollouts_per_cell=chosen.rollouts)
    sys.exit(0 if all(row.right for row in rows) else 1)


if __name__ == "__main__":
    main()
