"""The attempts that are being served now: their conversations, budgets and unfinished deliveries, in memory.

Everything here can be made again from the store, and is, after a restart. An attempt is dropped when its harness
exits, so memory holds what runs and not what ran.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from leyden.errors import RequestError, Unauthorized, Unwritable
from leyden.gateway.http import log_bug
from leyden.gateway.metrics import Metrics
from leyden.protocols import ChatChoice, ChatReply
from leyden.records import Rollout
from leyden.store import Store, StoredTurn
from leyden.trajectory.nodes import Conversations, Node
from leyden.types import Claims, Json, RolloutState

RECENT_REPLIES = 32
NOT_REFUSALS = frozenset({"gone", "internal_error", "capture_failed"})
"""Codes of calls that were given up, or failed by no fault of the caller."""
READ_AT_ONCE = 8
MOST_RUNNING = 100_000

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Delivery:
    """One call and what became of it: `task` works on it until there is a `reply`. `cut` says that the caller's
    connection closed before the reply's last byte, so that an equal call is the next try of this one.
    """

    key: bytes
    task: asyncio.Task[Delivery] | None = None
    reply: ChatReply | None = None
    cut: bool = False


@dataclass(slots=True)
class Attempt:
    """One running attempt. `turns` counts its model calls but for those that `failed`, by a refusal most of them;
    `kept_bytes` what the store keeps of what it sent. `sampling` is the group's own distribution, if it has one. While
    `holds` of its calls are held, `held_since` (monotonic) is when the first of them began to be; `unwritten_held_s` of
    earlier holds are not in the store yet. `reading` and `working` bound what it may ask of the gateway at once: bodies
    in memory, and work in threads (`gateway/workers`).
    """

    rollout_id: str
    attempt: int
    kind: str
    sampling: Json | None
    turns: int = 0
    failed: int = 0
    kept_bytes: int = 0
    conversations: Conversations = field(default_factory=Conversations)
    deliveries: list[Delivery] = field(default_factory=list)
    refused: set[str] = field(default_factory=set)
    holds: int = 0
    held_since: float = 0.0
    unwritten_held_s: float = 0.0
    reading: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(READ_AT_ONCE))
    working: asyncio.Lock = field(default_factory=asyncio.Lock)

    def begin_hold(self, since: float) -> None:
        if self.holds == 0:
            self.held_since = since
        self.holds += 1

    def end_hold(self) -> float:
        """Seconds for which the attempt was held, once the last of its holds ends; 0 before."""
        self.holds -= 1
        return time.monotonic() - self.held_since if self.holds == 0 else 0.0

    @contextlib.contextmanager
    def held(self, since: float, store: Store, metrics: Metrics) -> Iterator[None]:
        """Time from `since` (monotonic) to the end of the block, in which Leyden made the attempt wait: it counts
        against no budget. Holds that overlap count once.
        """
        self.begin_hold(since)
        try:
            yield
        finally:
            if seconds := self.end_hold():
                metrics.held_seconds.inc(seconds)
                self.unwritten_held_s += seconds
                with contextlib.suppress(Unwritable):
                    store.rollouts.add_held(self.rollout_id, self.attempt, self.unwritten_held_s)
                    self.unwritten_held_s = 0.0

    def remember(self, delivery: Delivery) -> None:
        """Keep it for a retry. The oldest that is not worked on any more goes where there are too many."""
        self.deliveries.append(delivery)
        if len(self.deliveries) > RECENT_REPLIES:
            oldest = next((d for d in self.deliveries if d.task is None), None)
            if oldest is not None:
                self.forget(oldest)

    def forget(self, delivery: Delivery) -> None:
        """It is no call's predecessor any more; work on it ends."""
        if delivery in self.deliveries:
            self.deliveries.remove(delivery)
        if delivery.task is not None:
            delivery.task.cancel()

    def predecessor(self, key: bytes, n: int, *, retried: bool) -> Delivery | None:
        """The call of which a call with this key and `n` choices is the next try, if it is one.

        That is the last one whose connection was cut; where none was, and the caller says itself that it tries
        again (`retried`), the last one. So of equal calls that run side by side a retry takes the place of the one
        that was lost.
        """
        equal = [d for d in self.deliveries if d.key == key and (d.reply is None or len(d.reply.choices) == n)]
        cut = [d for d in equal if d.cut]
        candidates = cut or (equal if retried else [])
        return candidates[-1] if candidates else None


@dataclass(frozen=True, slots=True)
class AttemptRecall:
    """`protocols.Recall` of one attempt: only its own turns can be referred to."""

    attempt: Attempt
    store: Store

    def reply(self, turn_id: int) -> Json | None:
        node = self.attempt.conversations.nodes.get(turn_id)
        return node.reply if node else None

    def messages(self, turn_id: int) -> list[Json] | None:
        if turn_id not in self.attempt.conversations.nodes:
            return None
        with self.store.turns_reader() as turns:  # a request that is large is read in another thread
            return turns.messages(turn_id)


class Attempts:
    def __init__(self, store: Store, model_name: str) -> None:
        self._store = store
        self._model_name = model_name
        self._live: dict[tuple[str, int], Attempt] = {}
        self._spoiled: dict[tuple[str, int], str] = {}

    def get(self, claims: Claims) -> Attempt:
        """The attempt that a key names, read from the store when it is new here."""
        key = (claims.rollout_id, claims.attempt)
        attempt = self._live.get(key)
        if attempt is None:
            attempt = self._live[key] = self._load(*key)
        return attempt

    def drop(self, rollout_id: str, attempt: int) -> None:
        """The attempt has ended, and the store knows it: nobody waits for its calls."""
        self._spoiled.pop((rollout_id, attempt), None)
        ended = self._live.pop((rollout_id, attempt), None)
        if ended is not None:
            for delivery in list(ended.deliveries):
                ended.forget(delivery)

    def drop_ended(self) -> None:
        """Drop all that are not running any more."""
        for rollout_id, attempt in list(self._live):
            if self._running(rollout_id, attempt) is None:
                self.drop(rollout_id, attempt)

    def broken(self, claims: Claims | None, error: Exception) -> None:
        """A bug of Leyden's: logged without what was said, and never held against the agent."""
        if claims is None:
            log_bug(log, "a call without a valid key", error)
            return
        log_bug(log, f"rollout {claims.rollout_id}, attempt {claims.attempt}", error)
        why = f"the gateway failed: {type(error).__name__}"
        self.spoil(claims.rollout_id, claims.attempt, why)

    def spoil(self, rollout_id: str, attempt: int, why: str) -> None:
        """The attempt's record is not exact, or its harness was let down: it will not be scored. If the store cannot
        be told now, this gateway remembers it, and the next one finds that the attempt was running."""
        try:
            self._store.rollouts.mark_incomplete(rollout_id, attempt, why)
        except Exception as error:
            if not isinstance(error, Unwritable):
                log_bug(log, f"rollout {rollout_id}, attempt {attempt}", error)
            self.refuse(rollout_id, attempt, why)

    def refuse(self, rollout_id: str, attempt: int, why: str) -> None:
        """Something that the attempt needed could not be written."""
        self._spoiled.setdefault((rollout_id, attempt), why)

    def let_down(self, rollout_id: str, attempt: int) -> bool:
        """Whether the store could not be written when something of the attempt had to be: no try of the rollout."""
        return (rollout_id, attempt) in self._spoiled

    def incomplete(self, rollout_id: str, attempt: int) -> str | None:
        """Why the attempt will not be scored, or None."""
        return self._spoiled.get((rollout_id, attempt)) or self._store.rollouts.incomplete(rollout_id, attempt)

    def refused(self, claims: Claims | None, error: RequestError) -> None:
        """Keep the first refusal of each code, for whoever asks what became of the attempt."""
        attempt = self._live.get((claims.rollout_id, claims.attempt)) if claims else None
        if attempt is None or error.code in attempt.refused or error.code in NOT_REFUSALS:
            return
        attempt.refused.add(error.code)
        with contextlib.suppress(Exception):  # the caller is told anyway
            self._store.rollouts.note_refusal(attempt.rollout_id, attempt.attempt, error.code, str(error))

    def held_now(self, rollout_id: str, number: int) -> float:
        """Seconds that the attempt has been held and that the store does not know yet."""
        attempt = self._live.get((rollout_id, number))
        if attempt is None:
            return 0.0
        return attempt.unwritten_held_s + (time.monotonic() - attempt.held_since if attempt.holds else 0.0)

    def stalled(self, seconds: float) -> None:
        """The gateway answered nobody for so long: no running attempt is held to it. Those on hold count it already."""
        for rollout in self._store.rollouts.after(0, [RolloutState.RUNNING], MOST_RUNNING, tasks=False):
            key = (rollout.rollout_id, rollout.attempt)
            live = self._live.get(key)
            if live is None or not live.holds:
                with contextlib.suppress(Unwritable):
                    self._store.rollouts.add_held(*key, seconds)

    def __len__(self) -> int:
        return len(self._live)

    def _load(self, rollout_id: str, number: int) -> Attempt:
        rollout = self._running(rollout_id, number)
        if rollout is None:
            raise Unauthorized(f"attempt {number} of rollout {rollout_id} is not running any more", forbidden=True)
        used = self._store.turns.used(rollout_id, number)
        attempt = Attempt(rollout_id, number, rollout.kind, rollout.sampling, *used)
        for stored in self._store.turns.of_attempt(rollout_id, number):
            node = _node(stored, attempt.conversations)
            attempt.conversations.add(node)
            reply = reply_of(node, stored, self._model_name)
            attempt.remember(Delivery(stored.request_key, reply=reply))
        return attempt

    def _running(self, rollout_id: str, number: int) -> Rollout | None:
        """The rollout, if that attempt of it is running."""
        rollout = self._store.rollouts.get(rollout_id)
        return rollout if (rollout.attempt, rollout.state) == (number, RolloutState.RUNNING) else None


def reply_of(node: Node, stored: StoredTurn, model: str) -> ChatReply:
    """The answer as it was given."""
    choice = ChatChoice(node.reply, stored.turn.finish_reason, len(node.sampled_T), node.stop_string)
    prompt_tokens = node.end_tokens - len(node.sampled_T)
    return ChatReply(node.turn_id, model, int(stored.created), prompt_tokens, [choice])


def _node(stored: StoredTurn, known: Conversations) -> Node:
    turn = stored.turn
    parent = known.nodes[turn.parent_id] if turn.parent_id is not None else None
    return Node.from_json(
        stored.node, turn_id=turn.turn_id, parent=parent, delta_P=turn.delta_P, sampled_T=turn.sampled_T
    )
