"""The committed turns of one attempt as continuity sees them, and the indices by which it finds them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np

from leyden.trajectory.meaning import message_key
from leyden.types import Ids, Json


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """A committed turn as continuity sees it.

    `delta_P` are the prompt ids that `parent`'s path does not hold; `end_tokens` is the length of the path up to and
    including `sampled_T`. `depth` counts the messages of its request. `has_reasoning` is True if reasoning
    stands anywhere on the path: sampled, or in a prompt that the template made with it.
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
    end_tokens: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        before = self.parent.end_tokens if self.parent else 0
        object.__setattr__(self, "end_tokens", before + len(self.delta_P) + len(self.sampled_T))

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
        if self.parent is None:
            return list(self.delta_P.tolist())
        parts = [part for node in self.path() for part in (node.delta_P, node.sampled_T)]
        ids: list[int] = np.concatenate(parts[:-1]).tolist()
        return ids

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


@dataclass(slots=True)
class Conversations:
    """All of one attempt's committed turns. Only `add` changes it.

    `by_prompt` lists the turns that answered the same messages, `children` those that continue a turn (None:
    the roots), `deepest` the longest request that began with a message. `replies` are the `message_key`s of
    what was sampled.
    """

    nodes: dict[int, Node] = field(default_factory=dict)
    by_key: dict[bytes, Node] = field(default_factory=dict)
    by_prompt: dict[bytes, list[Node]] = field(default_factory=dict)
    children: dict[int | None, list[Node]] = field(default_factory=dict)
    deepest: dict[bytes, int] = field(default_factory=dict)
    replies: set[bytes] = field(default_factory=set)

    def add(self, node: Node) -> None:
        self.nodes[node.turn_id] = node
        self.by_key[node.key] = node
        self.by_prompt.setdefault(node.prompt_key, []).append(node)
        self.children.setdefault(node.parent.turn_id if node.parent else None, []).append(node)
        self.deepest[node.first_key] = max(node.depth, self.deepest.get(node.first_key, 0))
        self.replies.update((message_key(node.reply), message_key(node.reply, reasoning=False)))

    def snapshot(self) -> Conversations:
        """These turns as they are now, to be read in another thread. Lists only grow, so they are shared."""
        return replace(self, **{name: getattr(self, name).copy() for name in self.__slots__})

    def under(self, parent: Node | None) -> list[Node]:
        """The turns that continue `parent`, or the roots."""
        return self.children.get(parent.turn_id if parent else None, [])

    def latest(self, count: int) -> Iterator[Node]:
        """The newest turns, newest first."""
        return islice(reversed(self.nodes.values()), count)
