"""A template of a Kubernetes object and its values -> the object. Pure.

    text ── render ──▶ YAML with a mark for each value printed ── parse ──▶ tree ── put the values in ──▶ complete

A value never meets the YAML parser: it replaces its mark in the parsed tree, so that no value can become structure,
whatever quotes the template puts around it. A mark that is a whole scalar keeps its value's type; in the middle of
a text, and as the value of an environment variable, it becomes text. Lists and mappings are printed by
`| structure` only. `$` is doubled where Kubernetes would expand `$(NAME)`: in commands, arguments and environment.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml
from jinja2 import Undefined, UndefinedError

from leyden.controller.backends.kubernetes.objects import Object
from leyden.controller.templates import render_strictly
from leyden.errors import LaunchError

_EXPANDED = ("command", "args")


def render_document(template: str, known: Mapping[str, Any]) -> Object:
    """A template as a tree with its values in place. Raises LaunchError."""
    nonce = secrets.token_hex(8)
    values: list[Any] = []
    mark = re.compile(rf"LEYDEN{nonce}N(\d+)E")

    def note(value: Any) -> Any:
        if isinstance(value, str):
            value = mark.sub(lambda m: str(values[int(m[1])]), value)
        elif isinstance(value, list | tuple | dict):
            raise LaunchError(f"kubernetes.template: {value!r:.200} is not a scalar; print it with | structure")
        elif isinstance(value, Undefined):
            str(value)  # raises
        values.append(value.value if isinstance(value, _Structure) else value)
        return f"LEYDEN{nonce}N{len(values) - 1}E"

    try:
        text = render_strictly("kubernetes.template", template, known, note, {"structure": _Structure})
    except UndefinedError as error:
        raise LaunchError(f"kubernetes.template: {error.message}; known are {', '.join(sorted(known))}") from None
    try:
        tree = yaml.load(text, _Loader)  # noqa: S506  (a SafeLoader)
    except yaml.YAMLError as error:
        readable = mark.sub(lambda m: str(values[int(m[1])])[:100], str(error))
        raise LaunchError(f"kubernetes.template is not YAML: {readable}") from None
    document = _put_in(tree, (), mark, values)
    if nonce in json.dumps(document).lower():
        raise LaunchError("kubernetes.template: a {% filter %} block changes a printed value; use | on the value")
    if not isinstance(document, dict):
        raise LaunchError(f"kubernetes.template holds {type(document).__name__}, not a Job")
    return document


@dataclass(frozen=True, slots=True)
class _Structure:
    value: Any


class _Loader(yaml.SafeLoader):
    """No aliases, which can grow without bound, and no key twice."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases are refused; write it out")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        for twice in (k for k in keys if keys.count(k) > 1):
            raise yaml.YAMLError(f"key {twice!r} is given twice:{node.start_mark}")
        return super().construct_mapping(node, deep)


def _put_in(node: Any, path: tuple[str | int, ...], mark: re.Pattern[str], values: Sequence[Any]) -> Any:
    if isinstance(node, dict):
        return {
            str(_put_in(key, (), mark, values)): _put_in(value, (*path, str(key)), mark, values)
            for key, value in node.items()
        }
    if isinstance(node, list):
        return [_put_in(value, (*path, i), mark, values) for i, value in enumerate(node)]
    if not isinstance(node, str):
        return node
    plain = _is_env_value(path)
    literal: Callable[[str], str] = unexpanded if plain or _is_expanded(path) else str
    whole = mark.fullmatch(node)
    if whole and not plain:
        return _each_text(values[int(whole[1])], literal)
    return mark.sub(lambda m: literal(str(values[int(m[1])])), node)


def _each_text(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list | tuple):
        return [_each_text(v, change) for v in value]
    if isinstance(value, dict):
        return {k: _each_text(v, change) for k, v in value.items()}
    return value


def unexpanded(text: str) -> str:
    return text.replace("$", "$$")


def _is_env_value(path: tuple[str | int, ...]) -> bool:
    return len(path) >= 3 and path[-1] == "value" and path[-3] == "env"


def _is_expanded(path: tuple[str | int, ...]) -> bool:
    return any(part in _EXPANDED for part in path[-2:])
