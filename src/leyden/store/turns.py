"""Turns and events: what a harness said to the model, as new tokens only."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import orjson

from leyden.errors import BudgetExceeded, Conflict, NotFound, Unauthorized
from leyden.protocols import ChatRequest
from leyden.store.database import transaction
from leyden.store.pack import (
    compressor,
    pack_ids,
    pack_json,
    pack_logprobs,
    pack_spans,
    unpack_ids,
    unpack_json,
    unpack_logprobs,
    unpack_spans,
)
from leyden.types import FinishReason, Generation, Ids, Json, Turn, TurnState

MOST_EVENTS, MOST_EVENT_BYTES = 1000, 2**20  # of one attempt


@dataclass(frozen=True, slots=True)
class StoredTurn:
    """A committed turn with what continuity kept of it."""

    turn: Turn
    request_key: bytes
    created: float
    node: Json


class Turns:
    def __init__(self, connection: sqlite3.Connection) -> None:
        self._db = connection
        self._zstd = compressor()

    def open(self, rollout_id: str, attempt: int, request_key: bytes, request: ChatRequest, wire: bytes | None) -> int:
        """Open a turn if its attempt is the running one. `wire` is the body, packed, if it is kept."""
        row = self._db.execute(
            "INSERT INTO turns (rollout_id, attempt, state, request_key, created, wire, protocol, streamed, tools) "
            "SELECT ?, ?, 'open', ?, ?, ?, ?, ?, ? "
            "WHERE EXISTS (SELECT 1 FROM rollouts WHERE rollout_id = ? AND attempt = ? AND state = 'running') "
            "RETURNING turn_id",
            (
                *(rollout_id, attempt, request_key, time.time(), wire),
                *(request.protocol, request.stream, len(request.tools)),
                *(rollout_id, attempt),
            ),
        ).fetchone()
        if row is None:
            raise Unauthorized(f"attempt {attempt} of rollout {rollout_id} is not running any more", forbidden=True)
        turn_id: int = row["turn_id"]
        return turn_id

    def commit(
        self,
        turn_id: int,
        *,
        parent_id: int | None,
        fork_cause: str | None,
        delta: Sequence[int] | Ids,
        generation: Generation,
        node: Json,
        messages: bytes | None = None,
    ) -> None:
        """open -> committed, and the attempt's counts. Conflict: the attempt ended meanwhile; nothing is recorded.

        `messages` is `{"after": turn id or null, "messages": [...]}`, packed: what `messages()` can answer later.
        """
        versions = [span.version for span in generation.spans]
        with transaction(self._db):
            row = self._db.execute(
                "UPDATE turns SET state = 'committed', committed = ?, parent_id = ?, fork_cause = ?, delta = ?, "
                "sampled = ?, logprobs = ?, spans = ?, finish_reason = ?, node = ?, messages = ? "
                "WHERE turn_id = ? AND state = 'open' RETURNING rollout_id, attempt",
                (
                    *(time.time(), parent_id, fork_cause, pack_ids(delta), pack_ids(generation.token_ids_T)),
                    *(pack_logprobs(generation.logprobs_T), pack_spans(generation.spans)),
                    *(generation.finish_reason, self._packed(node), messages, turn_id),
                ),
            ).fetchone()
            if row is None:
                raise Conflict(f"turn {turn_id} is not open any more")
            self._count(row, len(generation.token_ids_T), versions)
            self.goes_on(row["rollout_id"], row["attempt"], parent_id)

    def goes_on(self, rollout_id: str, attempt: int, turn_id: int | None) -> None:
        """The attempt's harness holds the answer of `turn_id`: if that was the last one before an outage, it has
        missed nothing (`store/outage`)."""
        self._db.execute(
            "UPDATE attempts SET outage = NULL WHERE rollout_id = ? AND attempt = ? AND outage = ?",
            (rollout_id, attempt, turn_id),
        )

    def _count(self, row: sqlite3.Row, tokens: int, versions: list[int]) -> None:
        self._db.execute(
            "UPDATE attempts SET turns = turns + 1, sampled_tokens = sampled_tokens + :tokens, "
            "min_version = MIN(COALESCE(min_version, :low), :low), "
            "max_version = MAX(COALESCE(max_version, :high), :high) "
            "WHERE rollout_id = :rollout_id AND attempt = :attempt",
            {
                "tokens": tokens,
                "low": min(versions, default=None),
                "high": max(versions, default=None),
                "rollout_id": row["rollout_id"],
                "attempt": row["attempt"],
            },
        )

    def _packed(self, value: Json) -> bytes:
        return pack_json(value, self._zstd)

    def close(self, turn_id: int, state: TurnState) -> None:
        """open -> abandoned or failed; a turn that is closed already stays as it is."""
        self._db.execute("UPDATE turns SET state = ? WHERE turn_id = ? AND state = 'open'", (state, turn_id))

    def withdraw(self, turn_ids: Sequence[int]) -> None:
        """Forget open turns."""
        marks = ", ".join("?" * len(turn_ids))
        self._db.execute(f"DELETE FROM turns WHERE state = 'open' AND turn_id IN ({marks})", tuple(turn_ids))

    def used(self, rollout_id: str, attempt: int) -> tuple[int, int, int]:
        """How many turns of an attempt have not failed, how many have, and the bytes that are kept of what it sent."""
        row = self._db.execute(
            "SELECT COUNT(*), COALESCE(SUM(state = 'failed'), 0), "
            "COALESCE(SUM(COALESCE(LENGTH(wire), 0) + COALESCE(LENGTH(messages), 0)), 0) "
            "FROM turns WHERE rollout_id = ? AND attempt = ?",
            (rollout_id, attempt),
        ).fetchone()
        total, failed, kept_bytes = row
        return total - failed, failed, kept_bytes

    def messages(self, turn_id: int) -> list[Json] | None:
        """All messages that a committed turn was asked with; None where they, or earlier ones, were not kept."""
        chain: list[list[Json]] = []
        current: int | None = turn_id
        while current is not None:
            row = self._db.execute("SELECT messages, node FROM turns WHERE turn_id = ?", (current,)).fetchone()
            if row is None or row["messages"] is None:
                return None
            kept = unpack_json(row["messages"])
            reply = [] if current == turn_id else [unpack_json(row["node"])["reply"]]
            chain.append([*kept["messages"], *reply])
            current = kept["after"]
        return [message for part in reversed(chain) for message in part]

    def of_attempt(self, rollout_id: str, attempt: int) -> Iterator[StoredTurn]:
        """Committed turns of one attempt in the order of their ids."""
        rows = self._db.execute(
            "SELECT * FROM turns WHERE rollout_id = ? AND attempt = ? AND state = 'committed' ORDER BY turn_id",
            (rollout_id, attempt),
        )
        return (StoredTurn(_turn(row), row["request_key"], row["created"], unpack_json(row["node"])) for row in rows)

    def of_rollouts(self, rollout_ids: Sequence[str]) -> Iterator[Turn]:
        """Committed turns of each rollout's current attempt, in the order of `rollout_ids` and of their ids."""
        for rollout_id in rollout_ids:
            rows = self._db.execute(
                "SELECT t.* FROM turns t JOIN rollouts r ON r.rollout_id = t.rollout_id AND r.attempt = t.attempt "
                "WHERE t.rollout_id = ? AND t.state = 'committed' ORDER BY t.turn_id",
                (rollout_id,),
            )
            yield from map(_turn, rows)

    def add_event(self, rollout_id: str, attempt: int, kind: str, data: Json, *, running: bool = False) -> int:
        """Its number. `running`: only while that attempt runs, else Unauthorized. Raises NotFound for an attempt that
        there never was, BudgetExceeded where a running one has added as much as it may."""
        text = orjson.dumps(data).decode()
        if running:
            self._check_events(rollout_id, attempt, len(text))
        condition = "attempt = ? AND state = 'running'" if running else "attempt >= ?"
        row = self._db.execute(
            "INSERT INTO events (rollout_id, attempt, kind, data, created) SELECT ?, ?, ?, ?, ? "
            f"WHERE EXISTS (SELECT 1 FROM rollouts WHERE rollout_id = ? AND {condition}) RETURNING seq",
            (rollout_id, attempt, kind, text, time.time(), rollout_id, attempt),
        ).fetchone()
        if row is None and running:
            raise Unauthorized(f"attempt {attempt} of rollout {rollout_id} is not running any more", forbidden=True)
        if row is None:
            raise NotFound(f"there is no attempt {attempt} of a rollout {rollout_id!r}")
        seq: int = row["seq"]
        return seq

    def _check_events(self, rollout_id: str, attempt: int, size: int) -> None:
        """What an attempt may add to the store by events, its calls' engine errors included."""
        events, held = self._db.execute(
            "SELECT COUNT(*), COALESCE(SUM(LENGTH(data)), 0) FROM events WHERE rollout_id = ? AND attempt = ?",
            (rollout_id, attempt),
        ).fetchone()
        if events >= MOST_EVENTS or held + size > MOST_EVENT_BYTES:
            raise BudgetExceeded(
                f"attempt {attempt} of rollout {rollout_id} has {events} events of {held} bytes; the limits are "
                f"{MOST_EVENTS} and {MOST_EVENT_BYTES}. Write what is more to the workspace or to standard output"
            )

    def events(self, rollout_id: str) -> list[Json]:
        rows = self._db.execute("SELECT * FROM events WHERE rollout_id = ? ORDER BY seq", (rollout_id,))
        return [dict(row) | {"data": orjson.loads(row["data"])} for row in rows.fetchall()]


def _turn(row: sqlite3.Row) -> Turn:
    return Turn(
        turn_id=row["turn_id"],
        rollout_id=row["rollout_id"],
        attempt=row["attempt"],
        parent_id=row["parent_id"],
        delta_P=unpack_ids(row["delta"]),
        sampled_T=unpack_ids(row["sampled"]),
        logprobs_T=unpack_logprobs(row["logprobs"]),
        spans=unpack_spans(row["spans"]),
        finish_reason=FinishReason(row["finish_reason"]),
        fork_cause=row["fork_cause"],
        protocol=row["protocol"],
        streamed=bool(row["streamed"]),
        tools=row["tools"],
    )
