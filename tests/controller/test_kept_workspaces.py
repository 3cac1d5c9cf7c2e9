from dataclasses import replace

import pytest

from leyden.client import Rollout
from leyden.controller.act import keeps
from leyden.controller.plan import AttemptStatus, Phase
from leyden.types import FailureClass, RolloutState

SOLVED = Rollout(
    rollout_id="r1", group_id="g", kind="train", step=1, slot=0, member=0, task={}, state=RolloutState.SUCCEEDED,
    attempt=1, change=1, reward=1.0, failure=None, reason=None, exit_code=0, timed_out=False, turns=3,
    sampled_tokens=9, min_version=0, max_version=0, held_s=0.0,
)  # fmt: skip
UNSOLVED = replace(SOLVED, reward=0.0)
FAILED = replace(SOLVED, state=RolloutState.FAILED, failure=FailureClass.AGENT)
CANCELLED = replace(SOLVED, state=RolloutState.CANCELLED)


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        ("none", []),
        ("failed", [FAILED, None, replace(SOLVED, attempt=2)]),
        ("unsolved", [FAILED, None, replace(SOLVED, attempt=2), UNSOLVED, replace(SOLVED, reward=0.49)]),
        ("all", [SOLVED, UNSOLVED, FAILED, CANCELLED, None]),
    ],
)
def test_whose_workspace_is_kept(policy: str, kept: list[Rollout | None]) -> None:
    attempt = AttemptStatus("r1", 1, Phase.GRADED)
    for rollout in (SOLVED, replace(SOLVED, reward=0.5), UNSOLVED, FAILED, CANCELLED, None, *kept):
        expected = rollout in kept or policy == "all"
        assert keeps(policy, rollout, attempt, 0.5) is expected, rollout
