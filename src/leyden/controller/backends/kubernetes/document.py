"""A template of a Kubernetes object and its values -> the object. Pure.

    text ── render ──▶ YAML with a mark for each value printed ── parse ──▶ tree ── put the values in ──▶ complete

A value never meets the YAML parser: it replaces its mark in the parsed tree, so that no value can become structure,
whatever quotes the template puts around it. A mark that is a whole scalar keeps its value's type; in the middle of
a text, and as the value of an environment variable, it becomes text; as a key it is refused. Lists and mappings are
printed by `| structure` only. Where Kubernetes expands `$(NAME)` (in commands, arguments and environment), only one
that stands whole in the template is a reference; any other `$` is doubled.

YAML is read as kubectl reads it: 1.1, but dates, `1:30` and `.nan` are text, and so is every key.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml
from jinja2 import Undefined, UndefinedError

from leyden.controller.backends.kubernetes.objects import Object
from leyden.controller.templates import render_strictly
from leyden.errors import LaunchError

_EXPANDED = ("command", "args", "subPathExpr")
_TAG = "tag:yaml.org,2002:"


def render_document(template: str, known: Mapping[str, Any]) -> Object:
    """A template as a tree with its values in place. Raises LaunchError."""
    nonce = secrets.token_hex(8)
    values: list[Any] = []
    mark = re.compile(rf"LEYDEN{nonce}N(\d+)E")

    def readable(text: str) -> str:
        return mark.sub(lambda m: str(values[int(m[1])])[:100], text)

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
        tree = yaml.load(text, _KubectlLoader)  # noqa: S506  (a SafeLoader)
    except (yaml.YAMLError, RecursionError) as error:
        raise LaunchError(f"kubernetes.template is not YAML: {readable(str(error))}") from None
    document = _Filled(mark, values).fill(tree, ())
    try:
        broken = nonce in json.dumps(document, allow_nan=False)
    except ValueError as error:
        raise LaunchError(f"kubernetes.template: {error}") from None
    if broken:  # "\\{{ value }}": the backslash and the mark's first letter are a character of YAML
        raise LaunchError("kubernetes.template: a backslash stands before a printed value in double quotes; write two")
    if not isinstance(document, dict):
        raise LaunchError(f"kubernetes.template holds {type(document).__name__}, not a Job")
    return document


@dataclass(frozen=True, slots=True)
class _Structure:
    value: Any


class _KubectlLoader(yaml.SafeLoader):
    """What JSON can hold, each refusal with its line. No aliases, which can grow without bound, and no key twice."""

    yaml_constructors = {  # noqa: RUF012
        tag: make
        for tag, make in yaml.SafeLoader.yaml_constructors.items()
        if tag is None or tag.removeprefix(_TAG) in ("null", "bool", "int", "float", "str", "seq", "map")
    }
    yaml_implicit_resolvers = {  # noqa: RUF012
        first: [(tag, form) for tag, form in forms if tag.removeprefix(_TAG) in ("null", "bool", "merge")]
        for first, forms in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = self.get_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.MarkedYAMLError(problem="aliases are refused; write it out", problem_mark=mark)
        return super().compose_node(parent, index)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, KeyError, TypeError, OverflowError):
            what = f"{str(node.value)[:100]!r} is no {node.tag.removeprefix(_TAG)}"
            raise yaml.MarkedYAMLError(problem=what, problem_mark=node.start_mark) from None

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(problem="a key is no text", problem_mark=key.start_mark)
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"key {key.value!r} is given twice", problem_mark=key.start_mark)
            seen.add(key.value)
        self.flatten_mapping(node)
        return {key.value: self.construct_object(value, deep=True) for key, value in node.value}


_KubectlLoader.add_implicit_resolver(
    f"{_TAG}int", re.compile(r"[-+]?(0b[01_]+|0x[0-9a-fA-F_]+|0[0-7_]*|[1-9][0-9_]*)\Z"), list("-+0123456789")
)
_KubectlLoader.add_implicit_resolver(
    f"{_TAG}float",
    re.compile(r"[-+]?([0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)([eE][-+]?[0-9]+)?\Z"),
    list("-+.0123456789"),
)


@dataclass(frozen=True, slots=True)
class _Filled:
    """Puts values in the place of their marks."""

    mark: re.Pattern[str]
    values: Sequence[Any]

    def fill(self, node: Any, path: tuple[str | int, ...]) -> Any:
        if isinstance(node, dict):
            return {self._key(key): self.fill(value, (*path, key)) for key, value in node.items()}
        if isinstance(node, list):
            return [self.fill(value, (*path, i)) for i, value in enumerate(node)]
        if not isinstance(node, str):
            return node
        whole = self.mark.fullmatch(node)
        if whole and not _is_env_value(path):
            return _only_a_value(self.values[int(whole[1])], path)
        return self._text(node, path)

    def _key(self, key: str) -> str:
        if found := self.mark.search(key):
            value = str(self.values[int(found[1])])
            raise LaunchError(f"kubernetes.template: {value[:100]!r} is printed as a key; a key stands in the template")
        return key

    def _text(self, text: str, path: tuple[str | int, ...]) -> str:
        """The template's own parts and values in turn."""
        parts = self.mark.split(text)
        if len(parts) == 1 or not _is_expanded(path):
            return self.mark.sub(lambda m: str(self.values[int(m[1])]), text)
        own = [_whole_references(part) for part in parts[::2]]
        given = [unexpanded(str(self.values[int(i)])) for i in parts[1::2]]
        return "".join(a + b for a, b in zip(own, [*given, ""], strict=True))


def _only_a_value(value: Any, path: tuple[str | int, ...]) -> Any:
    if isinstance(value, str):
        return unexpanded(value) if _is_expanded(path) else value
    if isinstance(value, list | tuple):
        return [_only_a_value(v, (*path, i)) for i, v in enumerate(value)]
    if isinstance(value, dict):
        return {str(k): _only_a_value(v, (*path, str(k))) for k, v in value.items()}
    return value


def unexpanded(text: str) -> str:
    return text.replace("$", "$$")


def _whole_references(text: str) -> str:
    """`$(A)` and `$$` as they are; a `$` of which neither is made, alone or with a value after it, is one for good."""
    return re.sub(r"\$\$|\$\([^)]*\)|\$", lambda m: m[0] if len(m[0]) > 1 else "$$", text)


def _is_env_value(path: tuple[str | int, ...]) -> bool:
    return len(path) >= 3 and path[-1] == "value" and path[-3] == "env"


def _is_expanded(path: tuple[str | int, ...]) -> bool:
    return _is_env_value(path) or any(part in _EXPANDED for part in path[-2:])
