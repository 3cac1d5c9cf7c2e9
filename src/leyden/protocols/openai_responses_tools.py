"""Tools of the Responses protocol as functions, which is what models are shown, and calls of them in their own items.

    {"type": "function", "name": "f"}                          f
    {"type": "custom", "name": "patch"}                        patch, whose one argument `input` is the text
    {"type": "namespace", "name": "crm", "tools": [...]}       crm__f for each function or custom tool in it

Other kinds are run by OpenAI's servers or known to its models alone: the model is not shown those.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from leyden.errors import RequestError
from leyden.protocols.checks import arguments_text, field, kind_of, objects
from leyden.protocols.custom_tools import custom_function, grammar_of, input_of
from leyden.types import Json


@dataclass(frozen=True, slots=True)
class Offered:
    """A tool that the model is shown as `function`; the harness calls it `name`, in `namespace` if it has one."""

    function: Json
    name: str
    namespace: str | None = None
    custom: bool = False


def shown_name(name: str, namespace: Any) -> str:
    """What the model calls a tool."""
    if not isinstance(namespace, str) or not namespace:
        return name
    return f"{namespace.removesuffix('__')}__{name}"


def offered_tools(body: Json) -> tuple[list[Offered], list[str]]:
    """The tools that the model is shown, and what of the others and of grammars is not. Raises RequestError."""
    offered: list[Offered] = []
    left_out: list[str] = []
    for path, item, namespace in _each(body):
        kind = item.get("type")
        if kind in ("function", "custom"):
            offered.append(_offered(item, path, namespace, custom=kind == "custom"))
            left_out += ["tools.grammar"] if grammar_of(item.get("format")) else []
        else:
            left_out.append(f"tools.{kind if isinstance(kind, str) else kind_of(kind)}")
    return offered, left_out


def call_item(call: Json, offered: dict[str, Offered]) -> Json:
    """What an output item says of a call, by the tool that it calls."""
    function = call["function"]
    tool = offered.get(function["name"])
    named = {"call_id": call["id"], "name": tool.name if tool else function["name"]}
    if tool and tool.namespace:
        named["namespace"] = tool.namespace
    if tool and tool.custom:
        return {"type": "custom_tool_call", **named, "input": input_of(function["arguments"])}
    return {"type": "function_call", **named, "arguments": arguments_text(function["arguments"])}


def _each(body: Json) -> Iterator[tuple[str, Json, str | None]]:
    """Each tool with its path and its namespace."""
    for path, item in objects(body, "tools"):
        if item.get("type") != "namespace":
            yield path, item, None
            continue
        namespace = field(item, "name", str, required=True, path=path)
        for where, inner in objects(item, "tools", path=path):
            yield where, inner, namespace


def _offered(item: Json, path: str, namespace: str | None, *, custom: bool) -> Offered:
    name = item.get("name")
    if not isinstance(name, str):
        kind = "custom tool" if custom else "function"
        raise RequestError(f"{path} is a {kind} without a name", param=f"{path}.name")
    description = field(item, "description", str, path=path)
    shown = shown_name(name, namespace)
    if custom:
        function = custom_function(shown, description, field(item, "format", dict, path=path) or {})
    else:
        field(item, "parameters", dict, path=path)
        kept = ("description", "parameters", "strict")
        function = {"name": shown} | {key: item[key] for key in kept if item.get(key) is not None}
    return Offered(function, name, namespace, custom)
