"""What a harness asks for and does not get, named on every protocol; what it gets anyway is not."""

from __future__ import annotations

from typing import Any

import pytest

from leyden.protocols.fields import FIELDS, FieldClass
from leyden.protocols.wishes import WISHES, label
from leyden.types import Json
from tests.protocols.bodies import VALID
from tests.protocols.test_all_protocols import CALL, NAMES, PROTOCOLS

SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}
ASKED: list[tuple[str, Json, tuple[str, ...]]] = [
    ("openai-chat", {"response_format": SCHEMA}, ("response_format",)),
    ("openai-chat", {"response_format": {"type": "text"}}, ()),
    ("openai-chat", {"tool_choice": "required"}, ("tool_choice",)),
    ("openai-chat", {"tool_choice": {"type": "function", "function": {"name": "bash"}}}, ("tool_choice",)),
    ("openai-chat", {"tool_choice": {"type": "allowed_tools", "mode": "required"}}, ("tool_choice",)),
    ("openai-chat", {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto"}}}, ()),
    ("openai-chat", {"tool_choice": "auto", "parallel_tool_calls": False}, ()),
    ("openai-chat", {"tool_choice": "none"}, ()),
    ("openai-chat", {"reasoning_effort": "high", "verbosity": "low"}, ("reasoning_effort", "verbosity")),
    ("openai-chat", {"enable_thinking": False, "user": "u", "metadata": {"a": "b"}}, ("enable_thinking",)),
    ("openai-chat", {"\x1b[2Jinvented": 1}, ()),
    ("openai-completions", {"response_format": SCHEMA}, ("response_format",)),
    ("openai-responses", {"tool_choice": "required"}, ("tool_choice",)),
    ("openai-responses", {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, ()),
    ("openai-responses", {"reasoning": {"summary": "auto"}, "text": {"format": {"type": "text"}}}, ()),
    ("openai-responses", {"reasoning": {"effort": "high"}, "text": {"verbosity": "low"}}, ("reasoning", "text")),
    ("openai-responses", {"text": {"format": {"type": "json_schema"}}}, ("text",)),
    ("anthropic-messages", {"tool_choice": {"type": "any"}}, ("tool_choice",)),
    ("anthropic-messages", {"tool_choice": {"type": "tool", "name": "bash"}}, ("tool_choice",)),
    ("anthropic-messages", {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, ()),
    ("anthropic-messages", {"thinking": {"type": "adaptive"}}, ()),
    ("anthropic-messages", {"thinking": {"type": "enabled", "budget_tokens": 2000}}, ("thinking",)),
    ("anthropic-messages", {"output_config": {"effort": "low"}}, ("output_config",)),
    ("anthropic-messages", {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, ("tools.web_search",)),
    ("anthropic-messages", {"tools": [{"type": "x_20250305", "name": "x"}]}, ("tools.other",)),
    ("gemini", {"toolConfig": {"functionCallingConfig": {"mode": "ANY"}}}, ("toolConfig",)),
    ("gemini", {"tool_config": {"function_calling_config": {"mode": "any"}}}, ("toolConfig",)),
    ("gemini", {"toolConfig": {"functionCallingConfig": {"mode": "AUTO"}}}, ()),
    ("gemini", {"tools": [{"googleSearch": {}}, {"code_execution": {}}, {"url_context": {}}]},
     ("tools.googleSearch", "tools.codeExecution", "tools.urlContext")),
    ("gemini", {"generationConfig": {"responseMimeType": "text/plain"}}, ()),
    ("gemini", {"generationConfig": {"responseMimeType": "application/json"}}, ("generationConfig.responseMimeType",)),
    ("gemini", {"generationConfig": {"thinkingConfig": {"includeThoughts": True}}}, ()),
    ("gemini", {"generationConfig": {"thinkingConfig": {"thinkingBudget": 0}}}, ("generationConfig.thinkingConfig",)),
]  # fmt: skip


@pytest.mark.parametrize(("protocol", "asked", "unmet"), ASKED)
def test_what_is_not_given_is_named(protocol: str, asked: Json, unmet: tuple[str, ...]) -> None:
    body = {
        name: value for name, value in VALID[protocol].items() if name not in ("tools", "generationConfig", "thinking")
    }
    assert PROTOCOLS[protocol].parse(body | asked, CALL).unmet == unmet


@pytest.mark.parametrize("protocol", NAMES)
def test_what_is_asked_for_has_no_effect_or_has_it_in_part(protocol: str) -> None:
    """None of it is refused or overridden; and whatever is not given is counted as ignored."""
    known: dict[str, Any] = FIELDS[protocol]
    for name in WISHES[protocol]:
        assert known.get(name, FieldClass.IGNORED) in (FieldClass.IGNORED, FieldClass.HONOURED)
        assert label(protocol, name) == name
    assert label(protocol, "invented") == "other"
    assert label(protocol, "tools.invented") == "tools.other"
