"""Custom tools of OpenAI's protocols, whose input is plain text: the model is shown a function of one argument."""

from __future__ import annotations

import re
from typing import Any

from leyden.protocols.chat import Recall
from leyden.protocols.checks import arguments_text
from leyden.types import Json

PARAMETERS: Json = {
    "type": "object",
    "properties": {"input": {"type": "string", "description": "The whole input of the tool, as it is."}},
    "required": ["input"],
}
_CALL_ID = re.compile(r"call_(\d{1,18})_(\d{1,9})")


def custom_function(name: str, description: str | None, form: Json) -> Json:
    """The function that stands for a custom tool. A grammar is put into words: only other sampling could enforce it."""
    grammar = grammar_of(form)
    rule = f"The input follows this grammar ({grammar.get('syntax') or 'lark'}):\n{grammar.get('definition')}"
    texts = [description, rule if grammar else None]
    return {"name": name, "description": "\n\n".join(filter(None, texts)), "parameters": PARAMETERS}


def grammar_of(form: Any) -> Json:
    """`syntax` and `definition` of a format, as chat nests them or as Responses does not; empty for plain text."""
    inner = form.get("grammar", form) if isinstance(form, dict) else None
    return inner if isinstance(inner, dict) and isinstance(inner.get("definition"), str) else {}


def input_of(arguments: str | Json) -> str:
    """The input of a custom tool: the argument of that name if it is all there is, else the arguments as JSON."""
    if isinstance(arguments, dict) and list(arguments) == ["input"] and isinstance(arguments["input"], str):
        return arguments["input"]
    return arguments_text(arguments)


def arguments_of_input(text: str, call_id: Any, recall: Recall) -> str | Json:
    """The arguments that were sampled where the input is made of them, else the input as the one argument."""
    named = _CALL_ID.fullmatch(call_id) if isinstance(call_id, str) else None
    calls = (recall.reply(int(named[1])) or {}).get("tool_calls", []) if named else []
    if named and int(named[2]) < len(calls):
        sampled: str | Json = calls[int(named[2])]["function"]["arguments"]
        if input_of(sampled) == text:
            return sampled
    return {"input": text}
