"""A few rollouts of mini-swe-agent in each cell; `make bench-samples` runs many."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.minis.measure import measure, started
from tests.minis.script import CELLS, FAMILIES, HISTORIES


@pytest.mark.slow
@pytest.mark.timeout(1200)
async def test_samples_per_rollout_of_mini_swe_agent(tmp_path: Path) -> None:
    """Tool calls: one sample. Text: one without reasoning and where it is kept; else the template's own forks."""
    async with started(1) as minis:
        for family, history in itertools.product(FAMILIES, HISTORIES):
            plain = history == "template"
            cells = [c for c in CELLS if (c.family, c.history) == (family, history) and (c.reasoning or plain)]
            for row in await measure(cells, 2, tmp_path / f"{family}-{history}", minis):
                assert row.right, row
                assert row.fewest_turns >= 6
                assert row.respelled == row.turns
                assert row.rerendered > row.samples
                forked = (row.cell.mode, row.cell.reasoning, history) == ("text", True, "template")
                assert (row.samples > 1.0) is forked
