"""What becomes of attempts that ran while the gateway was away: killed, stopped, or down with its machine.

A harness whose call was refused meanwhile may have given up, at once or in part, and nobody can see that from here. So
an attempt survives only where its record shows that nothing of it was lost: it was one conversation, and a call goes on
with it. The others are void, and use up none of `harness.max_attempts`:

    a call was open, nothing was committed yet,     void at once
    or there are several conversations
    one conversation                                void at its end, unless a call has continued its last turn by then
    graded, and no reward yet                       the grader may go on; void if there is no reward in the end

A rollout of which a call was open at `MOST_OUTAGES` such ends may be what ends the gateway: it fails, unscored.
Time in which the gateway was away is held time.
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
from dataclasses import dataclass
from pathlib import Path

from leyden.store.database import next_change, transaction

UNSEEN = "the gateway was away while the harness ran, and no call since then has shown that it missed nothing"
GRADER = 0
MOST_OUTAGES = 10


@dataclass(frozen=True, slots=True)
class Outage:
    """How long it was, the calls that it cut off, and the running attempts by what becomes of them."""

    seconds: float
    lost_calls: int
    void: int
    survivors: int


def last_write(path: Path) -> float:
    """When (Unix seconds) anything was written to the store at `path`; infinity if it is not there. Controllers renew
    their leases through it, so while one runs this is half a minute before the gateway's end at most."""
    times = []
    for name in (path, path.with_name(f"{path.name}-wal")):
        with contextlib.suppress(FileNotFoundError):
            times.append(name.stat().st_mtime)
    return max(times, default=float("inf"))


def come_back(db: sqlite3.Connection, last_alive: float) -> Outage:
    """Settle what ran between `last_alive` (Unix seconds) and now, in one transaction."""
    away_s = max(0.0, time.time() - last_alive)
    void = survivors = 0
    with transaction(db):
        open_turns = db.execute("SELECT rollout_id, attempt FROM turns WHERE state = 'open'").fetchall()
        cut_off = {(row["rollout_id"], row["attempt"]) for row in open_turns}
        lost_calls = db.execute("UPDATE turns SET state = 'lost' WHERE state = 'open'").rowcount
        running = db.execute(
            "SELECT rollout_id, attempt, started FROM rollouts JOIN attempts USING (rollout_id, attempt) "
            "WHERE state = 'running'"
        ).fetchall()
        for rollout_id, attempt, started in running:
            ends = _ends(db, rollout_id, attempt)
            if len(ends) != 1 or (rollout_id, attempt) in cut_off:
                _spare(db, rollout_id)
                void += 1
                continue
            db.execute(
                "UPDATE attempts SET outage = ?, held_s = held_s + ? WHERE rollout_id = ? AND attempt = ?",
                (ends[0], max(0.0, min(away_s, time.time() - started)), rollout_id, attempt),
            )
            survivors += 1
        db.execute(
            "UPDATE attempts SET outage = ? WHERE reward IS NULL AND (rollout_id, attempt) IN "
            "(SELECT rollout_id, attempt FROM rollouts WHERE state = 'grading')",
            (GRADER,),
        )
    return Outage(away_s, lost_calls, void, survivors)


def _ends(db: sqlite3.Connection, rollout_id: str, attempt: int) -> list[int]:
    """The last turn of each conversation."""
    rows = db.execute(
        "SELECT turn_id FROM turns WHERE rollout_id = :id AND attempt = :attempt AND state = 'committed' "
        "AND turn_id NOT IN (SELECT parent_id FROM turns WHERE rollout_id = :id AND attempt = :attempt "
        "AND state = 'committed' AND parent_id IS NOT NULL)",
        {"id": rollout_id, "attempt": attempt},
    ).fetchall()
    return [row[0] for row in rows]


def _spare(db: sqlite3.Connection, rollout_id: str) -> None:
    """Queue the rollout again, and count the attempt against no limit; or fail it, where its calls are suspected."""
    suspected = db.execute(
        "SELECT COUNT(DISTINCT attempt) FROM turns WHERE rollout_id = ? AND state = 'lost'", (rollout_id,)
    ).fetchone()[0]
    if suspected >= MOST_OUTAGES:
        why = f"the gateway ended {suspected} times while a call of this rollout was open: see the gateway's log"
        db.execute(
            "UPDATE rollouts SET state = 'failed', failure = 'infrastructure', reason = ?, finished = ?, change = ? "
            "WHERE rollout_id = ?",
            (why, time.time(), next_change(db), rollout_id),
        )
        return
    db.execute(
        "UPDATE rollouts SET state = 'queued', spared = spared + 1, reason = ?, change = ? WHERE rollout_id = ?",
        (UNSEEN, next_change(db), rollout_id),
    )
