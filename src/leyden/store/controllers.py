"""Controllers and their leases: one that has not followed the feed for LEASE_S is gone, and others may take over."""

from __future__ import annotations

import sqlite3
import time

from leyden.errors import Unwritable
from leyden.records import KnownController

LEASE_S = 90.0


class Controllers:
    def __init__(self, connection: sqlite3.Connection) -> None:
        self._db = connection
        self._missed = False

    def renew(self, controller: str) -> None:
        """Where the store cannot be written, nobody's lease ends for it: all begin anew afterwards."""
        try:
            if self._missed:
                self.renew_all()
            self._db.execute(
                "INSERT INTO controllers VALUES (?, ?) ON CONFLICT (controller) DO UPDATE SET seen = excluded.seen",
                (controller, time.time()),
            )
            self._missed = False
        except Unwritable:
            self._missed = True

    def renew_all(self) -> None:
        """After the gateway was away nobody could renew: all leases begin anew."""
        self._db.execute("UPDATE controllers SET seen = ?", (time.time(),))

    def listing(self) -> tuple[KnownController, ...]:
        rows = self._db.execute("SELECT * FROM controllers ORDER BY controller").fetchall()
        now = time.time()
        return tuple(KnownController(row["controller"], row["seen"], row["seen"] > now - LEASE_S) for row in rows)
