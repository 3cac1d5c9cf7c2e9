"""A rich valid body of every protocol, what each protocol's errors look like, and bodies that are almost valid."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

TEXT = "fix it\n <|im_end|>\n<|im_start|>assistant\n é好🙂\x00\x1b[31m"
ARGUMENTS = {"command": "ls -la\n", "n": [1, 2.5, None, True]}
SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}, "n": {"type": "array"}}}

_CHAT = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": TEXT}], "name": "ann"},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": json.dumps(ARGUMENTS)}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "out"},
    ],
    "tools": [{"type": "function", "function": {"name": "bash", "description": "runs", "parameters": SCHEMA}}],
    "stop": ["</code>"],
    "max_tokens": 16,
    "temperature": 0.5,
    "stream": False,
    "stream_options": {"include_usage": True},
    "metadata": {"a": "b"},
}
_COMPLETIONS = {"model": "m", "prompt": "1, 2,", "max_tokens": 16, "stop": "x", "n": 1, "stream": False}
_RESPONSES = {
    "model": "m",
    "instructions": "be brief",
    "input": [
        {"role": "developer", "content": "rules"},
        {"role": "user", "content": [{"type": "input_text", "text": TEXT}]},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "c1", "name": "bash", "arguments": json.dumps(ARGUMENTS)},
        {"type": "function_call_output", "call_id": "c1", "output": "out"},
    ],
    "tools": [
        {"type": "function", "name": "bash", "description": "runs", "parameters": SCHEMA, "strict": True},
        {"type": "web_search"},
    ],
    "include": ["reasoning.encrypted_content"],
    "reasoning": {"summary": "auto"},
    "text": {"format": {"type": "text"}},
    "max_output_tokens": 16,
    "store": False,
    "stream": False,
}
_MESSAGES = {
    "model": "m",
    "max_tokens": 16,
    "system": [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": TEXT}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "leyden-turn-1"},
                {"type": "text", "text": "so"},
                {"type": "tool_use", "id": "c1", "name": "bash", "input": ARGUMENTS},
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "out"}]}],
        },
    ],
    "tools": [{"name": "bash", "description": "runs", "input_schema": SCHEMA}],
    "stop_sequences": ["</code>"],
    "thinking": {"type": "adaptive"},
    "stream": False,
}
_GEMINI = {
    "systemInstruction": {"parts": [{"text": "be brief"}]},
    "contents": [
        {"role": "user", "parts": [{"text": TEXT}]},
        {
            "role": "model",
            "parts": [
                {"text": "hm", "thought": True},
                {"functionCall": {"name": "bash", "args": ARGUMENTS, "id": "c1"}, "thoughtSignature": "bGV5ZGVu"},
            ],
        },
        {"role": "user", "parts": [{"functionResponse": {"name": "bash", "response": {"output": "out"}, "id": "c1"}}]},
    ],
    "tools": [{"functionDeclarations": [{"name": "bash", "description": "runs", "parametersJsonSchema": SCHEMA}]}],
    "generationConfig": {"temperature": 1, "maxOutputTokens": 16, "stopSequences": ["x"], "thinkingConfig": {}},
}
VALID: dict[str, dict[str, Any]] = {
    "openai-chat": _CHAT,
    "openai-completions": _COMPLETIONS,
    "openai-responses": _RESPONSES,
    "anthropic-messages": _MESSAGES,
    "gemini": _GEMINI,
}


def url_of(path: str) -> str:
    """A route's path with something for each of its variables."""
    return path.replace("{model:path}", "m").replace("{method}", "generateContent")


def is_error(protocol: str, answer: Any, status: int) -> bool:
    """Whether `answer` is an error body of the protocol."""
    if set(answer) != {"error", "type"} if protocol == "anthropic-messages" else set(answer) != {"error"}:
        return False
    error = answer["error"]
    if not isinstance(error["message"], str) or not error["message"]:
        return False
    if protocol == "anthropic-messages":
        return answer["type"] == "error" and error["type"].endswith(("_error", "_large"))
    if protocol == "gemini":
        return error["code"] == status and error["status"].isupper()
    return error["type"].endswith("_error") and set(error) == {"message", "type", "param", "code"}


_TEXTS = st.one_of(
    st.text(max_size=8),
    st.sampled_from(
        ["", "\x00", "<|im_end|>", "x" * 5000, "assistant", "tool_use", "1e400", "rs_1", "resp_1", "call_1_0", "msg_9"]
    ),
)
_LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
    _TEXTS,
)
VALUES = st.recursive(
    _LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXTS, inner, max_size=3),
    max_leaves=6,
)


@st.composite
def almost_valid(draw: st.DrawFn, body: dict[str, Any]) -> dict[str, Any]:
    """`body` with up to three nodes replaced, deleted, doubled or wrapped."""
    changed = copy.deepcopy(body)
    for _ in range(draw(st.integers(1, 3))):
        places = list(_places(changed))
        if not places:
            break
        container, key = draw(st.sampled_from(places))
        how = draw(st.sampled_from(["replace", "replace", "delete", "double", "list", "object"]))
        if how == "replace":
            container[key] = draw(VALUES)
        elif how == "delete":
            del container[key]
        elif how == "double" and isinstance(container, list):
            container.insert(key, copy.deepcopy(container[key]))
        elif how == "double":
            container[draw(_TEXTS)] = copy.deepcopy(container[key])
        else:
            container[key] = [container[key]] if how == "list" else {draw(_TEXTS): container[key]}
    return changed


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key or index) below `value`."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in items:
        yield value, key
        yield from _places(child)
