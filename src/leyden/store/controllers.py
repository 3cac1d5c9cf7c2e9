"""Controllers and their leases: one that has not followed the feed for LEASE_S is gone, and others may take over."""

from __future__ import annotations

import sqlite3
import time

from leyden.types import Json

LEASE_S = 90.0


class Controllers:
    def __init__(self, connection: sqlite3.Connection) -> None:
        self._db = connection

    def renew(self, controller: str) -> None:
        self._db.execute(
            "INSERT INTO controllers VALUES (?, ?) ON CONFLICT (controller) DO UPDATE SET seen = excluded.seen",
            (controller, time.time()),
        )

    def renew_all(self) -> None:
        """After the gateway was away nobody could renew: all leases begin anew."""
        self._db.execute("UPDATE controllers SET seen = ?", (time.time(),))

    def listing(self) -> list[Json]:
        """Each controller, when it was seen last (Unix seconds), and whether its lease holds."""
        rows = self._db.execute("SELECT * FROM controllers ORDER BY controller").fetchall()
        now = time.time()
        return [dict(row) | {"alive": row["seen"] > now - LEASE_S} for row in rows]
