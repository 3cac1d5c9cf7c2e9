"""Opening the SQLite file: WAL, numbered migrations, transactions."""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

from leyden.errors import StoreError, Unwritable
from leyden.store.damage import check, reader, recognise, schema

PASSING = {
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_READONLY,
}


def connect(path: Path) -> sqlite3.Connection:
    """Open (or make, mode 0600) the data base at `path` and bring its schema up to date.

    Commits survive a kill of the process; `synchronous=NORMAL` gives up only the last commits on a power cut.
    Raises StoreError when the file was written by a newer Leyden, is damaged, or is no store; then it is left as it is.
    """
    check(path, len(migrations()))
    path.touch(mode=0o600, exist_ok=True)
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=10, factory=_Connection)
    connection.row_factory = sqlite3.Row
    try:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")
        connection.execute("PRAGMA foreign_keys=ON")
        _migrate(connection)
    except sqlite3.DatabaseError as error:
        connection.close()
        raise StoreError(f"{path} cannot be opened: {error}; move it away to start anew") from error
    except Unwritable:
        connection.close()
        raise
    return connection


class _Connection(sqlite3.Connection):
    """Raises Unwritable where SQLite cannot write for the moment."""

    def execute(self, sql: str, parameters: Any = (), /) -> Any:
        return self.cursor(_Cursor).execute(sql, parameters)

    def executescript(self, script: str, /) -> Any:
        return self.cursor(_Cursor).executescript(script)


class _Cursor(sqlite3.Cursor):
    """What a statement writes is written when its last row is fetched."""

    def execute(self, sql: str, parameters: Any = (), /) -> Any:
        with _told_apart():
            return super().execute(sql, parameters)

    def executescript(self, script: str, /) -> Any:
        with _told_apart():
            return super().executescript(script)

    def fetchone(self) -> Any:
        with _told_apart():
            return super().fetchone()

    def fetchall(self) -> list[Any]:
        with _told_apart():
            return super().fetchall()


@contextmanager
def _told_apart() -> Iterator[None]:
    try:
        yield
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode & 0xFF in PASSING:
            raise Unwritable(
                f"the store of the run folder cannot be written: {error}; it goes on when it can"
            ) from error
        raise


@contextmanager
def looking(path: Path) -> Iterator[sqlite3.Connection]:
    """A connection to a store that is left as it is, whoever has it open and whether or not its folder can be written.

    What an earlier Leyden wrote is migrated in a copy. Raises StoreError for what is no store that this one knows.
    """
    with tempfile.TemporaryDirectory(prefix="leyden-look-") as folder:
        with _readable(path):
            connection = _unchanged(path, Path(folder))
        with closing(connection), _readable(path):
            recognise(connection, path, len(migrations()), empty=False)
            if schema(connection) < len(migrations()):
                copy = reader(Path(folder) / "migrated.sqlite", "mode=rwc")
                connection.backup(copy)
                with closing(copy):
                    _migrate(copy)
                    yield copy
            else:
                yield connection


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.DatabaseError as error:
        raise StoreError(f"{path} cannot be read: {error}") from error


def _unchanged(path: Path, folder: Path) -> sqlite3.Connection:
    """SQLite keeps an index beside a write-ahead log; where it cannot, a copy in `folder` is read."""
    log = path.with_name(f"{path.name}-wal")
    if not log.exists():
        return reader(path, "immutable=1")
    connection = reader(path)
    try:
        schema(connection)
        return connection
    except sqlite3.OperationalError:
        connection.close()
        for source in (path, log):
            shutil.copyfile(source, folder / source.name)
        return reader(folder / path.name)


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    """All statements of the block, or none."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield connection
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:  # SQLite may have rolled back itself
            connection.execute("ROLLBACK")
        raise


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


def _migrate(connection: sqlite3.Connection) -> None:
    for number, script in enumerate(migrations()[schema(connection) :], start=schema(connection) + 1):
        connection.executescript(f"BEGIN IMMEDIATE;\n{script}\nPRAGMA user_version = {number};\nCOMMIT;")
