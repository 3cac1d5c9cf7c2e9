"""The seventeen launchers and their variants, and what each is expected to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from tests.harnesses import script
from tests.harnesses.script import Says


@dataclass(frozen=True)
class Case:
    """One way to run a harness: `launchers/LAUNCHER.yaml` with `env` on top.

    `package` is what install.py calls it. `leaves` are the files that the run must leave, by their lines. `turns`
    counts all model calls, `forks` the expected branches by cause, side calls aside: each is one more sample.
    """

    name: str
    package: str
    protocol: str
    launcher: str = ""
    streamed: bool = False
    turns: int = 3
    side_calls: int = 0
    forks: Mapping[str, int] = field(default_factory=dict)
    says: Says = script.with_tools
    leaves: Mapping[str, Sequence[str]] = field(default_factory=lambda: {"hi.txt": script.LINES})
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def file(self) -> str:
        return f"{self.launcher or self.name}.yaml"


CHAT, RESPONSES, ANTHROPIC, GEMINI = "openai-chat", "openai-responses", "anthropic-messages", "gemini"

REASONING_DROPPED = {"reasoning_dropped_by_harness": 1}
SMOLAGENTS = {"reply_rewritten": 2}

LAUNCHERS = (
    Case("mini", "mini", CHAT),
    Case("mini_text", "mini", CHAT, forks={"reasoning_dropped_by_template": 1}, says=script.mini_text),
    Case("openhands", "openhands", CHAT, forks=REASONING_DROPPED),
    Case(
        "smolagents_code",
        "smolagents",
        CHAT,
        streamed=True,
        turns=2,
        forks={"reply_rewritten": 1},
        says=script.smolagents_code,
        leaves={},
    ),
    Case("smolagents_tools", "smolagents", CHAT, forks=SMOLAGENTS),
    Case("oagents", "openai-agents", RESPONSES),
    Case("langgraph", "langgraph", CHAT, forks=REASONING_DROPPED),
    Case("langgraph_anthropic", "langgraph", ANTHROPIC),
    Case("autogen", "autogen", CHAT, forks=REASONING_DROPPED),
    Case("aider", "aider", CHAT, streamed=True, turns=2, side_calls=1, says=script.aider),
    Case("claude", "claude", ANTHROPIC, streamed=True, turns=4, side_calls=1),
    Case("codex", "codex", RESPONSES, streamed=True),
    Case("qwen", "qwen", CHAT, streamed=True),
    Case("opencode", "opencode", CHAT, streamed=True, turns=4, side_calls=1),
    Case("pi", "pi", CHAT, streamed=True),
    Case("gemini", "gemini", GEMINI, streamed=True),
    Case("aisdk", "aisdk", RESPONSES),
)
BY_NAME = {case.name: case for case in LAUNCHERS}


def _variant(
    base: str, label: str, protocol: str, *, streamed: bool = False, forks: Mapping[str, int] | None = None, **env: str
) -> Case:
    case = BY_NAME[base]
    return replace(
        case,
        name=f"{base}-{label}",
        launcher=base,
        protocol=protocol,
        streamed=streamed or case.streamed,
        forks=forks or {},
        env=env | ({"STREAM": "1"} if streamed else {}),
    )


VARIANTS = (
    _variant("openhands", "stream", CHAT, streamed=True, forks=REASONING_DROPPED),
    _variant("smolagents_tools", "stream", CHAT, streamed=True, forks=SMOLAGENTS),
    _variant("oagents", "stream", RESPONSES, streamed=True),
    _variant("oagents", "chat", CHAT, forks=REASONING_DROPPED, API="chat"),
    _variant("oagents", "chat-stream", CHAT, streamed=True, forks=REASONING_DROPPED, API="chat"),
    _variant("langgraph", "stream", CHAT, streamed=True, forks=REASONING_DROPPED),
    _variant("langgraph", "responses", RESPONSES, API="responses"),
    _variant("langgraph", "responses-stream", RESPONSES, streamed=True, API="responses"),
    _variant("langgraph_anthropic", "stream", ANTHROPIC, streamed=True),
    _variant("autogen", "stream", CHAT, streamed=True, forks=REASONING_DROPPED),
    _variant("pi", "responses", RESPONSES, API="openai-responses"),
    _variant("pi", "anthropic", ANTHROPIC, API="anthropic-messages"),
    _variant("aisdk", "stream", RESPONSES, streamed=True),
    _variant("aisdk", "chat", CHAT, forks=REASONING_DROPPED, API="chat"),
    _variant("aisdk", "chat-stream", CHAT, streamed=True, forks=REASONING_DROPPED, API="chat"),
    _variant("aisdk", "compat", CHAT, API="compat"),
    _variant("aisdk", "compat-stream", CHAT, streamed=True, API="compat"),
    _variant("aisdk", "anthropic", ANTHROPIC, API="anthropic"),
    _variant("aisdk", "anthropic-stream", ANTHROPIC, streamed=True, API="anthropic"),
)
SMOKE = ("mini", "claude", "codex", "gemini", "aisdk")
