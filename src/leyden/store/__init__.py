"""The record of a run: one SQLite file, written by the gateway alone. `looking` is for others, and changes nothing.

All writes run in the event-loop thread, one short transaction each, so their order is the order of the calls. Large
reads (`turns_reader`) run in other threads on a connection of their own; in WAL mode neither waits for the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson

from leyden.records import Model
from leyden.store.controllers import Controllers
from leyden.store.damage import reader
from leyden.store.database import connect, looking
from leyden.store.outage import UNSEEN, Outage, come_back, last_write
from leyden.store.rollouts import Rollouts
from leyden.store.turns import StoredTurn, Turns

__all__ = ["UNSEEN", "Outage", "Rollouts", "Store", "StoredTurn", "Turns", "looking"]


class Store:
    """`rollouts`, `turns` and `controllers` by their tables, and the registered models.

    `changed` is called after each change of a rollout.
    """

    def __init__(self, path: Path, changed: Callable[[], None] = lambda: None) -> None:
        self._path = path
        self._last_write = last_write(path)
        self._db = connect(path)
        self.rollouts = Rollouts(self._db, changed)
        self.turns = Turns(self._db)
        self.controllers = Controllers(self._db)

    def come_back(self) -> Outage:
        """Before a gateway serves: settle what ran while there was none. Leases begin anew, nobody could renew them."""
        self.controllers.renew_all()
        return come_back(self._db, self._last_write)

    def close(self) -> None:
        self._db.close()

    @contextmanager
    def turns_reader(self) -> Iterator[Turns]:
        """Turns on a read connection of its own, for use in another thread."""
        connection = reader(self._path)
        try:
            yield Turns(connection)
        finally:
            connection.close()

    def set_model(self, name: str, engines: list[str], version: int, lineage: str, context_tokens: int) -> None:
        self._db.execute(
            "INSERT INTO models VALUES (?, ?, ?, ?, ?) ON CONFLICT (name) DO UPDATE SET engines = excluded.engines, "
            "version = excluded.version, lineage = excluded.lineage, context_tokens = excluded.context_tokens",
            (name, orjson.dumps(engines).decode(), version, lineage, context_tokens),
        )

    def models(self) -> dict[str, Model]:
        rows: list[Any] = self._db.execute("SELECT * FROM models ORDER BY name").fetchall()
        return {row["name"]: Model(**dict(row) | {"engines": tuple(orjson.loads(row["engines"]))}) for row in rows}
