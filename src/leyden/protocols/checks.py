"""Reading fields of an untrusted body: the value, or a RequestError that names the field and what to send."""

from __future__ import annotations

from typing import Any

import orjson

from leyden.errors import RequestError
from leyden.types import Json

_NAMES: dict[Any, str] = {str: "a string", bool: "true or false", list: "a list", dict: "an object"}


def field(body: Json, name: str, kind: type, *, required: bool = False, path: str = "") -> Any:
    """`body[name]` if it is of `kind`, None if it is missing or null and not `required`. `path` is where `body` is."""
    value = body.get(name)
    where = f"{path}.{name}" if path else name
    if value is None:
        if required:
            raise RequestError(f"{where} is missing", param=where, code="missing_required_parameter")
        return None
    if not isinstance(value, kind):
        raise RequestError(f"{where} is {kind_of(value)}; send {_NAMES[kind]}", param=where, code="invalid_type")
    return value


def objects(body: Json, name: str, *, required: bool = False, path: str = "") -> list[tuple[str, Json]]:
    """The objects of the list `body[name]`, each with its path for error messages; empty if it is missing."""
    where = f"{path}.{name}" if path else name
    items = field(body, name, list, required=required, path=path) or []
    for index, item in enumerate(items):
        if not isinstance(item, dict):
            raise RequestError(f"{where}[{index}] is {kind_of(item)}, not an object", param=f"{where}[{index}]")
    return [(f"{where}[{index}]", item) for index, item in enumerate(items)]


def number(body: Json, name: str, low: float, high: float, *, path: str = "") -> float | None:
    value = body.get(name)
    where = f"{path}.{name}" if path else name
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
    value = body.get(name)
    where = f"{path}.{name}" if path else name
    if value is None:
        if required:
            raise RequestError(f"{where} is missing", param=where, code="missing_required_parameter")
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


def arguments_of(arguments: Any) -> Any:
    """The object that a JSON string of tool-call arguments holds; anything else as it is."""
    if not isinstance(arguments, str):
        return arguments
    try:
        value = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return arguments
    return value if isinstance(value, dict) else arguments


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
