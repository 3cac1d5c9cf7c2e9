"""Rollouts as Jobs of a real cluster: every ending, and every part that may go away meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from leyden.types import FailureClass, RolloutState
from tests.kube.cluster import Cluster
from tests.kube.runs import CALL, run

pytestmark = [pytest.mark.kube, pytest.mark.timeout(900)]


def good(score: float = 1.0) -> dict[str, Any]:
    return {"script": f"{CALL} && echo {score} > score"}


async def test_rollouts_with_rewards_leave_nothing(
    kube: Cluster, namespace: str, tmp_path: Path, tokenizer_path: Path, python_image: str
) -> None:
    async with run(kube, namespace, tmp_path, tokenizer_path, python_image) as it:
        ids = await it.add(good(n / 4) for n in range(4))
        found = await it.ended(ids, 300)
        print(it.log()[-6000:])
        assert [(r.state, r.reward, r.turns, r.attempt) for r in found] == [
            (RolloutState.SUCCEEDED, n / 4, 1, 1) for n in range(4)
        ]
        await it.nothing_left()
        assert FailureClass.AGENT
