from __future__ import annotations

import sqlite3
import time
from pathlib import Path

import numpy as np
import pytest

from leyden.errors import Conflict, StoreError, Unauthorized
from leyden.protocols import ChatRequest
from leyden.store import Store
from leyden.store.controllers import LEASE_S
from leyden.store.database import migrations
from leyden.store.outage import MOST_OUTAGES
from leyden.store.pack import pack_ids, pack_logprobs, unpack_ids, unpack_logprobs
from leyden.types import FinishReason, Generation, TurnState, VersionSpan

REQUEST = ChatRequest("m")
ANSWER = Generation([3, 4], [-0.25, -0.5], FinishReason.STOP, (VersionSpan(7, 1), VersionSpan(8, 1)))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store.sqlite")


def running(store: Store, slot: int = 0) -> str:
    spec = {"kind": "train", "step": 1, "slot": slot, "size": 1, "task": {}}
    (group,) = store.rollouts.create_groups([spec])
    rollout_id: str = group.rollouts[0].rollout_id
    store.rollouts.claim(rollout_id, "c")
    return rollout_id


def commit(store: Store, rollout_id: str, attempt: int = 1) -> int:
    turn_id = store.turns.open(rollout_id, attempt, b"key", REQUEST, None)
    store.turns.commit(turn_id, parent_id=None, fork_cause=None, delta=[1, 2], generation=ANSWER, node={"n": 1})
    return turn_id


def test_a_turn_comes_back_as_it_was(store: Store) -> None:
    rollout_id = running(store)
    turn_id = commit(store, rollout_id)
    (stored,) = store.turns.of_attempt(rollout_id, 1)
    turn = stored.turn
    assert (turn.turn_id, turn.delta_P.tolist(), turn.sampled_T.tolist()) == (turn_id, [1, 2], [3, 4])
    assert turn.logprobs_T is not None
    assert turn.logprobs_T.tolist() == [-0.25, -0.5]
    assert (turn.spans, turn.finish_reason) == (ANSWER.spans, FinishReason.STOP)
    assert (stored.request_key, stored.node) == (b"key", {"n": 1})
    rollout = store.rollouts.get(rollout_id)
    assert (rollout.turns, rollout.sampled_tokens, rollout.min_version, rollout.max_version) == (1, 2, 7, 8)


def test_packing_is_exact_and_little_endian() -> None:
    assert pack_ids([1, 151645]) == b"\x01\x00\x00\x00\x5d\x50\x02\x00"
    assert unpack_ids(pack_ids([0, 2**31 - 1])).tolist() == [0, 2**31 - 1]
    values = np.array([-1e-7, -123.456], np.float32)
    assert np.array_equal(unpack_logprobs(pack_logprobs(values.tolist())), values)
    assert unpack_logprobs(pack_logprobs(None)) is None


def test_only_the_running_attempt_can_open_a_turn(store: Store) -> None:
    rollout_id = running(store)
    for attempt in (0, 2):
        with pytest.raises(Unauthorized):
            store.turns.open(rollout_id, attempt, b"k", REQUEST, None)
    store.rollouts.exit(rollout_id, 1, exit_code=0, timed_out=False, reason=None)
    with pytest.raises(Unauthorized):
        store.turns.open(rollout_id, 1, b"k", REQUEST, None)


def test_retries_wait_twice_as_long_each_time(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leyden.store.rollouts.time.time", lambda: 1000.0)
    rollout_id = running(store)
    waits = []
    for attempt in range(1, 10):
        after = store.rollouts.infrastructure(rollout_id, attempt, "evicted", max_attempts=99, backoff_s=1.0)
        waits.append(after.retry_at - 1000.0)
        store.rollouts.claim(rollout_id, "c")
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_an_attempt_is_taken_over_only_when_its_controller_s_lease_has_ended(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollout_id = running(store)
    store.controllers.renew("c")
    with pytest.raises(Conflict, match="lease still holds"):
        store.rollouts.take_over(rollout_id, 1, "d")
    now = time.time()
    monkeypatch.setattr("leyden.store.rollouts.time.time", lambda: now + LEASE_S + 1)
    monkeypatch.setattr("leyden.store.controllers.time.time", lambda: now + LEASE_S + 1)
    assert [(c.controller, c.alive) for c in store.controllers.listing()] == [("c", False)]
    before = store.rollouts.cursor()
    assert store.rollouts.take_over(rollout_id, 1, "d").controller == "d"
    assert store.rollouts.cursor() == before + 1
    with pytest.raises(Conflict):
        store.rollouts.take_over(rollout_id, 2, "e")
    store.controllers.renew_all()
    assert store.controllers.listing()[0].alive is True


def test_a_turn_that_outlives_its_attempt_is_not_committed(store: Store) -> None:
    rollout_id = running(store)
    turn_id = store.turns.open(rollout_id, 1, b"k", REQUEST, None)
    store.rollouts.exit(rollout_id, 1, exit_code=0, timed_out=False, reason=None)
    with pytest.raises(Conflict):
        store.turns.commit(turn_id, parent_id=None, fork_cause=None, delta=[1], generation=ANSWER, node={})
    assert list(store.turns.of_attempt(rollout_id, 1)) == []


def test_a_retry_starts_with_an_empty_record(store: Store) -> None:
    """The turns of an earlier attempt never reach the rollout's record."""
    rollout_id = running(store)
    commit(store, rollout_id)
    store.rollouts.infrastructure(rollout_id, 1, "evicted", max_attempts=3)
    assert store.rollouts.get(rollout_id).state == "queued"
    store.rollouts.claim(rollout_id, "c")
    assert list(store.turns.of_rollouts([rollout_id])) == []
    second = commit(store, rollout_id, attempt=2)
    assert [t.turn_id for t in store.turns.of_rollouts([rollout_id])] == [second]
    with pytest.raises(Unauthorized):
        store.turns.open(rollout_id, 1, b"straggler", REQUEST, None)


def test_closing_is_idempotent_and_never_undoes_a_commit(store: Store) -> None:
    rollout_id = running(store)
    turn_id = commit(store, rollout_id)
    store.turns.close(turn_id, TurnState.ABANDONED)
    assert [t.turn_id for t in store.turns.of_rollouts([rollout_id])] == [turn_id]


def test_every_change_moves_the_cursor(store: Store) -> None:
    rollout_id = running(store)
    seen = [store.rollouts.cursor()]
    store.rollouts.exit(rollout_id, 1, exit_code=0, timed_out=False, reason=None)
    seen.append(store.rollouts.cursor())
    store.rollouts.reward(rollout_id, 1, 1.0, while_running=False)
    seen.append(store.rollouts.cursor())
    store.rollouts.finish(rollout_id, 1, None)
    seen.append(store.rollouts.cursor())
    assert seen == sorted(set(seen))
    assert [r.change for r in store.rollouts.after(0, ["succeeded"], 10)] == [seen[-1]]


def test_a_rolled_back_change_leaves_nothing(store: Store) -> None:
    rollout_id = running(store)
    before = store.rollouts.get(rollout_id)
    with pytest.raises(Conflict):
        store.rollouts.exit(rollout_id, 5, exit_code=0, timed_out=False, reason=None)
    assert store.rollouts.get(rollout_id) == before


def test_the_file_is_private_and_migrated_once(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    Store(path).close()
    assert path.stat().st_mode & 0o777 == 0o600
    with sqlite3.connect(path) as raw:
        assert raw.execute("PRAGMA user_version").fetchone()[0] == len(migrations())
    Store(path).close()


def test_a_newer_or_foreign_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "newer.sqlite"
    with sqlite3.connect(path) as raw:
        raw.execute("PRAGMA user_version = 999")
    with pytest.raises(StoreError, match="schema 999"):
        Store(path)
    path = tmp_path / "foreign.sqlite"
    path.write_bytes(b"not a data base, but long enough to look like one" * 100)
    with pytest.raises(StoreError, match="cannot be opened"):
        Store(path)


def test_a_rollout_whose_calls_end_the_gateway_is_not_run_for_ever(store: Store) -> None:
    """One beside it, which had no call open, is run on."""
    suspect, other = running(store), running(store, slot=1)
    for attempt in range(1, MOST_OUTAGES + 1):
        assert store.rollouts.get(suspect).attempt == attempt
        store.turns.open(suspect, attempt, b"%d" % attempt, REQUEST, None)
        store.come_back()
        for rollout_id in (suspect, other):
            if store.rollouts.get(rollout_id).state == "queued":
                store.rollouts.claim(rollout_id, "c")
    failed, going = store.rollouts.get(suspect), store.rollouts.get(other)
    assert (failed.state, failed.failure, failed.reward) == ("failed", "infrastructure", None)
    assert "ended 10 times while a call of this rollout was open" in failed.reason
    assert (going.state, going.failure) == ("running", None)
