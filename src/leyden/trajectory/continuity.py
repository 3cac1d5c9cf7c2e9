"""Which recorded turn does a request continue? Pure: messages in, a node or the cause of a fork out.

A conversation is known by a chain of digests: `keys[i]` stands for the first i messages. A recorded turn has the key
of its request's messages (`prompt_key`) and of those plus its reply (`key`). A request continues the turn whose `key`
is its longest prefix. Messages are compared by what they mean (`leyden.trajectory.meaning`).

    turn 1 answers  [system, user]                        prompt_key = keys[2], key = keys[3]
    a request with  [system, user, reply 1, result]       keys[3] is turn 1's key: new messages = [result]
    a request with  [system, user, "format error"]        keys[2] is turn 1's prompt_key, but its reply is missing:
                                                          a fork, cause reply_dropped

What it costs does not grow with the turns of the attempt but for the digests of the request's own messages; naming a
cause may look at each of them once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from leyden.trajectory.causes import ForkCause, root_cause, tail_cause
from leyden.trajectory.nodes import Conversations, Node
from leyden.types import Ids, Json


@dataclass(frozen=True, slots=True)
class Continuation:
    """`parent` with the messages it has not seen; or no parent, and the cause (None for a first turn)."""

    parent: Node | None
    new_messages: list[Json]
    cause: ForkCause | None = None


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
            return Continuation(None, [], tail_cause(known, messages, keys, new_messages))
        if not node.bridgeable:
            return Continuation(None, [], ForkCause.STOP_STRING)
        return Continuation(node, new_messages)
    return Continuation(None, [], root_cause(known, messages, tools_key, keys))


def extended(known: Conversations, prompt_ids: Ids) -> Node | None:
    """The latest recorded turn whose whole token sequence is the longest prefix of `prompt_ids`, if any."""
    best: Node | None = None
    pending = list(known.under(None))
    while pending:
        node = pending.pop()
        start = node.parent.end_tokens if node.parent else 0
        if not _continues(prompt_ids, start, (node.delta_P, node.sampled_T)):
            continue
        pending += known.under(node)
        if node.end_tokens and (best is None or (node.end_tokens, node.turn_id) > (best.end_tokens, best.turn_id)):
            best = node
    return best


def _continues(ids: Ids, start: int, parts: Iterable[Ids]) -> bool:
    """Whether `ids` holds `parts` one after another from `start` on. Most that differ do so at the ends of a part."""
    for part in parts:
        end = start + len(part)
        if end > len(ids):
            return False
        if part.size and (ids[start] != part[0] or ids[end - 1] != part[-1] or not (ids[start:end] == part).all()):
            return False
        start = end
    return True
