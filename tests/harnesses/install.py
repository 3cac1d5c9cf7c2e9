"""Installs harnesses at pinned versions: `python -m tests.harnesses.install [NAME ...]`, all by default.

They go to `~/.cache/leyden/harnesses` (or `$LEYDEN_HARNESSES`): one virtual environment for each Python package, one
npm folder for each JavaScript one. What is there already in the right version is left alone.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.set_up import NotHere, SetUpFailed, Step, cache, install_once, python_that_runs

AT_ONCE = 3


@dataclass(frozen=True)
class Missing:
    """Why a package is not there; `failed` if the machine has all that it needs."""

    reason: str
    failed: bool = False


@dataclass(frozen=True)
class Python:
    """Packages for a virtual environment of their own."""

    needs: tuple[str, ...]
    lowest: tuple[int, int] = (3, 11)

    def install(self, step: Step, folder: Path) -> None:
        step.run([interpreter(self.lowest), "-m", "venv", folder])
        pip = [folder / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "install", "--progress-bar=off"]
        step.run([*pip, *self.needs])


@dataclass(frozen=True)
class Npm:
    """Packages for a `node_modules` of their own."""

    needs: tuple[str, ...]

    def install(self, step: Step, folder: Path) -> None:
        if not (shutil.which("node") and shutil.which("npm")):
            raise NotHere("node and npm are not on PATH")
        folder.mkdir(parents=True)
        (folder / "package.json").write_text('{"private": true, "type": "module"}\n')
        step.run(["npm", "install", "--no-audit", "--no-fund", "--no-progress", *self.needs], cwd=folder)


PACKAGES: dict[str, Python | Npm] = {
    "mini": Python(("mini-swe-agent==2.4.6", "litellm==1.110.2", "openai==3.57.0")),
    "openai-agents": Python(("openai-agents==0.24.0", "openai==3.57.0")),
    "langgraph": Python(
        (
            *("langgraph==1.2.24", "langchain==1.5.2", "langchain-openai==1.7.4", "langchain-anthropic==1.7.10"),
            *("openai==3.57.0", "anthropic==2.14.0"),
        )
    ),
    "autogen": Python(("autogen-agentchat==0.7.5", "autogen-ext[openai]==0.7.5", "openai==3.57.0")),
    "smolagents": Python(("smolagents[openai,litellm]==1.26.0", "ddgs==9.16.1", "openai==3.57.0")),
    "openhands": Python(("openhands-sdk==1.58.2", "openhands-tools==1.58.2", "litellm==1.105.7"), lowest=(3, 12)),
    "aider": Python(("aider-chat==0.86.2", "litellm==1.81.10")),
    "claude": Npm(("@anthropic-ai/claude-code@2.1.197",)),
    "codex": Npm(("@openai/codex@0.171.0",)),
    "qwen": Npm(("@qwen-code/qwen-code@0.15.10",)),
    "opencode": Npm(("opencode-ai@1.18.33",)),
    "pi": Npm(("@mariozechner/pi-coding-agent@0.73.1",)),
    "gemini": Npm(("@google/gemini-cli@0.61.0",)),
    "aisdk": Npm(
        (
            *("ai@6.0.326", "@ai-sdk/openai@3.0.141", "@ai-sdk/openai-compatible@2.0.92"),
            *("@ai-sdk/anthropic@3.0.140", "zod@4.6.7"),
        )
    ),
}


def installed() -> Path:
    return Path(os.environ.get("LEYDEN_HARNESSES") or cache() / "harnesses")


def install(names: Iterable[str]) -> dict[str, Missing]:
    """Install what is missing. The packages that are not there afterwards."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = {name: pool.submit(_install, name) for name in names}
    return {name: missing for name, future in found.items() if (missing := future.result())}


def interpreter(lowest: tuple[int, int]) -> str:
    """Python 3.12 if there is one, which all harnesses run on; else another that is not older than `lowest`."""
    allowed = [f"3.{minor}" for minor in (12, 13, 11) if minor >= lowest[1]]
    found = python_that_runs(*allowed)
    if found is None:
        raise NotHere(f"none of python{', python'.join(allowed)} runs from PATH")
    return found


def _install(name: str) -> Missing | None:
    package, folder = PACKAGES[name], installed() / name
    try:
        install_once(name, folder, package.needs, lambda step: package.install(step, folder))
    except NotHere as reason:
        return Missing(str(reason))
    except SetUpFailed as reason:
        return Missing(f"the installation failed: {reason}", failed=True)
    return None


def main() -> None:
    missing = install(sys.argv[1:] or PACKAGES)
    for name, why in missing.items():
        print(f"not installed: {name}: {why.reason}")
    sys.exit(any(why.failed for why in missing.values()))


if __name__ == "__main__":
    main()
