"""What is used again when a run goes back to a checkpoint of step 10 at version 7."""

from __future__ import annotations

from pathlib import Path

import pytest

from leyden.errors import Unauthorized
from leyden.protocols import ChatRequest
from leyden.records import Recovery
from leyden.store import Store
from leyden.types import FinishReason, Generation, VersionSpan

STEP, VERSION = 10, 7
REQUEST = ChatRequest("m")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store.sqlite")


def group(store: Store, kind: str, step: int) -> str:
    """Its id; the one rollout is queued."""
    spec = {"kind": kind, "step": step, "slot": 0, "size": 1, "task": {}}
    return str(store.rollouts.create_groups([spec])[0].group_id)


def member(group_id: str) -> str:
    return f"{group_id}-000"


def sample(store: Store, rollout_id: str, version: int, attempt: int = 1) -> None:
    answer = Generation([3], [-0.5], FinishReason.STOP, (VersionSpan(version, 1),))
    turn_id = store.turns.open(rollout_id, attempt, b"key", REQUEST, None)
    store.turns.commit(turn_id, parent_id=None, fork_cause=None, delta=[1], generation=answer, node={})


def bring(store: Store, rollout_id: str, stage: str, version: int) -> None:
    """To one of the stages of STAGES; what samples does so at `version`."""
    if stage == "queued":
        return
    store.rollouts.claim(rollout_id, "c")
    if stage == "running":
        return
    sample(store, rollout_id, version)
    if stage == "sampled":
        return
    if stage == "queued again":
        store.rollouts.give_back(rollout_id, 1, "stopped")
        return
    store.rollouts.exit(rollout_id, 1, exit_code=0, timed_out=False, reason=None)
    store.rollouts.reward(rollout_id, 1, 1.0, while_running=False)
    store.rollouts.finish(rollout_id, 1, None)
    if stage == "consumed":
        store.rollouts.consume([rollout_id.rpartition("-")[0]])


STAGES = ("queued", "running", "sampled", "queued again", "finished", "consumed")


def state(store: Store, group_id: str) -> tuple[str, str]:
    (found,) = [g for g in store.rollouts.groups() if g.group_id == group_id]
    return found.state, found.rollouts[0].state


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("kind", "step"), [("train", 11), ("eval", 10)])
def test_what_the_checkpoint_s_weights_sample_for_now_is_used_again(
    store: Store, kind: str, step: int, stage: str
) -> None:
    group_id = group(store, kind, step)
    bring(store, member(group_id), stage, VERSION)
    before = state(store, group_id)[1]
    reopened = (group_id,) if (stage, kind) == ("consumed", "train") else ()
    assert store.rollouts.recover(STEP, VERSION) == Recovery((), reopened)
    expected = "consumed" if (stage, kind) == ("consumed", "eval") else "active"
    assert state(store, group_id) == (expected, before)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("version", [VERSION, VERSION + 1])
@pytest.mark.parametrize(("kind", "step"), [("train", 12), ("train", 18), ("eval", 11), ("eval", 18)])
def test_groups_of_later_steps_are_gone_whatever_they_hold(
    store: Store, kind: str, step: int, version: int, stage: str
) -> None:
    group_id = group(store, kind, step)
    bring(store, member(group_id), stage, version)
    ended = state(store, group_id)[1] == "succeeded"
    assert store.rollouts.recover(STEP, VERSION) == Recovery((group_id,), ())
    assert state(store, group_id) == ("discarded", "succeeded" if ended else "cancelled")
    assert group(store, kind, step) == f"{group_id}-r1"


@pytest.mark.parametrize(("kind", "step"), [("train", 11), ("eval", 10)])
def test_a_token_of_later_weights_discards_a_group(store: Store, kind: str, step: int) -> None:
    group_id = group(store, kind, step)
    bring(store, member(group_id), "finished", VERSION + 1)
    assert store.rollouts.recover(STEP, VERSION) == Recovery((group_id,), ())


def test_a_harness_of_a_discarded_group_cannot_sample_any_more(store: Store) -> None:
    group_id = group(store, "train", 18)
    bring(store, member(group_id), "running", VERSION)
    store.rollouts.recover(STEP, VERSION)
    with pytest.raises(Unauthorized):
        sample(store, member(group_id), VERSION)


def test_what_is_finished_stays_finished(store: Store) -> None:
    earlier = [group(store, "train", 10), group(store, "eval", 5)]
    for group_id in earlier:
        bring(store, member(group_id), "consumed", VERSION - 1)
    assert store.rollouts.recover(STEP, VERSION) == Recovery((), ())
    assert [state(store, group_id) for group_id in earlier] == [("consumed", "succeeded")] * 2
