"""Messages and recorded turns by hand, as continuity sees them."""

from __future__ import annotations

from typing import Any

import numpy as np

from leyden.trajectory.continuity import find
from leyden.trajectory.meaning import extend_key, prefix_keys
from leyden.trajectory.nodes import Conversations, Node

TOOLS, OTHER_TOOLS = b"tools", b"other"


def system(text: str) -> Any:
    return {"role": "system", "content": text}


def user(text: str) -> Any:
    return {"role": "user", "content": text}


def tool(text: str) -> Any:
    return {"role": "tool", "content": text}


def assistant(text: str, reasoning: str | None = None, calls: list[tuple[str, Any]] | None = None) -> Any:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [
            {"id": f"id{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for i, (name, arguments) in enumerate(calls)
        ]
    return message


def node(
    turn_id: int,
    messages: list[Any],
    reply: Any,
    *,
    parent: Node | None = None,
    delta: tuple[int, ...] = (1, 2),
    sampled: tuple[int, ...] = (3,),
    stop_string: str | None = None,
    tools: bytes = TOOLS,
) -> Node:
    keys = prefix_keys(messages)
    return Node(
        turn_id=turn_id,
        parent=parent,
        delta_P=np.array(delta, np.int32),
        sampled_T=np.array(sampled, np.int32),
        key=extend_key(keys[-1], reply),
        prompt_key=keys[-1],
        first_key=keys[1],
        tools_key=tools,
        depth=len(messages),
        reply=reply,
        has_reasoning=False,
        stop_string=stop_string,
    )


def known(*nodes: Node) -> Conversations:
    conversations = Conversations()
    for one in nodes:
        conversations.add(one)
    return conversations


def search(conversations: Conversations, messages: list[Any], tools: bytes = TOOLS) -> tuple[int | None, int, Any]:
    """The turn that is continued, how many messages are new to it, and the cause where there is none."""
    found = find(conversations, messages, tools, prefix_keys(messages))
    return (found.parent.turn_id if found.parent else None, len(found.new_messages), found.cause)
