"""Whether a file is a store that can be opened. It is looked at before anything is written, so that nothing is lost.

SQLite itself would start with an empty data base where the file is gone and only its log is left, and would drop,
without a word, every commit that stands in the log behind a damaged one.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import struct
import time
from pathlib import Path

from leyden.errors import StoreError

LONGEST_CHECK_S = 60.0
LONGEST_LOG = 1 << 26
CHECK_INTERVAL = 1_000_000  # steps of SQLite's virtual machine
TABLES = {"attempts", "counters", "events", "groups", "models", "rollouts", "turns"}
WAL_HEADER, FRAME_HEADER = 32, 24
WAL_MAGIC = {0x377F0682: "<", 0x377F0683: ">"}  # and in which order of bytes its checksums are made

log = logging.getLogger(__name__)


def check(path: Path, known: int) -> None:
    """Raises StoreError for what is no store, or is damaged. A file that is not there, or is empty, is a new store.

    `known` is the newest schema that can be read.
    """
    wal = path.with_name(f"{path.name}-wal")
    logged = wal.is_file() and wal.stat().st_size > 0
    if path.exists() and not path.is_file():
        raise StoreError(f"{path} is a folder or a device, not a file; move it away")
    if not path.exists() or path.stat().st_size == 0:
        if logged:
            what = "is empty" if path.exists() else "is gone"
            raise StoreError(f"{path} {what}, but its log {wal} is there: put the file back, or move the log away")
        return
    if logged and wal.stat().st_size <= LONGEST_LOG:
        check_log(wal)
    with contextlib.closing(reader(path, "mode=ro" if logged else "immutable=1")) as connection:
        try:
            recognise(connection, path, known)
            _quick_check(connection, path)
        except sqlite3.DatabaseError as error:
            raise StoreError(f"{path} cannot be opened: {error}; {_AWAY}") from error


_AWAY = "put a copy of it back, or move it away to start anew from the last checkpoint"


def reader(path: Path, how: str = "mode=ro") -> sqlite3.Connection:
    """A connection that only reads, beside others that write."""
    connection = sqlite3.connect(f"{path.absolute().as_uri()}?{how}", uri=True, isolation_level=None)
    connection.row_factory = sqlite3.Row
    return connection


def schema(connection: sqlite3.Connection) -> int:
    """How many migrations the data base has had."""
    number: int = connection.execute("PRAGMA user_version").fetchone()[0]
    return number


def recognise(connection: sqlite3.Connection, path: Path, known: int, *, empty: bool = True) -> None:
    """Raises StoreError for a data base of a newer Leyden or of another program; an `empty` one may be a store that was
    about to be made."""
    if (found := schema(connection)) > known:
        raise StoreError(f"{path} has schema {found}, this Leyden knows {known}: use the newer version that wrote it")
    tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()}
    if not tables >= TABLES and (tables or not empty):
        raise StoreError(f"{path} is no store of Leyden's (it holds {_some(tables)}); move it away")


def _some(tables: set[str]) -> str:
    return f"the tables {', '.join(sorted(tables)[:5])}" if tables else "no tables"


def _quick_check(connection: sqlite3.Connection, path: Path) -> None:
    """The structure of every page, for LONGEST_CHECK_S at most."""
    start = time.monotonic()
    connection.set_progress_handler(lambda: time.monotonic() > start + LONGEST_CHECK_S, CHECK_INTERVAL)
    try:
        found = [row[0] for row in connection.execute("PRAGMA quick_check(1)").fetchall()]
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode != sqlite3.SQLITE_INTERRUPT:
            raise
        log.warning("%s is too large to be checked in %.0f s", path, LONGEST_CHECK_S)
        return
    if found != ["ok"]:
        raise StoreError(f"{path} is damaged: {' '.join(found[0].split())}; {_AWAY}")
    if (seconds := time.monotonic() - start) > 1:
        log.info("%s was checked in %.1f s", path, seconds)


def check_log(wal: Path) -> None:
    """Raises StoreError if commits would be dropped: the header is no header, or commits stand behind a damaged frame.

    A last frame that was cut short by a crash, and frames of an earlier use of the file, are no damage.
    """
    data = wal.read_bytes()
    order = WAL_MAGIC.get(int.from_bytes(data[:4], "big"))
    if order is None or len(data) < WAL_HEADER or _sum(data[:24], (0, 0), order) != struct.unpack(">2I", data[24:32]):
        raise StoreError(f"{wal} is damaged at its beginning: put a copy back, or move it away to lose what it holds")
    page, salts, sums = int.from_bytes(data[8:12], "big"), data[16:24], struct.unpack(">2I", data[24:32])
    damaged: int | None = None
    for at in range(WAL_HEADER, len(data) - FRAME_HEADER - page + 1, FRAME_HEADER + page):
        head, content = data[at : at + FRAME_HEADER], data[at + FRAME_HEADER : at + FRAME_HEADER + page]
        commits, current = head[4:8] != bytes(4), head[8:16] == salts
        if damaged is None:
            sums = _sum(content, _sum(head[:8], sums, order), order)
            damaged = None if current and sums == struct.unpack(">2I", head[16:24]) else at
        elif commits and current:
            raise StoreError(
                f"{wal} is damaged at byte {damaged}, and commits stand behind it: put a copy back, or give them up "
                f"with `truncate -s {damaged} {wal}`"
            )


def _sum(data: bytes, sums: tuple[int, ...], order: str) -> tuple[int, int]:
    """SQLite's running checksum of a log (https://www.sqlite.org/fileformat2.html#checksum_algorithm)."""
    one, two = sums
    words = struct.unpack(f"{order}{len(data) // 4}I", data)
    for first, second in zip(words[::2], words[1::2], strict=True):
        one = (one + first + two) & 0xFFFFFFFF
        two = (two + second + one) & 0xFFFFFFFF
    return one, two
