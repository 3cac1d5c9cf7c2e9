"""Which recorded turn does a prompt without messages continue? Pure: text in, a node or the cause of a fork out.

A prompt is one pseudo-message, so `prompt_key` of its turn is the digest of the whole prompt, and `depth` its length.
A new text continues the turn whose prompt and reply it begins with; what follows is new. A turn that ended with a stop
token, which its text does not show, is continued only by a text that goes on with that token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from leyden.trajectory.causes import ForkCause
from leyden.trajectory.meaning import prefix_keys
from leyden.trajectory.nodes import Conversations, Node


@dataclass(frozen=True, slots=True)
class TextContinuation:
    """`parent` with the text that follows its reply; or no parent, and the cause (None for a first turn)."""

    cause: ForkCause | None = None
    parent: Node | None = None
    rest: str = ""


def prompt_keys(prompt: str | Sequence[int]) -> list[bytes]:
    """As `prefix_keys`: of nothing, and of the prompt."""
    return prefix_keys([{"role": "prompt", "content": prompt}])


def find_text(known: Conversations, text: str) -> TextContinuation:
    """The turn with the longest text that `text` begins with, or why there is none."""
    replied = [node for node in known.nodes.values() if text.startswith(node.reply["content"], node.depth)]
    ends = {node.turn_id: node.depth + len(node.reply["content"]) for node in replied}
    longest_first = sorted(replied, key=lambda node: (ends[node.turn_id], node.turn_id), reverse=True)
    parent = next((node for node in longest_first if _begins_with(text, node)), None)
    if parent is None:
        return TextContinuation(root_cause(known, text))
    if not parent.bridgeable:
        return TextContinuation(ForkCause.STOP_STRING)
    return TextContinuation(None, parent, text[ends[parent.turn_id] :])


def root_cause(known: Conversations, prompt: str | Sequence[int]) -> ForkCause | None:
    """Why a prompt that continues no turn is not the attempt's first."""
    if not known.nodes:
        return None
    if any(node.prompt_key == prompt_keys(prompt)[-1] for node in known.nodes.values()):
        return ForkCause.REPEATED
    begun = any(_begins_with(prompt, node) for node in known.nodes.values())
    return ForkCause.REPLY_REWRITTEN if begun else ForkCause.NEW_CONVERSATION


def _begins_with(prompt: str | Sequence[int], node: Node) -> bool:
    """Whether `prompt` goes on from this turn's prompt."""
    return node.depth < len(prompt) and prompt_keys(prompt[: node.depth])[-1] == node.prompt_key
