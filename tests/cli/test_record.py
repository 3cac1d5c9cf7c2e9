"""`leyden show` looks at a run folder: nothing in it changes, nothing is started."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from leyden.cli.record import read_run, record_of
from leyden.cli.show import Filter, show_rollout, show_rollouts
from leyden.errors import ConfigError
from leyden.store import Store
from tests.gateway.conftest import make_config
from tests.store.test_looking import contents
from tests.store.test_store import REQUEST, commit, running


@pytest.fixture
def store(tmp_path: Path, tokenizer_path: Path) -> Store:
    """Of a run with one rollout that runs: one committed turn, one open."""
    config = make_config(tmp_path, tokenizer_path)
    config.run_dir.mkdir()
    (config.run_dir / "run.json").write_bytes(orjson.dumps({"config": config.model_dump(mode="json")}))
    store = Store(config.run_dir / "store.sqlite")
    rollout_id = running(store)
    commit(store, rollout_id)
    store.turns.open(rollout_id, 1, b"open", REQUEST, None)
    return store


@pytest.mark.parametrize("stopped", [False, True], ids=["its gateway runs", "its gateway is stopped"])
def test_a_look_changes_nothing(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str], stopped: bool
) -> None:
    run_dir = tmp_path / "run"
    if stopped:
        store.close()
    before = contents(run_dir)
    show_rollouts(run_dir, Filter(), None, forks=False)
    show_rollouts(run_dir, Filter(), None, forks=True)
    show_rollout(run_dir, "train-00001", None)
    shown = capsys.readouterr().out
    assert "1 of 1 rollouts" in shown
    assert "1 turns, 2 sampled tokens" in shown
    assert contents(run_dir) == before


async def test_pages_follow_each_other(store: Store, tmp_path: Path) -> None:
    specs = [{"kind": "train", "step": 2, "slot": slot, "size": 1, "task": {"n": slot}} for slot in range(5)]
    store.rollouts.create_groups(specs)
    run_dir = tmp_path / "run"
    found, cursor, page = [], 0, True
    async with record_of(run_dir, read_run(run_dir), None) as record:
        while page:
            rollouts, cursor = await record.rollouts(after=cursor, limit=2, tasks=False)
            page = bool(rollouts)
            found += [r.rollout_id for r in rollouts]
        assert (await record.rollout(found[-1])).task == {"n": 4}
        assert [t.sampled_T.tolist() for t in await record.turns(found)] == [[3, 4]]
    assert found == ["train-00001-0000-000", *(f"train-00002-{slot:04d}-000" for slot in range(5))]


async def test_a_folder_without_a_store_says_so(tmp_path: Path, tokenizer_path: Path) -> None:
    config = make_config(tmp_path, tokenizer_path)
    with pytest.raises(ConfigError, match=r"has no store.sqlite: its gateway never started"):
        async with record_of(tmp_path, config, None):
            pass
    with pytest.raises(ConfigError, match=r"it has no run\.json"):
        read_run(tmp_path)
