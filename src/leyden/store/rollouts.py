"""Groups and rollouts: the state machine of the design as conditional updates.

Every change is one transaction that names the state and the attempt it starts from; when it does not apply any
more the caller gets `Conflict` and nothing has happened. So two controllers, a restart or a late report cannot
finish a rollout twice. Each change gives the rollout a new, larger `change`: the cursor of the feed.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import orjson

from leyden.errors import Conflict, NotFound
from leyden.records import Group, Recovery, Rollout
from leyden.store.controllers import LEASE_S
from leyden.store.database import next_change, transaction
from leyden.types import TERMINAL, FailureClass, Json, RolloutState

LONGEST_BACKOFF_S = 60.0
_ROLLOUT = """
SELECT r.*, g.kind, g.step, g.slot, g.task, g.sampling, a.controller, a.started, a.exit_code, a.timed_out,
       a.reward, a.held_s, a.turns, a.sampled_tokens, a.min_version, a.max_version, a.refusals
FROM rollouts r JOIN groups g USING (group_id)
LEFT JOIN attempts a ON a.rollout_id = r.rollout_id AND a.attempt = r.attempt
"""
_FORKS = """
SELECT t.rollout_id, t.fork_cause, COUNT(*) FROM turns t
JOIN rollouts r ON r.rollout_id = t.rollout_id AND r.attempt = t.attempt
WHERE t.fork_cause IS NOT NULL AND t.state = 'committed' AND t.rollout_id IN ({marks})
GROUP BY t.rollout_id, t.fork_cause
"""
_TERMINAL = ", ".join(f"'{state}'" for state in sorted(TERMINAL))


class Rollouts:
    """All reads and writes of groups, rollouts and attempts. `changed` is called after each committed change."""

    def __init__(self, connection: sqlite3.Connection, changed: Callable[[], None]) -> None:
        self._db = connection
        self._changed = changed

    def create_groups(self, specs: Sequence[Json]) -> tuple[Group, ...]:
        """Make the groups that do not exist yet; answer them all, in the order asked for.

        A group is known by (kind, step, slot) while it is not discarded. Raises Conflict when it exists with
        another task or size.
        """
        with transaction(self._db):
            ids = [self._ensure_group(spec) for spec in specs]
        self._changed()
        return tuple(self._group(group_id) for group_id in ids)

    def groups(self, **filters: str | int | None) -> tuple[Group, ...]:
        """Groups whose columns equal all filters that are not None (`kind`, `step`, `state`)."""
        given = {name: value for name, value in filters.items() if value is not None}
        where = " AND ".join(f"{name} = ?" for name in given) or "1"
        rows = self._db.execute(
            f"SELECT group_id FROM groups WHERE {where} ORDER BY kind, step, slot, group_id",
            tuple(given.values()),
        )
        return tuple(self._group(row["group_id"]) for row in rows.fetchall())

    def consume(self, group_ids: Sequence[str]) -> None:
        """Mark groups as trained. Idempotent; raises Conflict for a discarded or unknown one."""
        with transaction(self._db):
            for group_id in group_ids:
                done = self._db.execute(
                    "UPDATE groups SET state = 'consumed' WHERE group_id = ? AND state <> 'discarded'", (group_id,)
                )
                if done.rowcount == 0:
                    raise Conflict(f"group {group_id!r} is discarded or unknown and cannot be consumed")

    def recover(self, step: int, version: int) -> Recovery:
        """Bring groups back to a checkpoint of `step` finished steps at policy `version`.

        Used again is what these weights sample for now: the training groups of the next step and the evaluation of
        this one, unless they hold a token of a later version; consumed ones are active again. Groups of later steps
        belong to a future that is gone, also where nothing was sampled yet: they would run too early.
        """
        now = {"next": step + 1, "this": step, "version": version}
        with transaction(self._db):
            later = self._ids(
                "SELECT group_id FROM groups WHERE state <> 'discarded' AND "
                "step > CASE kind WHEN 'train' THEN :next ELSE :this END",
                now,
            )
            sampled_later = self._ids(
                "SELECT DISTINCT r.group_id FROM rollouts r JOIN groups g USING (group_id) JOIN attempts a "
                "ON a.rollout_id = r.rollout_id AND a.attempt = r.attempt "
                "WHERE g.state <> 'discarded' AND a.max_version > :version",
                now,
            )
            discarded = sorted({*later, *sampled_later})
            for group_id in discarded:
                self._discard(group_id, f"made after step {step} at version {version}, to which the run went back")
            reopened = self._ids(
                "UPDATE groups SET state = 'active' WHERE state = 'consumed' AND kind = 'train' AND step = :next "
                "RETURNING group_id",
                now,
            )
        self._changed()
        return Recovery(tuple(discarded), tuple(reopened))

    def get(self, rollout_id: str) -> Rollout:
        row = self._db.execute(_ROLLOUT + "WHERE r.rollout_id = ?", (rollout_id,)).fetchone()
        if row is None:
            raise NotFound(f"there is no rollout {rollout_id!r}")
        return self._with_forks([row])[0]

    def after(self, change: int, states: Sequence[str], limit: int, *, tasks: bool = True) -> list[Rollout]:
        """Rollouts in one of `states` that changed after `change`, oldest change first."""
        marks = ", ".join("?" * len(states))
        rows = self._db.execute(
            _ROLLOUT + f"WHERE r.change > ? AND r.state IN ({marks}) ORDER BY r.change LIMIT ?",
            (change, *states, limit),
        ).fetchall()
        return self._with_forks(rows, tasks=tasks)

    def cursor(self) -> int:
        """The newest change."""
        value: int = self._db.execute("SELECT value FROM counters WHERE name = 'change'").fetchone()[0]
        return value

    def claim(self, rollout_id: str, controller: str) -> Rollout:
        """queued -> running, with a new attempt that belongs to `controller`."""
        with transaction(self._db):
            row = self._move(rollout_id, "state = 'running', attempt = attempt + 1, reason = NULL", "state = 'queued'")
            self._db.execute(
                "INSERT INTO attempts (rollout_id, attempt, controller, started) VALUES (?, ?, ?, ?)",
                (rollout_id, row["attempt"], controller, time.time()),
            )
        return self._announce(rollout_id)

    def take_over(self, rollout_id: str, attempt: int, controller: str) -> Rollout:
        """The running attempt of a controller whose lease has ended belongs to `controller` from now on."""
        with transaction(self._db):
            done = self._db.execute(
                "UPDATE attempts SET controller = ? WHERE rollout_id = ? AND attempt = ? "
                "AND controller NOT IN (SELECT controller FROM controllers WHERE seen > ?) AND EXISTS (SELECT 1 "
                "FROM rollouts WHERE rollout_id = ? AND attempt = ? AND state IN ('running', 'grading'))",
                (controller, rollout_id, attempt, time.time() - LEASE_S, rollout_id, attempt),
            )
            if done.rowcount == 0:
                raise Conflict(f"attempt {attempt} of {rollout_id} is over, or its controller's lease still holds")
            self._touch(rollout_id)
        return self._announce(rollout_id)

    def exit(
        self, rollout_id: str, attempt: int, *, exit_code: int | None, timed_out: bool, reason: str | None
    ) -> Rollout:
        """running -> grading. The same report again, while grading, changes nothing."""
        current = self.get(rollout_id)
        if current.state == RolloutState.GRADING and current.attempt == attempt:
            return current
        with transaction(self._db):
            self._move(rollout_id, "state = 'grading'", "state = 'running' AND attempt = ?", attempt)
            self._db.execute(
                "UPDATE attempts SET exited = ?, exit_code = ?, timed_out = ?, exit_reason = ? "
                "WHERE rollout_id = ? AND attempt = ?",
                (time.time(), exit_code, timed_out, reason, rollout_id, attempt),
            )
            self._close_turns(rollout_id)
        return self._announce(rollout_id)

    def finish(self, rollout_id: str, attempt: int, reason: str | None) -> Rollout:
        """grading -> succeeded, or failed as an agent failure; the accepted reward stands in both.

        Without a `reason`, a failure's is what the controller said of the harness's exit.
        """
        current = self.get(rollout_id)
        if current.attempt == attempt and current.state in TERMINAL:
            raise Conflict(f"rollout {rollout_id} is already {current.state}")
        clean = current.exit_code == 0 and not current.timed_out
        state = RolloutState.SUCCEEDED if clean else RolloutState.FAILED
        failure = None if clean else FailureClass.AGENT
        why = reason or (None if clean else self._exit_reason(rollout_id, attempt) or _exit_text(current))
        with transaction(self._db):
            self._move(
                rollout_id,
                "state = ?, failure = ?, reason = ?, finished = ?",
                "state = 'grading' AND attempt = ?",
                attempt,
                values=(state, failure, why, time.time()),
            )
        return self._announce(rollout_id)

    def _exit_reason(self, rollout_id: str, attempt: int) -> str | None:
        found = self._db.execute(
            "SELECT exit_reason FROM attempts WHERE rollout_id = ? AND attempt = ?", (rollout_id, attempt)
        ).fetchone()
        reason: str | None = found[0] if found else None
        return reason

    def infrastructure(
        self, rollout_id: str, attempt: int, reason: str, max_attempts: int, backoff_s: float = 0.0
    ) -> Rollout:
        """The attempt is void: queued again while attempts remain, else failed and never scored.

        The n-th retry is due after `backoff_s` 2^(n-1) seconds, LONGEST_BACKOFF_S at most.
        """
        with transaction(self._db):
            self._move(
                rollout_id,
                "state = CASE WHEN attempt - spared < ? THEN 'queued' ELSE 'failed' END, "
                "failure = CASE WHEN attempt - spared < ? THEN NULL ELSE 'infrastructure' END, "
                "finished = CASE WHEN attempt - spared < ? THEN NULL ELSE ? END, reason = ?, "
                "retry_at = ? + MIN(?, ? * (1 << MIN(attempt - spared - 1, 20)))",
                "state IN ('running', 'grading') AND attempt = ?",
                attempt,
                values=(
                    *(max_attempts, max_attempts, max_attempts, time.time(), reason),
                    *(time.time(), LONGEST_BACKOFF_S, backoff_s),
                ),
            )
            self._close_turns(rollout_id)
        return self._announce(rollout_id)

    def give_back(self, rollout_id: str, attempt: int, reason: str) -> Rollout:
        """The attempt is void through no fault of its own: queued again, and it counts against no limit."""
        with transaction(self._db):
            self._move(
                rollout_id,
                "state = 'queued', spared = spared + 1, reason = ?",
                "state IN ('running', 'grading') AND attempt = ?",
                attempt,
                values=(reason,),
            )
            self._close_turns(rollout_id)
        return self._announce(rollout_id)

    def cancel(self, rollout_id: str, reason: str) -> Rollout:
        with transaction(self._db):
            self._cancel(rollout_id, reason)
        return self._announce(rollout_id)

    def reward(self, rollout_id: str, attempt: int, value: float, *, while_running: bool) -> Rollout:
        """Accept the one reward of an attempt. Conflict: there is one already, or the attempt is not graded now."""
        states = "('running', 'grading')" if while_running else "('grading')"
        with transaction(self._db):
            done = self._db.execute(
                "UPDATE attempts SET reward = ? WHERE rollout_id = ? AND attempt = ? AND reward IS NULL AND EXISTS "
                f"(SELECT 1 FROM rollouts WHERE rollout_id = ? AND attempt = ? AND state IN {states})",
                (value, rollout_id, attempt, rollout_id, attempt),
            )
            if done.rowcount == 0:
                raise Conflict(self._no_reward(rollout_id, attempt, value))
            self._touch(rollout_id)
        return self._announce(rollout_id)

    def incomplete(self, rollout_id: str, attempt: int) -> str | None:
        """Why this attempt's record is not exact, or None."""
        row = self._db.execute(
            "SELECT incomplete FROM attempts WHERE rollout_id = ? AND attempt = ?", (rollout_id, attempt)
        ).fetchone()
        return row["incomplete"] if row else None

    def outage(self, rollout_id: str, attempt: int) -> bool:
        """Whether the gateway was away during this attempt, and nothing has shown since that it missed nothing."""
        row = self._db.execute(
            "SELECT outage FROM attempts WHERE rollout_id = ? AND attempt = ?", (rollout_id, attempt)
        ).fetchone()
        return row is not None and row["outage"] is not None

    def mark_incomplete(self, rollout_id: str, attempt: int, why: str) -> None:
        self._db.execute(
            "UPDATE attempts SET incomplete = COALESCE(incomplete, ?) WHERE rollout_id = ? AND attempt = ?",
            (why, rollout_id, attempt),
        )

    def note_refusal(self, rollout_id: str, attempt: int, code: str, message: str) -> None:
        """A call of the attempt was not served. The first one of each code is kept."""
        self._db.execute(
            "UPDATE attempts SET refusals = json_insert(COALESCE(refusals, '{}'), '$.' || ?, ?) "
            "WHERE rollout_id = ? AND attempt = ?",
            (json.dumps(code), message, rollout_id, attempt),
        )

    def add_held(self, rollout_id: str, attempt: int, seconds: float) -> None:
        """Count time during which Leyden, not the harness, made the attempt wait."""
        self._db.execute(
            "UPDATE attempts SET held_s = held_s + ? WHERE rollout_id = ? AND attempt = ?",
            (seconds, rollout_id, attempt),
        )

    def _ensure_group(self, spec: Json) -> str:
        key = (spec["kind"], spec["step"], spec["slot"])
        task = orjson.dumps(spec["task"], option=orjson.OPT_SORT_KEYS).decode()
        row = self._db.execute(
            "SELECT * FROM groups WHERE kind = ? AND step = ? AND slot = ? AND state <> 'discarded'", key
        ).fetchone()
        if row is not None:
            if row["size"] != spec["size"]:
                raise Conflict(
                    f"group {row['group_id']} exists with {row['size']} rollouts, not {spec['size']}; set the group "
                    "size back, or use a new run_dir"
                )
            if row["task"] != task:
                raise Conflict(
                    f"group {row['group_id']} exists with another task: the data or the seed has changed since; set it "
                    "back, or use a new run_dir"
                )
            return str(row["group_id"])
        generation = self._db.execute(
            "SELECT COUNT(*) FROM groups WHERE kind = ? AND step = ? AND slot = ?", key
        ).fetchone()[0]
        group_id = f"{spec['kind']}-{spec['step']:05d}-{spec['slot']:04d}" + (f"-r{generation}" if generation else "")
        sampling = None if spec.get("sampling") is None else orjson.dumps(spec["sampling"]).decode()
        self._db.execute(
            "INSERT INTO groups VALUES (?, ?, ?, ?, ?, 'active', ?, ?)", (group_id, *key, spec["size"], task, sampling)
        )
        for member in range(spec["size"]):
            self._db.execute(
                "INSERT INTO rollouts (rollout_id, group_id, member, state, change, created) "
                "VALUES (?, ?, ?, 'queued', ?, ?)",
                (f"{group_id}-{member:03d}", group_id, member, next_change(self._db), time.time()),
            )
        return group_id

    def _group(self, group_id: str) -> Group:
        group = self._db.execute(
            "SELECT group_id, kind, step, slot, size, state FROM groups WHERE group_id = ?", (group_id,)
        ).fetchone()
        rows = self._db.execute(_ROLLOUT + "WHERE r.group_id = ? ORDER BY r.member", (group_id,)).fetchall()
        return Group(**dict(group), rollouts=tuple(self._with_forks(rows)))

    def _with_forks(self, rows: Sequence[sqlite3.Row], *, tasks: bool = True) -> list[Rollout]:
        rollouts = {row["rollout_id"]: _rollout(row, tasks=tasks) for row in rows}
        for chunk in _chunks(list(rollouts), 500):
            marks = ", ".join("?" * len(chunk))
            for rollout_id, cause, count in self._db.execute(_FORKS.format(marks=marks), chunk):
                rollouts[rollout_id].forks[cause] = count
        return list(rollouts.values())

    def _move(
        self, rollout_id: str, assignments: str, condition: str, *arguments: Any, values: tuple[Any, ...] = ()
    ) -> sqlite3.Row:
        row: sqlite3.Row | None = self._db.execute(
            f"UPDATE rollouts SET {assignments}, change = ? WHERE rollout_id = ? AND {condition} RETURNING *",
            (*values, next_change(self._db), rollout_id, *arguments),
        ).fetchone()
        if row is None:
            current = self.get(rollout_id)
            raise Conflict(
                f"rollout {rollout_id} is {current.state} in attempt {current.attempt}: the change does not apply"
            )
        return row

    def _cancel(self, rollout_id: str, reason: str) -> None:
        self._move(
            rollout_id,
            "state = 'cancelled', reason = ?, finished = ?",
            f"state NOT IN ({_TERMINAL})",
            values=(reason, time.time()),
        )
        self._close_turns(rollout_id)

    def _discard(self, group_id: str, reason: str) -> None:
        self._db.execute("UPDATE groups SET state = 'discarded' WHERE group_id = ?", (group_id,))
        for rollout_id in self._ids(
            f"SELECT rollout_id FROM rollouts WHERE group_id = ? AND state NOT IN ({_TERMINAL})", (group_id,)
        ):
            self._cancel(rollout_id, reason)

    def _close_turns(self, rollout_id: str) -> None:
        """Nobody waits for the calls of a harness that is gone."""
        self._db.execute("UPDATE turns SET state = 'abandoned' WHERE rollout_id = ? AND state = 'open'", (rollout_id,))

    def _no_reward(self, rollout_id: str, attempt: int, value: float) -> str:
        current = self.get(rollout_id)
        if current.attempt == attempt and current.reward is not None:
            return f"attempt {attempt} of {rollout_id} has reward {current.reward} already; {value} is not taken"
        return (
            f"rollout {rollout_id} is {current.state} in attempt {current.attempt}: "
            f"reward {value} for attempt {attempt} comes at the wrong time"
        )

    def _touch(self, rollout_id: str) -> None:
        self._db.execute("UPDATE rollouts SET change = ? WHERE rollout_id = ?", (next_change(self._db), rollout_id))

    def _ids(self, sql: str, arguments: Sequence[Any] | Json = ()) -> list[str]:
        return [row[0] for row in self._db.execute(sql, arguments).fetchall()]

    def _announce(self, rollout_id: str) -> Rollout:
        self._changed()
        return self.get(rollout_id)


def _rollout(row: sqlite3.Row, *, tasks: bool) -> Rollout:
    known = dict(row)
    known["task"] = orjson.loads(row["task"]) if tasks else {}
    known["sampling"] = row["sampling"] and orjson.loads(row["sampling"])
    known["timed_out"] = bool(row["timed_out"])
    known["refusals"] = orjson.loads(row["refusals"] or "{}")
    known["state"] = RolloutState(row["state"])
    known["failure"] = row["failure"] and FailureClass(row["failure"])
    for name, default in (("turns", 0), ("sampled_tokens", 0), ("held_s", 0.0)):
        known[name] = row[name] or default
    return Rollout(**known)


def _exit_text(rollout: Rollout) -> str:
    return "timed out" if rollout.timed_out else f"exit code {rollout.exit_code}"


def _chunks(items: list[str], size: int) -> Iterable[list[str]]:
    return (items[i : i + size] for i in range(0, len(items), size))
