"""A look at a store changes nothing of it, whatever state its folder is in."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from leyden.errors import StoreError
from leyden.store import Rollouts, Store, Turns, looking
from leyden.store.database import migrations
from tests.store.test_store import REQUEST, commit, running


def contents(folder: Path) -> dict[str, bytes]:
    """Files but for SQLite's index of a log."""
    return {p.name: p.read_bytes() for p in folder.iterdir() if not p.name.endswith("-shm")}


def seen(path: Path) -> list[tuple[str, str, int]]:
    with looking(path) as connection:
        turns = Turns(connection)
        rows = Rollouts(connection, lambda: None).after(0, ["queued", "running"], 10)
        return [(r.rollout_id, r.state, len(list(turns.of_rollouts([r.rollout_id])))) for r in rows]


@pytest.fixture(params=["run", "a # b ? c % d"])
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    made = tmp_path / request.param
    made.mkdir()
    return made


@pytest.mark.parametrize("state", ["runs", "stopped", "killed", "killed, without the index"])
def test_it_sees_what_was_committed_and_changes_nothing(folder: Path, state: str) -> None:
    path = folder / "store.sqlite"
    store = Store(path)
    rollout_id = running(store)
    commit(store, rollout_id)
    store.turns.open(rollout_id, 1, b"open", REQUEST, None)
    if state == "stopped":
        store.close()
    if state.startswith("killed"):
        killed = folder.parent / "killed ? run"
        shutil.copytree(folder, killed)
        store.close()
        path = killed / "store.sqlite"
        if state != "killed":
            path.with_name("store.sqlite-shm").unlink()
    before = contents(path.parent)
    assert seen(path) == [(rollout_id, "running", 1)]
    assert contents(path.parent) == before
    if state == "runs":
        with store.turns_reader() as turns:
            assert len(list(turns.of_rollouts([rollout_id]))) == 1
        store.close()
    with closing(sqlite3.connect(path)) as after:
        assert after.execute("SELECT state FROM turns ORDER BY turn_id").fetchall() == [("committed",), ("open",)]


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A folder of a file system that is made read-only by the test."""
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "none", mounted], check=False).returncode:
        pytest.skip("mounts need root and the right to mount")
    try:
        yield mounted
    finally:
        subprocess.run(["umount", mounted], check=True)


@pytest.mark.parametrize("state", ["stopped", "killed", "killed, without the index"])
def test_it_sees_a_read_only_file_system(tmp_path: Path, read_only: Path, state: str) -> None:
    store = Store(tmp_path / "store.sqlite")
    rollout_id = running(store)
    commit(store, rollout_id)
    if state == "stopped":
        store.close()
    for source in tmp_path.glob("store.sqlite*"):
        if not (state == "killed, without the index" and source.name.endswith("-shm")):
            shutil.copy(source, read_only)
    subprocess.run(["mount", "-o", "remount,ro", read_only], check=True)
    assert seen(read_only / "store.sqlite") == [(rollout_id, "running", 1)]


@pytest.mark.parametrize("schema", range(2, len(migrations())))
def test_it_reads_what_an_earlier_version_wrote(tmp_path: Path, schema: int) -> None:
    path = tmp_path / "store.sqlite"
    with closing(sqlite3.connect(path)) as raw:
        for script in migrations()[:schema]:
            raw.executescript(script)
        raw.executescript(
            f"PRAGMA user_version = {schema};"
            "INSERT INTO groups VALUES ('g', 'train', 1, 0, 1, 'active', '{}', NULL);"
            "INSERT INTO rollouts (rollout_id, group_id, member, state, change, created) "
            "VALUES ('g-0', 'g', 0, 'queued', 1, 0);"
        )
    before = contents(tmp_path)
    assert seen(path) == [("g-0", "queued", 0)]
    assert contents(tmp_path) == before


def test_a_newer_store_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    with closing(sqlite3.connect(path)) as raw:
        raw.execute("PRAGMA user_version = 999")
    with pytest.raises(StoreError, match="schema 999"):
        seen(path)
