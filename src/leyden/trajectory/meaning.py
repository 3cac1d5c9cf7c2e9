"""When do two messages mean the same? Harnesses resend their history re-encoded; the model's words are the same.

Equal are: tool-call arguments as text or object, spaced, escaped and ordered in any way, numbers as JavaScript writes
them (1.0 is 1; an integer beyond 2**53 is its double); an assistant message's text and reasoning with other blanks
around them; ids of tool calls, which harnesses rename. Everything else counts. Protocols have read the rest away
before: where reasoning stands, content as parts, null content, `cache_control`.

A conversation is known by a chain of digests: `prefix_keys(messages)[i]` stands for the first i messages.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from typing import Any

import orjson

from leyden.types import Json

EXACT_INTEGERS = 2**53
KEY_BYTES = 16
LONGEST_READ = 1_000_000  # characters; longer arguments are compared as they are


def message_key(message: Json, *, reasoning: bool = True) -> bytes:
    """Canonical bytes of one message. `reasoning=False` leaves the reasoning out of the comparison."""
    role, content = message["role"], message["content"]
    if role != "assistant":
        return _bytes(role, content)
    calls = message.get("tool_calls")
    thought = message.get("reasoning_content", "").strip() if reasoning else ""
    if isinstance(content, str):
        content = content.strip()
    if not calls and not thought:
        return _bytes(role, content)
    return orjson.dumps([role, content, thought, [_call(call) for call in calls or ()]], option=orjson.OPT_SORT_KEYS)


def extend_key(key: bytes, message: Json) -> bytes:
    return hashlib.sha256(key + message_key(message)).digest()[:KEY_BYTES]


def prefix_keys(messages: Sequence[Json]) -> list[bytes]:
    """`keys[i]` is the digest of the first i messages, so one more key than messages."""
    keys = [b""]
    for message in messages:
        keys.append(extend_key(keys[-1], message))
    return keys


def _bytes(role: str, content: Any) -> bytes:
    if isinstance(content, str):
        return f"{role}\0{content}".encode()
    return orjson.dumps([role, content], option=orjson.OPT_SORT_KEYS)


def _call(call: Json) -> list[Any]:
    function = call["function"]
    return [function["name"], _arguments(function["arguments"])]


def _arguments(arguments: Any) -> Any:
    """Text is what a protocol left as it came: no JSON, or numbers or levels that its object would not hold."""
    if not isinstance(arguments, str):
        return _plain(arguments)
    if len(arguments) > LONGEST_READ:
        return arguments
    try:
        value = _plain(json.loads(arguments))
        orjson.dumps([[[value]]])
    except (ValueError, TypeError, RecursionError):
        return arguments
    return value


def _plain(value: Any) -> Any:
    """A JSON value with each number as JavaScript has it: a double, written as an integer where it is one."""
    kind = type(value)
    if kind is dict:
        return {name: _plain(item) for name, item in value.items()}
    if kind is list:
        return [_plain(item) for item in value]
    return _number(value) if kind in (int, float) else value


def _number(value: float) -> float | None:
    """As JavaScript writes it: null for what is no finite double."""
    if isinstance(value, int) and -EXACT_INTEGERS <= value <= EXACT_INTEGERS:
        return value
    try:
        double = float(value)
    except OverflowError:
        return None
    if not math.isfinite(double):
        return None
    return int(double) if abs(double) <= EXACT_INTEGERS and double.is_integer() else double
