"""What the controller remembers of the gateway's words."""

from __future__ import annotations

from typing import Any

from leyden.controller.board import Board
from leyden.records import Rollout


def rollout(change: int, state: str, **more: Any) -> Rollout:
    base = {"rollout_id": "r", "group_id": "g", "kind": "train", "step": 0, "slot": 0, "member": 0, "attempt": 1}
    return Rollout.from_json(base | {"state": state, "change": change} | more)


def test_a_task_that_is_known_stays_although_the_feed_leaves_it_out() -> None:
    """A grader's Job is made of it."""
    board = Board()
    board.absorb([rollout(1, "queued"), rollout(2, "running", task={"x": 1}), rollout(3, "grading", turns=4)])
    known = board.rollouts["r"]
    assert (known.state, known.turns, known.task) == ("grading", 4, {"x": 1})


def test_an_older_description_tells_the_task_alone() -> None:
    board = Board()
    board.absorb([rollout(3, "grading"), rollout(2, "running", task={"x": 1})])
    assert (board.rollouts["r"].state, board.rollouts["r"].task) == ("grading", {"x": 1})
