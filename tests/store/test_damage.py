"""Whatever lies where the store should be: one clear line, and nothing of it is overwritten."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import yaml

from leyden.client import read_or_create_secret
from leyden.errors import ConfigError, StoreError
from leyden.store import Store, damage
from leyden.store.damage import WAL_HEADER, check_log
from tests.store.test_looking import contents, seen
from tests.store.test_store import commit, running

FRAME = 24 + 4096


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """The store of a gateway that was killed with turns in the file and more in the log."""
    first = tmp_path / "first"
    first.mkdir()
    store = Store(first / "store.sqlite")
    for slot in range(30):
        commit(store, running(store, slot))
    store._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    for slot in range(30, 40):
        commit(store, running(store, slot))
    folder = tmp_path / "killed"
    shutil.copytree(first, folder)
    store.close()
    return folder / "store.sqlite"


def overwrite(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def wal_of(path: Path) -> Path:
    return path.with_name("store.sqlite-wal")


def frames(path: Path) -> int:
    return (wal_of(path).stat().st_size - WAL_HEADER) // FRAME


def damage_page(path: Path) -> None:
    """A page of a table or an index in the middle of the file, that the log does not hold anew."""
    data, log = path.read_bytes(), wal_of(path).read_bytes()
    anew = {int.from_bytes(log[at : at + 4], "big") for at in range(WAL_HEADER, len(log), FRAME)}
    pages = [n for n in range(2, len(data) // 4096 + 1) if n not in anew and data[(n - 1) * 4096] in (2, 5, 10, 13)]
    overwrite(path, (pages[len(pages) // 2] - 1) * 4096, b"\xff" * 4096)


def damage_frame(path: Path) -> None:
    overwrite(wal_of(path), WAL_HEADER + frames(path) // 2 * FRAME + 100, b"\xff" * 50)


def damage_frame_header(path: Path) -> None:
    overwrite(wal_of(path), WAL_HEADER + frames(path) // 2 * FRAME, b"\xff" * 24)


def make_foreign(path: Path) -> None:
    wal_of(path).unlink()
    path.unlink()
    with closing(sqlite3.connect(path)) as raw:
        raw.execute("CREATE TABLE invoices (id)")


def make_newer(path: Path) -> None:
    wal_of(path).unlink()
    with closing(sqlite3.connect(path)) as raw:
        raw.execute("PRAGMA user_version = 999")


def make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a page": (damage_page, "damaged|malformed"),
    "the header": (lambda path: overwrite(path, 0, b"\xff" * 100), "cannot be opened: file is not a database"),
    "half of the file": (lambda path: os.truncate(path, path.stat().st_size // 2), "damaged|malformed"),
    "a frame of the log": (damage_frame, r"damaged at byte \d+, and commits stand behind it.*truncate -s \d+"),
    "a frame's header": (damage_frame_header, r"damaged at byte \d+, and commits stand behind it"),
    "the log's header": (lambda path: overwrite(wal_of(path), 0, b"\xff" * 32), "damaged at its beginning"),
    "a log of nothing": (lambda path: os.truncate(wal_of(path), 7), "damaged at its beginning"),
    "a file that is gone": (lambda path: path.unlink(), "is gone, but its log .* is there"),
    "an empty file": (lambda path: os.truncate(path, 0), "is empty, but its log .* is there"),
    "a folder": (make_folder, "is a folder or a device, not a file"),
    "another program's": (make_foreign, r"no store of Leyden's \(it holds the tables invoices\)"),
    "a newer Leyden's": (make_newer, "schema 999, this Leyden knows"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named_and_nothing_is_overwritten(killed: Path, name: str) -> None:
    harm, words = DAMAGE[name]
    harm(killed)
    if killed.is_dir():
        with pytest.raises(StoreError, match=words):
            Store(killed)
        return
    before = contents(killed.parent)
    for _ in range(2):
        with pytest.raises(StoreError, match=words) as caught:
            Store(killed)
        assert "\n" not in str(caught.value)
        assert contents(killed.parent) == before


def test_a_log_that_a_crash_cut_short_is_no_damage(killed: Path) -> None:
    os.truncate(wal_of(killed), wal_of(killed).stat().st_size - 1000)
    store = Store(killed)
    assert len(store.rollouts.groups()) == 40
    store.close()


def test_frames_of_an_earlier_use_of_the_log_are_no_damage(tmp_path: Path) -> None:
    store = Store(tmp_path / "store.sqlite")
    for slot in range(30):
        commit(store, running(store, slot))
    store._db.execute("PRAGMA wal_checkpoint(RESTART)")
    commit(store, running(store, 30))
    check_log(tmp_path / "store.sqlite-wal")
    shutil.copytree(tmp_path, tmp_path / "killed", ignore=shutil.ignore_patterns("killed"))
    assert len(Store(tmp_path / "killed" / "store.sqlite").rollouts.groups()) == 31


def test_giving_up_the_end_of_a_damaged_log_is_the_operator_s_choice(killed: Path) -> None:
    damage_frame(killed)
    with pytest.raises(StoreError) as caught:
        Store(killed)
    command = str(caught.value).partition("`")[2].rstrip("`")
    subprocess.run(command.split(), check=True)
    assert 30 <= len(Store(killed).rollouts.groups()) < 40


def test_a_store_that_was_about_to_be_made_is_made(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    path.touch()
    Store(path).close()
    assert Store(path).rollouts.groups() == ()


def test_a_large_store_is_checked_for_a_while_only(
    killed: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(damage, "LONGEST_CHECK_S", -1.0)
    monkeypatch.setattr(damage, "CHECK_INTERVAL", 1)
    assert len(Store(killed).rollouts.groups()) == 40
    assert "too large to be checked" in caplog.text


@pytest.mark.parametrize("name", ["a page", "the header", "a folder", "another program's", "a newer Leyden's"])
def test_a_look_names_damage_too(killed: Path, name: str) -> None:
    harm, _ = DAMAGE[name]
    harm(killed)
    if name == "a page":
        wal_of(killed).unlink()
        overwrite(killed, 4096, b"\xff" * 4096 * 20)
    with pytest.raises(StoreError, match=r"store\.sqlite"):
        seen(killed)


def test_an_empty_file_is_no_empty_run(tmp_path: Path) -> None:
    (tmp_path / "store.sqlite").touch()
    with pytest.raises(StoreError, match="it holds no tables"):
        seen(tmp_path / "store.sqlite")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("é" * 64, "not hexadecimal"),
        ("ab" * 31, "holds 31 bytes, at least 32 are needed"),
        ("", "holds 0 bytes"),
        (None, "is a folder or a device"),
    ],
)
def test_a_secret_that_is_none(tmp_path: Path, content: str | None, words: str) -> None:
    path = tmp_path / "secret"
    if content is None:
        path.mkdir(mode=0o700)
    else:
        path.touch(mode=0o600)
        path.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=words):
        read_or_create_secret(tmp_path)
    assert path.is_dir() or path.read_text(encoding="utf-8") == content


@pytest.mark.parametrize(
    ("secret", "status", "words"),
    [
        (b"\xc3\xa9" * 40, 2, "LEYDEN_SECRET: holds characters that are not ASCII"),
        (b"\xff" * 40, 2, "LEYDEN_SECRET: holds characters that are not ASCII"),
        (b"short", 2, "LEYDEN_SECRET: has 5 bytes"),
        (None, 1, "store.sqlite is a folder"),
    ],
)
def test_the_gateway_ends_with_one_line(
    tmp_path: Path, tokenizer_path: Path, secret: bytes | None, status: int, words: str
) -> None:
    document = {
        "run_dir": "run",
        "model": {"path": str(tokenizer_path), "renderer": "qwen3"},
        "data": {"train": "train.jsonl"},
        "harness": {"command": ["true"]},
        "grader": {"command": ["true"]},
    }
    (tmp_path / "train.jsonl").write_text("{}\n")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(document))
    (tmp_path / "run").mkdir()
    if secret is None:
        (tmp_path / "run" / "store.sqlite").mkdir()
    environment = {name.encode(): value.encode() for name, value in os.environ.items() if name != "LEYDEN_SECRET"}
    command = [sys.executable, "-m", "leyden", "gateway", "run.yaml"]
    ended = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment | ({b"LEYDEN_SECRET": secret} if secret else {}),
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line for line in ended.stderr.splitlines() if " INFO " not in line]
    assert (ended.returncode, len(lines)) == (status, 1), ended.stderr
    assert words in lines[0]
