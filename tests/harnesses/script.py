"""What the scripted model says: from the text of a rendered Qwen3 prompt to the text of a reply. Pure.

A conversation with tools has three replies: reasoning, text and one call; two calls at once; the end, in the way that
the harness needs. A conversation of a tool-using harness that offers no tools is a side call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]

LINES = ["one café", "three", "two"]
END = "All said hi."
TITLE = '{"title": "Say hi"}'
REASONING = "\n\nI need  a shell. \n\n"
MINI_END = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
SHELLS = ("bash", "Bash", "exec_command", "shell", "shell_command", "run_shell_command", "terminal")
ENDS = ("final_answer", "finish", "submit")


@dataclass(frozen=True)
class Shown:
    """What a prompt shows: the parameters of each tool; how many replies there were, and how many of them called a
    tool (smolagents tells its calls as text); all of its text.
    """

    tools: dict[str, Json]
    replies: int
    calls: int
    text: str


Says = Callable[[Shown], str]


def read(prompt: str) -> Shown:
    messages = [part.partition("\n") for part in prompt.split("<|im_start|>")[1:]]
    block = re.search(r"\n<tools>\n(.*?)\n</tools>", prompt, re.DOTALL)
    functions = [json.loads(line)["function"] for line in block[1].split("\n")] if block else []
    replies = [text for role, _, text in messages[:-1] if role == "assistant"]
    return Shown(
        tools={function["name"]: function.get("parameters") or {} for function in functions},
        replies=len(replies),
        calls=sum("<tool_call>" in text or "Calling tools:" in text for text in replies),
        text=prompt,
    )


def with_tools(shown: Shown) -> str:
    """For harnesses that offer a shell as a tool."""
    if not shown.tools:
        return TITLE
    if shown.calls == 0:
        return thought("  I will  run it.\n\n  Now. \n\n" + call(shown, "echo one café >> hi.txt"))
    if shown.calls == 1:
        return call(shown, "echo two >> hi.txt") + "\n" + call(shown, "echo three >> hi.txt")
    name = next((name for name in ENDS if name in shown.tools), None)
    if name is not None:
        return thought(tool_call(name, arguments(shown.tools[name], END)))
    if MINI_END in shown.text:
        return thought("Done.\n\n" + call(shown, f"{MINI_END}; echo {END}"))
    return thought(f"\nDone.  {END}\n")


def mini_text(shown: Shown) -> str:
    """For mini-swe-agent in text mode: a fenced command in each reply. The second has no reasoning; its blanks stay."""
    commands = ("echo one café > hi.txt", "echo two >> hi.txt; echo three >> hi.txt", f"{MINI_END}; echo {END}")
    command = commands[min(shown.replies, 2)]
    text = f"  THOUGHT: run  it. \n\n```mswea_bash_command\n{command}\n```\n"
    return text if shown.replies == 1 else thought(text)


def smolagents_code(shown: Shown) -> str:
    """For smolagents' CodeAgent: Python between `<code>` marks. The closing mark is a stop string."""
    if shown.replies == 0:
        return thought("  Thought: run it. \n<code>\nimport math\nprint('one café')\n</code>\n")
    return thought(f"Thought: done.\n<code>\nfinal_answer('{END}')\n</code>")


def aider(shown: Shown) -> str:
    """For aider: one whole file; then the message of the commit."""
    if "commit message" in shown.text:
        return "feat: say hi"
    text = "\n".join([*LINES, END])
    return thought(f"  I will add a file. \n\nhi.txt\n```\n{text}\n```\n\n")


def thought(text: str) -> str:
    return f"<think>{REASONING}</think>\n\n{text}"


def call(shown: Shown, command: str) -> str:
    """A call of the shell that is offered."""
    named = [name for name in SHELLS if name in shown.tools]
    takes_command = [name for name, schema in shown.tools.items() if "command" in schema.get("properties", {})]
    name = (named + takes_command)[0]
    return tool_call(name, arguments(shown.tools[name], command))


def tool_call(name: str, values: Json) -> str:
    """JSON as no serialiser writes it, with `\\u` escapes."""
    spaced = ",\n  ".join(f"{json.dumps(key)}:  {json.dumps(value)}" for key, value in values.items())
    return f'<tool_call>\n{{ "name":  "{name}",\n "arguments": {{ {spaced} }} }}\n</tool_call>'


def arguments(schema: Json, text: str) -> Json:
    """A value for each required parameter; `text` for the one that says what to do."""
    properties = schema.get("properties", {})
    names = [*schema.get("required", []), *(name for name in ("command", "cmd") if name in properties)]
    return {name: _value(name, properties.get(name, {}), text) for name in dict.fromkeys(names)}


def _value(name: str, schema: Json, text: str) -> Any:
    kind = schema.get("type", "string")
    kind = (kind[0] if isinstance(kind, list) else kind).lower()
    if name in ("command", "cmd", "answer", "message"):
        return ["bash", "-lc", text] if kind == "array" else text
    if "enum" in schema:
        return schema["enum"][0]
    return {"boolean": False, "integer": 10, "number": 10, "array": [], "object": {}}.get(kind, "say hi")
