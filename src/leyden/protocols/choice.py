"""Which tools a reply may call. What only needs the reply to be read otherwise is kept: no calls, calls of some tools,
one call at most. That a tool must be called cannot be had without other sampling: `forced` says that it was asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from leyden.protocols.openai_responses_tools import shown_name
from leyden.types import Json


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """`callable_tools` are the tools whose calls may be delivered; None: all."""

    callable_tools: tuple[str, ...] | None = None
    one_call: bool = False
    forced: bool = False


def of_openai(body: Json) -> ToolChoice:
    """`tool_choice` and `parallel_tool_calls` of chat and of Responses."""
    choice, one_call = body.get("tool_choice"), body.get("parallel_tool_calls") is False
    if choice == "none":
        return ToolChoice((), one_call)
    if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
        return ToolChoice(None, one_call, forced=choice not in (None, "auto"))
    inner = choice.get("allowed_tools")
    allowed = inner if isinstance(inner, dict) else choice
    tools = allowed.get("tools")
    return ToolChoice(_names(tools), one_call, forced=allowed.get("mode") == "required")


def of_anthropic(body: Json) -> ToolChoice:
    choice = body.get("tool_choice")
    if not isinstance(choice, dict):
        return ToolChoice(forced=choice is not None)
    kind, one_call = choice.get("type"), choice.get("disable_parallel_tool_use") is True
    return ToolChoice(() if kind == "none" else None, one_call, forced=kind not in ("auto", "none"))


def of_gemini(calling: Json) -> ToolChoice:
    """`functionCallingConfig`, with its names in camelCase."""
    mode = str(calling.get("mode") or "AUTO").upper()
    if mode == "NONE":
        return ToolChoice(())
    names = calling.get("allowedFunctionNames")
    named = tuple(name for name in names if isinstance(name, str)) if isinstance(names, list) else ()
    return ToolChoice(named or None, forced=mode not in ("AUTO", "VALIDATED", "MODE_UNSPECIFIED"))


def _names(tools: Any) -> tuple[str, ...]:
    """The names of `{"name"}`, of `{"function": {"name"}}` and of `{"custom": {"name"}}`."""
    kept = [tool for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []
    inner = [next((tool[k] for k in ("function", "custom") if isinstance(tool.get(k), dict)), tool) for tool in kept]
    return tuple(shown_name(tool["name"], tool.get("namespace")) for tool in inner if isinstance(tool.get("name"), str))
