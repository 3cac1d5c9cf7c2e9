"""What a harness asks for and does not get: of the fields without effect, those that ask for another reply.

`unmet` decides, for every protocol. A value that is met anyway (`response_format: {"type": "text"}`) asks for
nothing. Tools that only a provider's own servers run, content that cannot be shown, and items of a history that are
skipped are named as fields are: `tools.web_search`, `content.document`, `items.compaction`. `label` bounds the names:
anybody may invent them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from leyden.protocols.fields import EVERYWHERE, FIELDS

WISHES: dict[str, frozenset[str]] = {
    "openai-chat": frozenset(
        {
            *("tool_choice", "response_format", "reasoning_effort", "verbosity", "web_search_options"),
            *("chat_template_kwargs", "enable_thinking", "thinking", "thinking_budget", "reasoning", "documents"),
            *("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
            *("min_tokens", "ignore_eos", "stop_token_ids", "bad_words", "allowed_token_ids"),
        }
    ),
    "openai-completions": frozenset(
        {
            *("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice"),
            *("guided_grammar", "min_tokens", "ignore_eos", "stop_token_ids", "bad_words", "allowed_token_ids"),
        }
    ),
    "openai-responses": frozenset(
        {
            "tool_choice",
            "max_tool_calls",
            "text",
            "reasoning",
            "truncation",
            "context_management",
            "chat_template_kwargs",
        }
    ),
    "anthropic-messages": frozenset(
        {
            *("tool_choice", "thinking", "output_config", "output_format", "context_management", "mcp_servers"),
            *("container", "chat_template_kwargs"),
        }
    ),
    "gemini": frozenset(
        {
            "toolConfig",
            *(
                f"generationConfig.{name}"
                for name in (
                    *("responseMimeType", "responseSchema", "responseJsonSchema", "_responseJsonSchema"),
                    *("responseFormat", "thinkingConfig", "speechConfig", "imageConfig", "translationConfig"),
                    *("routingConfig", "modelSelectionConfig", "enableAffectiveDialog", "enableEnhancedCivicAnswers"),
                )
            ),
        }
    ),
}
# Kinds of tools that are not offered to the model, grammars that no input is held to, and content that is not shown.
TOOLS = frozenset(
    {
        *("web_search", "web_search_preview", "web_fetch", "file_search", "code_interpreter", "code_execution"),
        *("image_generation", "computer", "computer_use", "computer_use_preview", "local_shell", "shell", "bash"),
        *("apply_patch", "text_editor", "memory", "mcp", "mcp_toolset", "tool_search", "advisor"),
        *("tool_search_tool_regex", "tool_search_tool_bm25", "programmatic_tool_calling", "googleSearch"),
        *("googleSearchRetrieval", "codeExecution", "urlContext", "googleMaps", "fileSearch", "computerUse"),
        *("enterpriseWebSearch", "mcpServers", "retrieval", "grammar"),
    }
)
CONTENT = frozenset({"document", "file", "audio", "video", "container_upload"})
# Items of a history that say nothing to another model than OpenAI's.
ITEMS = frozenset(
    {
        *(f"{tool}_call" for tool in ("web_search", "file_search", "code_interpreter", "image_generation", "mcp")),
        *(
            f"{tool}_call{end}"
            for tool in ("local_shell", "shell", "apply_patch", "computer")
            for end in ("", "_output")
        ),
        *("tool_search_call", "tool_search_output", "mcp_list_tools", "mcp_approval_request", "mcp_approval_response"),
        *("compaction", "compaction_summary", "compaction_trigger", "additional_tools", "ghost_snapshot"),
        *("program", "program_output"),
    }
)
_KINDS = {"tools": TOOLS, "content": CONTENT, "items": ITEMS}


def _keys(value: Any, *names: str) -> bool:
    """Whether nothing but these keys is set."""
    return isinstance(value, Mapping) and all(name in names for name, item in value.items() if item is not None)


def _plain_text(value: Any) -> bool:
    return _keys(value, "format", "verbosity") and (
        value.get("format") in (None, {"type": "text"}) and value.get("verbosity") in (None, "medium")
    )


_MET: dict[str, Callable[[Any], bool]] = {
    "response_format": lambda value: value == {"type": "text"},
    "verbosity": lambda value: value == "medium",
    "text": _plain_text,
    "reasoning": lambda value: _keys(value, "summary", "generate_summary"),
    "thinking": lambda value: _keys(value, "type", "display") and value.get("type") == "adaptive",
    "truncation": lambda value: value == "disabled",
    "enable_thinking": lambda value: value is True,
    "generationConfig.responseMimeType": lambda value: value == "text/plain",
    "generationConfig.thinkingConfig": lambda value: _keys(value, "includeThoughts", "include_thoughts"),
}


def unmet(protocol: str, given: Mapping[str, Any], ignored: Iterable[str]) -> tuple[str, ...]:
    """Those of the `ignored` names that ask for another reply, by their `label`. `given` are the fields' values."""
    asked = [name for name in ignored if name in WISHES[protocol] or name.partition(".")[0] in _KINDS]
    return tuple(label(protocol, name) for name in asked if name not in _MET or not _MET[name](given.get(name)))


def label(protocol: str, name: str) -> str:
    """The name of an ignored field where it is a known one, else `other`."""
    if name in FIELDS[protocol] or name in EVERYWHERE or name in WISHES[protocol]:
        return name
    group, _, kind = name.partition(".")
    if group in _KINDS:
        return name if kind in _KINDS[group] else f"{group}.other"
    return "other"
