"""Why does a request not continue a recorded turn? Pure: what is known of the attempt and the request in, a cause out.

What a request shows decides, and where it shows nothing the cause is `new_conversation`: that a conversation was a side
call or a sub-agent of another is seen when the attempt is over (`leyden.trajectory.kinds`).

Text is quoted if the longest stretch of it that needs no escape, `QUOTE_CHARS` at least, stands in another text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from enum import StrEnum

from leyden.trajectory.meaning import message_key
from leyden.trajectory.nodes import Conversations, Node
from leyden.types import Json

QUOTED_TURNS = 32
QUOTE_CHARS, LONGEST_QUOTE_CHARS = 40, 400
PIECE_CHARS = 64 * 1024
_ESCAPED = re.compile(r'[\x00-\x1f"\'\\<>&]+')


class ForkCause(StrEnum):
    """Why an attempt has more than one path.

    REPLY_*, REASONING_DROPPED   the harness left a sampled reply out, changed it, or left its reasoning out
    TEMPLATE                     the chat template leaves earlier reasoning out
    RERENDERED                   the engine renders the reply to other ids than were sampled
    LATE_SYSTEM                  the chat template shows system messages at the beginning alone
    NOT_CLOSED                   the template shows the sampled reply otherwise: it stopped inside its reasoning
    STOP_STRING                  the reply ended by a stop string, so its text ends before its ids
    UNSAMPLED_REPLY              an assistant message that this attempt did not sample
    HISTORY_REWRITTEN            sampled replies come back after messages that were changed, left out or added
    COMPACTION                   a conversation begins anew and quotes what was sampled
    SUB_AGENT                    a conversation begins with the arguments of a tool call that has no answer yet
    NEW_CONVERSATION             nothing sampled is in it
    REPEATED, PARALLEL           the same request again; another message after the same reply
    """

    TOOLS_CHANGED = "tools_changed"
    REPLY_DROPPED = "reply_dropped"
    REPLY_REWRITTEN = "reply_rewritten"
    REASONING_DROPPED = "reasoning_dropped_by_harness"
    TEMPLATE = "reasoning_dropped_by_template"
    RERENDERED = "rerendered_by_engine"
    LATE_SYSTEM = "late_system_message"
    NOT_CLOSED = "reasoning_not_closed"
    STOP_STRING = "stop_string"
    STOP_TOKEN = "stop_token_not_resent"  # noqa: S105
    TOKENISED_WHOLE = "text_tokenised_whole"
    UNSAMPLED_REPLY = "assistant_message_not_sampled"
    HISTORY_REWRITTEN = "history_rewritten"
    COMPACTION = "compaction"
    SUB_AGENT = "sub_agent"
    NEW_CONVERSATION = "new_conversation"
    REPEATED = "repeated_request"
    PARALLEL = "parallel_branch"
    CONTINUITY_OFF = "continuity_off"


def root_cause(
    known: Conversations, messages: Sequence[Json], tools_key: bytes, keys: Sequence[bytes]
) -> ForkCause | None:
    """Why `messages`, which no recorded reply begins, starts a tree of its own; None for an attempt's first turn."""
    if not known.nodes:
        return None
    if lost := lost_reply(known, messages, keys):
        return lost
    if keys[-1] in known.by_prompt:
        return ForkCause.REPEATED
    if any(_was_sampled(known, message) for message in messages):
        return ForkCause.HISTORY_REWRITTEN
    if _same_start(known, messages, tools_key, keys) and _quotes_replies(known, messages):
        return ForkCause.COMPACTION
    return ForkCause.SUB_AGENT if _quotes_open_calls(known, messages) else ForkCause.NEW_CONVERSATION


def tail_cause(
    known: Conversations, messages: Sequence[Json], keys: Sequence[bytes], new_messages: Sequence[Json]
) -> ForkCause:
    """Why a recorded turn is not continued by `new_messages` that hold assistant messages."""
    if lost := lost_reply(known, messages, keys):
        return lost
    rewritten = any(_was_sampled(known, message) for message in new_messages)
    return ForkCause.HISTORY_REWRITTEN if rewritten else ForkCause.UNSAMPLED_REPLY


def sibling_cause(
    known: Conversations,
    parent: Node | None,
    messages: Sequence[Json],
    keys: Sequence[bytes],
    otherwise: ForkCause | None = None,
) -> ForkCause | None:
    """Why a turn under `parent` is not the only one there: None when it is. `otherwise` says why it does not continue
    one of the others, where that is known.
    """
    siblings = known.under(parent)
    if not siblings:
        return None
    if any(node.prompt_key == keys[-1] for node in siblings):
        return ForkCause.REPEATED
    if parent is None:
        return None
    return otherwise or lost_reply(known, messages, keys, siblings) or ForkCause.PARALLEL


def lost_reply(
    known: Conversations, messages: Sequence[Json], keys: Sequence[bytes], among: Sequence[Node] | None = None
) -> ForkCause | None:
    """The request repeats the prompt of a turn (`among` those given), then goes on without its reply as it was.

    Of several such turns the one with the longest prompt counts, then the latest.
    """
    present = set(keys)
    for length in range(len(messages) - 1, 0, -1):
        for node in reversed(known.by_prompt.get(keys[length], ())):
            if node.key not in present and (among is None or node in among):
                return _of_lost(known, node, messages[length:])
    return None


def _of_lost(known: Conversations, node: Node, rest: Sequence[Json]) -> ForkCause:
    following, reply = rest[0], node.reply
    if following["role"] != "assistant":
        gone_past = known.deepest[node.first_key] > node.depth
        return ForkCause.COMPACTION if gone_past and _quotes_replies(known, rest) else ForkCause.REPLY_DROPPED
    same_words = message_key(following, reasoning=False) == message_key(reply, reasoning=False)
    dropped = same_words and not following.get("reasoning_content", "").strip()
    return ForkCause.REASONING_DROPPED if dropped else ForkCause.REPLY_REWRITTEN


def _was_sampled(known: Conversations, message: Json) -> bool:
    return message["role"] == "assistant" and message_key(message) in known.replies


def _same_start(known: Conversations, messages: Sequence[Json], tools_key: bytes, keys: Sequence[bytes]) -> bool:
    """Whether this may be an earlier conversation: same first message, or, without a system message, same tools."""
    if keys[1] in known.deepest:
        return True
    return messages[0]["role"] != "system" and any(node.tools_key == tools_key for node in known.latest(QUOTED_TURNS))


def _quotes_replies(known: Conversations, messages: Sequence[Json]) -> bool:
    text = _shown(messages)
    return any(_stands_in(node.reply["content"], text) for node in known.latest(QUOTED_TURNS))


def _quotes_open_calls(known: Conversations, messages: Sequence[Json]) -> bool:
    text = _shown(messages)
    whole = {part.strip() for part in text.split("\0")}
    return any(
        value.strip() in whole or _stands_in(value, text)
        for node in known.latest(QUOTED_TURNS)
        if known.deepest[node.first_key] == node.depth
        for value in _argument_texts(node.reply)
        if value.strip()
    )


def _argument_texts(reply: Json) -> Iterator[str]:
    for call in reply.get("tool_calls", ()):
        arguments = call["function"]["arguments"]
        yield from (v for v in arguments.values() if isinstance(v, str)) if isinstance(arguments, dict) else [arguments]


def _shown(messages: Sequence[Json]) -> str:
    """The texts that the harness put in, apart by NUL."""
    contents = [message["content"] for message in messages if message["role"] != "assistant"]
    parts = [[content] if isinstance(content, str) else [p.get("text", "") for p in content] for content in contents]
    return "\0".join(text for part in parts for text in part)


def _stands_in(quoted: str, text: str) -> bool:
    telling = max(_ESCAPED.split(quoted), key=len).strip()[:LONGEST_QUOTE_CHARS]
    if len(telling) < QUOTE_CHARS:
        return False
    step = PIECE_CHARS + len(telling) - 1  # one search of a huge text would keep the interpreter from the event loop
    return any(text.find(telling, at, at + step) >= 0 for at in range(0, len(text), PIECE_CHARS))
