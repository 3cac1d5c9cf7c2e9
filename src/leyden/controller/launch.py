"""What a harness or grader is started with: its command and its environment. Pure; every backend uses it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from jinja2 import UndefinedError

from leyden.config import GraderConfig, HarnessConfig, RunConfig
from leyden.controller.environment import reaching
from leyden.controller.templates import render, render_strictly
from leyden.errors import LaunchError
from leyden.records import Rollout

MOST_TEXT_BYTES = 32 * 4096 - 1  # MAX_ARG_STRLEN of Linux, with its NUL
POINTER_BYTES = 8
TASK_FILE = "let the harness read the task from the file that LEYDEN_TASK names"
# What a harness is told to use; named in the warning about a harness that made no call.
BASE_URL_VARIABLES = ("OPENAI_BASE_URL", "OPENAI_API_BASE", "ANTHROPIC_BASE_URL", "GOOGLE_GEMINI_BASE_URL")
KEY_VARIABLES = ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN", "GEMINI_API_KEY", "GOOGLE_API_KEY")


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What the run file's templates may print of the run itself."""

    run_dir: Path
    config_dir: Path
    model: str

    @classmethod
    def of(cls, config: RunConfig) -> Self:
        return cls(config.run_dir, config.config_dir, config.model.name)

    def variables(self) -> dict[str, Any]:
        return {"run_dir": str(self.run_dir), "config_dir": str(self.config_dir), "model": self.model}

    def attempt_variables(self, rollout: Rollout, workspace: Path) -> dict[str, Any]:
        own = {"task": rollout.task, "workspace": str(workspace), "rollout_id": rollout.rollout_id}
        return own | self.variables()


@dataclass(frozen=True, slots=True)
class Place:
    """Where an attempt's files are, as its programs see them."""

    workspace: Path
    task: Path
    harness_log: Path
    exit: Path


@dataclass(frozen=True, slots=True)
class Invocation:
    """How a program is started: Leyden's variables are `own` and the secret `keys`; those of the run file, `given`, go
    over them. `known` is what templates may print.
    """

    argv: tuple[str, ...]
    own: Mapping[str, str]
    keys: Mapping[str, str] = field(repr=False)
    given: Mapping[str, str]
    known: Mapping[str, Any]

    def environment(self, url: str, inherited: Mapping[str, str]) -> dict[str, str]:
        """All variables of a program that reaches the gateway at `url`."""
        return reaching(host(url), {**inherited, **self.own, **self.keys}, self.given)


@dataclass(frozen=True, slots=True)
class Invocations:
    """Builds the commands and environments of a run. `function_runner` is the command that calls a grader function."""

    run: RunFacts
    harness: HarnessConfig
    grader: GraderConfig
    url: str
    function_runner: tuple[str, ...]

    def of_harness(self, rollout: Rollout, key: str, place: Place) -> Invocation:
        """Raises LaunchError if a template cannot be rendered, or for what no program can be started with."""
        known = self._known(rollout, place)
        own = endpoints(self.url) | self._own(rollout, place) | {"LEYDEN_URL": self.url}
        if self.grader.harness:
            own |= self._reward_address()
        return Invocation(
            argv=rendered_command("harness.command", self.harness.command, known),
            own=own,
            keys=dict.fromkeys((*KEY_VARIABLES, "LEYDEN_KEY"), key),
            given=self._rendered_env(known),
            known=known,
        )

    def of_grader(self, rollout: Rollout, key: str, place: Place) -> Invocation:
        """Raises LaunchError, as `of_harness` does."""
        known = self._known(rollout, place)
        found = {"LEYDEN_HARNESS_LOG": str(place.harness_log), "LEYDEN_EXIT": str(place.exit)}
        if self.grader.function:
            argv = (*self.function_runner, self.grader.function, str(self.run.config_dir))
        else:
            argv = rendered_command("grader.command", self.grader.command or [], known)
        own = self._own(rollout, place) | self._reward_address() | found
        return Invocation(argv, own, {"LEYDEN_KEY": key}, {}, known)

    def preload_environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """What modules see while they are preloaded: the harness's variables without keys and without what names a
        task."""
        known = self.run.variables() | {"url": self.url}
        given: dict[str, str] = {}
        for name, text in self.harness.env.items():
            try:
                given[name] = render_strictly(f"harness.env.{name}", text, known)
            except UndefinedError:
                continue
        return reaching(host(self.url), {**inherited, **endpoints(self.url)}, given)

    def _known(self, rollout: Rollout, place: Place) -> dict[str, Any]:
        return self.run.attempt_variables(rollout, place.workspace) | {"url": self.url}

    def _own(self, rollout: Rollout, place: Place) -> dict[str, str]:
        return {
            "LEYDEN_ROLLOUT_ID": rollout.rollout_id,
            "LEYDEN_ATTEMPT": str(rollout.attempt),
            "LEYDEN_MODEL": self.run.model,
            "LEYDEN_TASK": str(place.task),
            "LEYDEN_WORKSPACE": str(place.workspace),
        }

    def _reward_address(self) -> dict[str, str]:
        return {"LEYDEN_REWARD_URL": f"{self.url}/api/reward"}

    def _rendered_env(self, known: Mapping[str, Any]) -> dict[str, str]:
        rendered = {}
        for name, text in self.harness.env.items():
            key = f"harness.env.{name}"
            rendered[name] = _startable(key, render(key, text, known), len(name) + 1)
        return rendered


def endpoints(url: str) -> dict[str, str]:
    return {
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_BASE": f"{url}/v1",
        "ANTHROPIC_BASE_URL": url,
        "GOOGLE_GEMINI_BASE_URL": url,
    }


def host(url: str) -> str:
    return urlsplit(url).hostname or ""


def rendered_command(name: str, command: list[str], known: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(_startable(f"{name}[{i}]", render(f"{name}[{i}]", item, known)) for i, item in enumerate(command))


def check_size(name: str, argv: Sequence[str], environment: Mapping[str, str]) -> None:
    """Raises LaunchError where command and environment together are more than the system starts a program with."""
    texts = [*argv, *(f"{n}={v}" for n, v in environment.items())]
    size, most = sum(len(os.fsencode(text)) + POINTER_BYTES + 1 for text in texts), os.sysconf("SC_ARG_MAX")
    if size > most:
        raise LaunchError(
            f"{name} and its environment have {size} bytes, the system takes {most}; {TASK_FILE}", final=True
        )


def _startable(key: str, text: str, more: int = 0) -> str:
    """The text, if it can be one argument or, with `more` bytes for its name, one variable; see execve(2)."""
    if "\0" in text:
        raise LaunchError(f"{key} has a NUL character, which no argument or variable can hold; {TASK_FILE}", final=True)
    try:
        size = len(os.fsencode(text)) + more
    except UnicodeEncodeError as error:
        what = f"{key} has half a surrogate pair (at character {error.start})"
        raise LaunchError(f"{what}, which no argument or variable can hold; {TASK_FILE}", final=True) from None
    if size > MOST_TEXT_BYTES:
        what = f"{key} has {size} bytes, the system takes {MOST_TEXT_BYTES} in one argument or variable"
        raise LaunchError(f"{what}; {TASK_FILE}", final=True)
    return text
