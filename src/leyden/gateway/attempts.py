"""The attempts that are being served now: their conversations, budgets and unfinished deliveries, in memory.

Everything here can be made again from the store, and is, after a restart. An attempt is dropped when its harness
exits, so memory holds what runs and not what ran.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from dataclasses import dataclass, field

from leyden.errors import Unauthorized
from leyden.protocols import ChatChoice, ChatReply
from leyden.store import Store, StoredTurn
from leyden.trajectory.continuity import Conversations, Node
from leyden.types import Claims, Json

RECENT_REPLIES = 32


@dataclass(slots=True)
class Delivery:
    """What became of the last call with one request key. `reply` is None while the engine works; `cut` says that the
    connection closed before the reply's last byte.
    """

    task: asyncio.Task[Delivery] | None = None
    reply: ChatReply | None = None
    cut: bool = False


@dataclass(slots=True)
class Attempt:
    """One running attempt. `sampling` is the group's own distribution, if it has one. While `holds` of
    its calls are held, `held_since` (monotonic) is when the first of them began to be.
    """

    rollout_id: str
    attempt: int
    kind: str
    sampling: Json | None
    turns: int = 0
    conversations: Conversations = field(default_factory=Conversations)
    deliveries: OrderedDict[bytes, Delivery] = field(default_factory=OrderedDict)
    holds: int = 0
    held_since: float = 0.0

    def begin_hold(self, since: float) -> None:
        if self.holds == 0:
            self.held_since = since
        self.holds += 1

    def end_hold(self) -> float:
        """Seconds for which the attempt was held, once the last of its holds ends; 0 before."""
        self.holds -= 1
        return time.monotonic() - self.held_since if self.holds == 0 else 0.0

    def remember(self, key: bytes, delivery: Delivery) -> None:
        self.deliveries[key] = delivery
        self.deliveries.move_to_end(key)
        while len(self.deliveries) > RECENT_REPLIES:
            self.deliveries.popitem(last=False)


@dataclass(frozen=True, slots=True)
class AttemptRecall:
    """`protocols.Recall` of one attempt: only its own turns can be referred to."""

    attempt: Attempt
    store: Store

    def reply(self, turn_id: int) -> Json | None:
        node = self.attempt.conversations.nodes.get(turn_id)
        return node.reply if node else None

    def messages(self, turn_id: int) -> list[Json] | None:
        return self.store.turns.messages(turn_id) if turn_id in self.attempt.conversations.nodes else None


class Attempts:
    def __init__(self, store: Store, model_name: str) -> None:
        self._store = store
        self._model_name = model_name
        self._live: dict[tuple[str, int], Attempt] = {}

    def get(self, claims: Claims) -> Attempt:
        """The attempt that a key names, read from the store when it is new here."""
        key = (claims.rollout_id, claims.attempt)
        attempt = self._live.get(key)
        if attempt is None:
            attempt = self._live[key] = self._load(*key)
        return attempt

    def drop(self, rollout_id: str, attempt: int) -> None:
        self._live.pop((rollout_id, attempt), None)

    def held_now(self, rollout_id: str, number: int) -> float:
        """Seconds that the attempt has been held and that the store does not know yet."""
        attempt = self._live.get((rollout_id, number))
        return time.monotonic() - attempt.held_since if attempt and attempt.holds else 0.0

    def __len__(self) -> int:
        return len(self._live)

    def _load(self, rollout_id: str, number: int) -> Attempt:
        rollout = self._store.rollouts.get(rollout_id)
        if (rollout["attempt"], rollout["state"]) != (number, "running"):
            raise Unauthorized(f"attempt {number} of rollout {rollout_id} is not running any more", forbidden=True)
        attempt = Attempt(rollout_id, number, rollout["kind"], rollout["sampling"], rollout["turns"])
        for stored in self._store.turns.of_attempt(rollout_id, number):
            node = _node(stored, attempt.conversations)
            attempt.conversations.add(node)
            reply = reply_of(node, stored, self._model_name)
            attempt.remember(stored.request_key, Delivery(reply=reply))
        return attempt


def reply_of(node: Node, stored: StoredTurn, model: str) -> ChatReply:
    """The answer as it was given."""
    choice = ChatChoice(node.reply, stored.turn.finish_reason, len(node.sampled_T), node.stop_string)
    prompt_tokens = sum(len(n.delta_P) + len(n.sampled_T) for n in node.path()) - len(node.sampled_T)
    return ChatReply(node.turn_id, model, int(stored.created), prompt_tokens, [choice])


def _node(stored: StoredTurn, known: Conversations) -> Node:
    turn = stored.turn
    parent = known.nodes[turn.parent_id] if turn.parent_id is not None else None
    return Node.from_json(
        stored.node, turn_id=turn.turn_id, parent=parent, delta_P=turn.delta_P, sampled_T=turn.sampled_T
    )
