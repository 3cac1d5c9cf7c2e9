"""Opening the SQLite file: WAL, numbered migrations, transactions."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path

from leyden.errors import StoreError


def connect(path: Path) -> sqlite3.Connection:
    """Open (or make, mode 0600) the data base at `path` and bring its schema up to date.

    Commits survive a kill of the process; `synchronous=NORMAL` gives up only the last commits on a power cut.
    Raises StoreError when the file was written by a newer Leyden, or is no SQLite data base.
    """
    path.touch(mode=0o600, exist_ok=True)
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=10)
    connection.row_factory = sqlite3.Row
    try:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")
        connection.execute("PRAGMA foreign_keys=ON")
        _migrate(connection, path)
    except sqlite3.DatabaseError as error:
        connection.close()
        raise StoreError(f"{path} cannot be opened: {error}; move it away to start anew") from error
    except StoreError:
        connection.close()
        raise
    return connection


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    """All statements of the block, or none."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield connection
    except BaseException:
        connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


def next_change(connection: sqlite3.Connection) -> int:
    """The number of a change of a rollout that is being made: the cursor of the feed."""
    value: int = connection.execute(
        "UPDATE counters SET value = value + 1 WHERE name = 'change' RETURNING value"
    ).fetchone()[0]
    return value


def migrations() -> list[str]:
    """The numbered scripts in order; the script of number n brings `user_version` n - 1 to n."""
    folder = resources.files("leyden.store") / "migrations"
    return [f.read_text(encoding="utf-8") for f in sorted(folder.iterdir(), key=lambda f: f.name)]


def _migrate(connection: sqlite3.Connection, path: Path) -> None:
    scripts = migrations()
    current: int = connection.execute("PRAGMA user_version").fetchone()[0]
    if current > len(scripts):
        raise StoreError(
            f"{path} has schema {current}, this Leyden knows {len(scripts)}: use the newer version that wrote it"
        )
    for number, script in enumerate(scripts[current:], start=current + 1):
        connection.executescript(f"BEGIN IMMEDIATE;\n{script}\nPRAGMA user_version = {number};\nCOMMIT;")
