"""Which recorded turn does a request continue? Pure: messages in, a node or the cause of a fork out.

A conversation is known by a chain of digests: `keys[i]` stands for the first i messages. A recorded turn has the key
of its request's messages (`prompt_key`) and of those plus its reply (`key`). A request continues the turn whose `key`
is its longest prefix. Two messages are equal in meaning when they are equal after parsing tool-call arguments as JSON
and trimming reasoning; ids of tool calls do not count, since harnesses rename them.

    turn 1 answers  [system, user]                        prompt_key = keys[2], key = keys[3]
    a request with  [system, user, reply 1, result]       keys[3] is turn 1's key: new messages = [result]
    a request with  [system, user, "format error"]        keys[2] is turn 1's prompt_key, but its reply is missing:
                                                          a fork, cause reply_dropped
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import orjson

from leyden.types import Ids, Json


class ForkCause(StrEnum):
    """Why an attempt has more than one branch."""

    TOOLS_CHANGED = "tools_changed"
    REPLY_DROPPED = "reply_dropped"
    REPLY_REWRITTEN = "reply_rewritten"
    REASONING_DROPPED = "reasoning_dropped_by_harness"
    TEMPLATE = "reasoning_dropped_by_template"
    LATE_SYSTEM = "late_system_message"
    STOP_STRING = "stop_string"
    STOP_TOKEN = "stop_token_not_resent"
    TOKENISED_WHOLE = "text_tokenised_whole"
    UNSAMPLED_REPLY = "assistant_message_not_sampled"
    HISTORY_REWRITTEN = "history_rewritten"
    NEW_CONVERSATION = "new_conversation"
    REPEATED = "repeated_request"
    PARALLEL = "parallel_branch"
    CONTINUITY_OFF = "continuity_off"


@dataclass(frozen=True, slots=True)
class Node:
    """A committed turn as continuity sees it.

    `delta_P` are the prompt ids that `parent`'s path does not hold. `has_reasoning` is True if any assistant message
    up to and including the reply holds reasoning.
    """

    turn_id: int
    parent: Node | None
    delta_P: Ids
    sampled_T: Ids
    key: bytes
    prompt_key: bytes
    first_key: bytes
    tools_key: bytes
    depth: int
    reply: Json
    has_reasoning: bool
    stop_string: str | None = None

    @property
    def bridgeable(self) -> bool:
        """A turn ended by a stop string is never continued by its ids: its text ends before they do."""
        return self.stop_string is None

    def path(self) -> list[Node]:
        """From the root to this node."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def prompt_ids(self) -> list[int]:
        """The whole prompt of this turn."""
        parts: list[Ids] = []
        for node in self.path():
            parts += [node.delta_P, node.sampled_T]
        return list(map(int, np.concatenate(parts[:-1]))) if len(parts) > 2 else self.delta_P.tolist()

    def to_json(self) -> Json:
        """What the store keeps so that `from_json` can find this turn again after a restart."""
        return {
            "key": self.key.hex(),
            "prompt_key": self.prompt_key.hex(),
            "first_key": self.first_key.hex(),
            "tools_key": self.tools_key.hex(),
            "depth": self.depth,
            "reply": self.reply,
            "has_reasoning": self.has_reasoning,
            "stop_string": self.stop_string,
        }

    @classmethod
    def from_json(cls, data: Json, *, turn_id: int, parent: Node | None, delta_P: Ids, sampled_T: Ids) -> Node:
        keys = {name: bytes.fromhex(data[name]) for name in ("key", "prompt_key", "first_key", "tools_key")}
        return cls(
            turn_id=turn_id,
            parent=parent,
            delta_P=delta_P,
            sampled_T=sampled_T,
            depth=data["depth"],
            reply=data["reply"],
            has_reasoning=data["has_reasoning"],
            stop_string=data["stop_string"],
            **keys,
        )


@dataclass(frozen=True, slots=True)
class Continuation:
    """`parent` with the messages it has not seen; or no parent, and the cause (None for a first turn)."""

    parent: Node | None
    new_messages: list[Json]
    cause: ForkCause | None = None


@dataclass(slots=True)
class Conversations:
    """The committed turns of one attempt, found by key. The only part here that changes."""

    nodes: dict[int, Node] = field(default_factory=dict)
    by_key: dict[bytes, Node] = field(default_factory=dict)

    def add(self, node: Node) -> None:
        self.nodes[node.turn_id] = node
        self.by_key[node.key] = node


def message_key(message: Json, *, reasoning: bool = True) -> bytes:
    """Canonical bytes of one message. `reasoning=False` leaves the reasoning out of the comparison."""
    calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls", ())]
    thought = message.get("reasoning_content", "").strip() if reasoning else ""
    return orjson.dumps([message["role"], message["content"], calls, thought], option=orjson.OPT_SORT_KEYS)


def extend_key(key: bytes, message: Json) -> bytes:
    return hashlib.blake2b(key + message_key(message), digest_size=16).digest()


def prefix_keys(messages: Sequence[Json]) -> list[bytes]:
    """`keys[i]` is the digest of the first i messages, so one more key than messages."""
    keys = [b""]
    for message in messages:
        keys.append(extend_key(keys[-1], message))
    return keys


def find(known: Conversations, messages: Sequence[Json], tools_key: bytes, keys: Sequence[bytes]) -> Continuation:
    """The turn that `messages` continues, or why there is none. `keys` are `prefix_keys(messages)`."""
    for length in range(len(messages) - 1, 0, -1):
        node = known.by_key.get(keys[length]) if messages[length - 1]["role"] == "assistant" else None
        if node is None:
            continue
        new_messages = list(messages[length:])
        if node.tools_key != tools_key:
            return Continuation(None, [], ForkCause.TOOLS_CHANGED)
        if any(message["role"] == "assistant" for message in new_messages):
            return Continuation(
                None, [], _lost_reply(known.nodes.values(), messages, keys) or ForkCause.UNSAMPLED_REPLY
            )
        if not node.bridgeable:
            return Continuation(None, [], ForkCause.STOP_STRING)
        return Continuation(node, new_messages)
    return Continuation(None, [], _root_cause(known, messages, keys))


def extended(known: Conversations, prompt_ids: Ids) -> Node | None:
    """The recorded turn whose whole token sequence is the longest prefix of `prompt_ids`, if any."""
    best: tuple[int, Node] | None = None
    ends: dict[int, int] = {}
    for node in known.nodes.values():
        start = 0 if node.parent is None else ends.get(node.parent.turn_id, -1)
        end = -1 if start < 0 else _match(prompt_ids, start, (node.delta_P, node.sampled_T))
        ends[node.turn_id] = end
        if 0 < end and (best is None or end >= best[0]):
            best = (end, node)
    return best[1] if best else None


def sibling_cause(
    known: Conversations, parent: Node | None, messages: Sequence[Json], keys: Sequence[bytes]
) -> ForkCause | None:
    """Why a turn under `parent` is not the only one there: None when it is."""
    siblings = [node for node in known.nodes.values() if node.parent is parent]
    if any(node.prompt_key == keys[-1] for node in siblings):
        return ForkCause.REPEATED
    if parent is None or not siblings:
        return None
    return _lost_reply(siblings, messages, keys) or ForkCause.PARALLEL


def has_reasoning(messages: Iterable[Json]) -> bool:
    return any(message.get("reasoning_content") for message in messages)


def _root_cause(known: Conversations, messages: Sequence[Json], keys: Sequence[bytes]) -> ForkCause | None:
    if not known.nodes:
        return None
    lost = _lost_reply(known.nodes.values(), messages, keys)
    if lost:
        return lost
    if any(node.prompt_key == keys[-1] for node in known.nodes.values()):
        return ForkCause.REPEATED
    first_known = {node.first_key for node in known.nodes.values()}
    return ForkCause.HISTORY_REWRITTEN if keys[1] in first_known else ForkCause.NEW_CONVERSATION


def _lost_reply(nodes: Iterable[Node], messages: Sequence[Json], keys: Sequence[bytes]) -> ForkCause | None:
    """The request repeats the prompt of a turn, then goes on without that turn's reply as it was."""
    position = {key: length for length, key in enumerate(keys)}
    candidates = [
        node
        for node in nodes
        if position.get(node.prompt_key, len(messages)) < len(messages) and node.key not in position
    ]
    if not candidates:
        return None
    node = max(candidates, key=lambda n: (n.depth, n.turn_id))
    following = messages[node.depth]
    if following["role"] != "assistant":
        return ForkCause.REPLY_DROPPED
    if message_key(following, reasoning=False) == message_key(node.reply, reasoning=False):
        return ForkCause.REASONING_DROPPED
    return ForkCause.REPLY_REWRITTEN


def _match(ids: Ids, start: int, parts: Iterable[Ids]) -> int:
    """The position after `parts`, if `ids` holds them from `start` on; else -1."""
    for part in parts:
        end = start + len(part)
        if end > len(ids) or (part.size and ids[end - 1] != part[-1]) or not np.array_equal(ids[start:end], part):
            return -1
        start = end
    return start
