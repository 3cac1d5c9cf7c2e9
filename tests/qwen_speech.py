"""What models of the Qwen families sample, as text: reasoning, words and tool calls in each family's own form."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

Calls = Sequence[tuple[str, Mapping[str, Any] | str]]


def said(family: str, text: str = "", *, reasoning: str | None = None, calls: Calls = ()) -> str:
    """Without the stop token. Arguments given as text stand as they are. Qwen3.5's prompt has opened the reasoning."""
    if family == "qwen3.5":
        spoken = f"{reasoning or ''}\n</think>\n\n{text}"
        return "\n\n".join(filter(None, [spoken, "\n".join(_tagged(*call) for call in calls)]))
    spoken = text if reasoning is None else f"<think>\n{reasoning}\n</think>\n\n{text}"
    return "\n".join(filter(None, [spoken, *(_json(*call) for call in calls)]))


def _json(name: str, arguments: Mapping[str, Any] | str) -> str:
    values = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return f'<tool_call>\n{{"name": "{name}", "arguments": {values}}}\n</tool_call>'


def _tagged(name: str, arguments: Mapping[str, Any] | str) -> str:
    values = json.loads(arguments) if isinstance(arguments, str) else arguments
    parameters = "".join(
        f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n"
        for key, value in values.items()
    )
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"
