"""Reading an untrusted body: the value, or a RequestError that names the field and what to send.

JSON as it comes (`loads`): numbers beyond 64 bits are floats, of equal keys the last counts, NaN, Infinity and numbers
beyond a double are errors. Two things that orjson refuses or cannot write again are Leyden's own:

- An escaped half of a surrogate pair, as of an emoji that a harness cut in two, becomes U+FFFD: a 400 would end an
  agent for the way its tools cut text.
- More than `MAX_DEPTH` levels are refused, so that whatever is read can also be written with something around it.

What a body may hold is bounded, since a reader stops for nobody: at most `MAX_VALUES` values, `MAX_CONTAINERS` lists,
objects and fields, counted before they are made. Text inside text (a tool call's arguments) has the same bounds.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

import orjson

from leyden.errors import RequestError
from leyden.types import Json

MAX_DEPTH = 200
MAX_VALUES = 1_000_000  # a prompt may be so many token ids
MAX_CONTAINERS = 200_000
MAX_ARGUMENTS = 1_000_000  # characters of arguments that are read as JSON; longer ones stay text
_PIECE_BYTES = 64 * 1024
_WRITABLE_DEPTH = 254  # orjson's own limit

# A pair of backslashes is an escaped one, and what follows it is text.
_SURROGATES = re.compile(
    r"\\\\|\\u[dD][89abAB][0-9a-fA-F]{2}(?:\\u[dD][c-fC-F][0-9a-fA-F]{2})?|\\u[dD][c-fC-F][0-9a-fA-F]{2}"
)
_PAIR_CHARS = len(r"\ud83d\ude42")
_LONG_INTEGER = re.compile(r"\d{19}")
LONGEST_INTEGER = 30  # digits; more are certainly too many

_NAMES: dict[Any, str] = {str: "a string", bool: "true or false", list: "a list", dict: "an object"}


def loads(text: str | bytes) -> tuple[Any, int]:
    """The value of a JSON text, and how many halves of surrogate pairs it had, each now U+FFFD.

    Raises ValueError that says what is wrong with it.
    """
    _check_size(text)
    halves = 0
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        whole, halves = _without_halves(text)
        if not halves:
            raise
        value = orjson.loads(whole)
    if _opened(text) > MAX_DEPTH and _too_deep(value):
        raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
    return value, halves


def field(body: Json, name: str, kind: type, *, required: bool = False, path: str = "") -> Any:
    """`body[name]` if it is of `kind`, None if it is missing or null and not `required`. `path` is where `body` is."""
    value, where = _given(body, name, path, required=required)
    if value is not None and not isinstance(value, kind):
        raise RequestError(f"{where} is {kind_of(value)}; send {_NAMES[kind]}", param=where, code="invalid_type")
    return value


def _given(body: Json, name: str, path: str, *, required: bool) -> tuple[Any, str]:
    """The value, None for a missing one, and the words for where it stands."""
    value, where = body.get(name), f"{path}.{name}" if path else name
    if value is None and required:
        raise RequestError(f"{where} is missing", param=where, code="missing_required_parameter")
    return value, where


def objects(body: Json, name: str, *, required: bool = False, path: str = "") -> list[tuple[str, Json]]:
    """The objects of the list `body[name]`, each with its path for error messages; empty if it is missing."""
    where = f"{path}.{name}" if path else name
    items = field(body, name, list, required=required, path=path) or []
    for index, item in enumerate(items):
        if not isinstance(item, dict):
            raise RequestError(f"{where}[{index}] is {kind_of(item)}, not an object", param=f"{where}[{index}]")
    return [(f"{where}[{index}]", item) for index, item in enumerate(items)]


def number(body: Json, name: str, low: float, high: float, *, path: str = "") -> float | None:
    value, where = _given(body, name, path, required=False)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(f"{where} is {kind_of(value)}; send a number", param=where, code="invalid_type")
    if not low <= value <= high:
        raise RequestError(f"{where} is {value}; allowed is {low} to {high}", param=where, code="invalid_value")
    return float(value)


def integer(
    body: Json, name: str, low: int = -(2**63), high: int = 2**63 - 1, *, path: str = "", required: bool = False
) -> int | None:
    value, where = _given(body, name, path, required=required)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{where} is {kind_of(value)}; send an integer", param=where, code="invalid_type")
    if not low <= value <= high:
        raise RequestError(f"{where} is {value}; allowed is {low} to {high}", param=where, code="invalid_value")
    return value


def stop_strings(body: Json, name: str) -> tuple[str, ...]:
    """A string or a list of strings, none of them empty."""
    stop = body.get(name)
    strings = [stop] if isinstance(stop, str) else [] if stop is None else stop
    if not isinstance(strings, list) or not all(isinstance(s, str) and s for s in strings):
        raise RequestError(f"{name} is {stop!r:.80}; send a string or a list of non-empty strings", param=name)
    return tuple(strings)


def arguments_of(arguments: Any, path: str = "arguments") -> str | Json:
    """Tool-call arguments as messages hold them: the object that a JSON string holds, {} for none.

    A string stays what it is where the object would lose something: integers beyond 64 bits, more than `MAX_DEPTH`
    levels; and where it is longer than `MAX_ARGUMENTS`. Raises RequestError, with `path`, for what is neither a string
    nor an object.
    """
    if arguments is None or arguments == "":
        return {}
    if isinstance(arguments, dict):
        return arguments
    if not isinstance(arguments, str):
        raise RequestError(f"{path} is {kind_of(arguments)}; send a string", param=path, code="invalid_type")
    if len(arguments) > MAX_ARGUMENTS:
        return arguments
    try:
        value, _ = loads(arguments)
    except ValueError:
        return arguments
    exact = isinstance(value, dict) and big_integer(arguments) is None
    return value if exact else arguments


def sampled_arguments(arguments: Any) -> str | Json:
    """Arguments that Python's json read from a model's words, as `arguments_of` reads them when they come back.

    Raises ValueError where they have no JSON text.
    """
    if isinstance(arguments, str):
        return arguments_of(arguments)
    try:
        return arguments_of(json.dumps(arguments or {}))
    except (TypeError, RecursionError) as error:
        raise ValueError("the arguments have no JSON text") from error


def sampled_object(arguments: Any) -> str | Json | None:
    """Sampled arguments, or the text of theirs, if they are an object that every protocol can carry; else None."""
    if not isinstance(arguments, str | dict) or arguments == "":
        return None
    try:
        kept = sampled_arguments(arguments)
        arguments_object(kept)
    except ValueError:
        return None
    return kept


def arguments_object(arguments: str | Json) -> Json:
    """Sampled arguments for protocols that carry an object: long integers are doubles there, NaN and its like null, as
    JavaScript has them. Raises ValueError for what is no such object.
    """
    if isinstance(arguments, dict):
        return arguments
    try:
        value, _ = loads(arguments)
    except ValueError:
        value = json.loads(arguments, parse_constant=lambda _name: None, parse_float=_finite)
        if _too_deep(value):
            raise
    if not isinstance(value, dict):
        raise ValueError("the arguments are no object")
    return value


def arguments_text(arguments: Any) -> str:
    """Tool-call arguments as the JSON string that wire protocols carry."""
    return arguments if isinstance(arguments, str) else orjson.dumps(arguments).decode()


def kind_of(value: Any) -> str:
    """The JSON type of a value, in words."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    return {int: "a number", float: "a number", str: "a string", list: "a list", dict: "an object"}[type(value)]


def _check_size(text: str | bytes) -> None:
    """Raise ValueError for a JSON text of too many values. A piece at a time, so that other threads get their turn."""
    if len(text) <= MAX_CONTAINERS:
        return
    data = memoryview(text.encode() if isinstance(text, str) else text)
    values, containers = 1, 0
    inside, rest = False, b""
    for start in range(0, len(data), _PIECE_BYTES):
        piece = (rest + data[start : start + _PIECE_BYTES]).replace(rb"\\", b"")
        rest = b"\\" if piece.endswith(b"\\") else b""
        parts = piece.removesuffix(rest).replace(rb"\"", b"").split(b'"')
        between = b" ".join(parts[inside::2])
        inside ^= len(parts) % 2 == 0
        containers += between.count(b"[") + between.count(b"{") + between.count(b":")
        values += between.count(b",")
        if containers > MAX_CONTAINERS:
            raise ValueError(f"more than {MAX_CONTAINERS} lists, objects and fields")
        if values > MAX_VALUES:
            raise ValueError(f"more than {MAX_VALUES} values")


def _without_halves(text: str | bytes) -> tuple[str, int]:
    """`text` with each escaped half of a surrogate pair replaced by U+FFFD, and how many there were."""
    halves = 0

    def whole(match: re.Match[str]) -> str:
        nonlocal halves
        escape = match.group()
        if escape == r"\\" or len(escape) == _PAIR_CHARS:
            return escape
        halves += 1
        return r"\ufffd"

    try:
        decoded = text.decode() if isinstance(text, bytes) else text
    except UnicodeDecodeError:
        return "", 0
    return _SURROGATES.sub(whole, decoded), halves


def _opened(text: str | bytes) -> int:
    """How many brackets a text opens: it nests no deeper, and most never come near the limit."""
    if isinstance(text, str):
        return text.count("[") + text.count("{")
    return text.count(b"[") + text.count(b"{")


def _too_deep(value: Any) -> bool:
    for _ in range(_WRITABLE_DEPTH - MAX_DEPTH):
        value = [value]
    try:
        orjson.dumps(value)
    except orjson.JSONEncodeError:
        return True
    return False


def _finite(digits: str) -> float | None:
    value = float(digits)
    return value if math.isfinite(value) else None


def big_integer(text: str | bytes) -> str | None:
    """The first integer in a JSON text that 64 bits do not hold: it would be read as a float. None if there is none."""
    if not _LONG_INTEGER.search(text if isinstance(text, str) else text.decode("utf-8", "replace")):
        return None
    found: list[str] = []

    def read(digits: str) -> int:
        if len(digits) > LONGEST_INTEGER or not -(2**63) <= int(digits) < 2**64:
            found.append(digits)
        return 0

    json.loads(text, parse_int=read)
    return found[0] if found else None
