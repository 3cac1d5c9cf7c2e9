"""mini-swe-agent's loop and shell, emulated for speed: what the warm start and a quick evaluation run
against.

Training and evaluation proper run the real `mini`. This emulation has to show a model the same bytes: the
constants are those of `mini.yaml`, the loop is that of mini-swe-agent 2.4.6 in text mode, and the commands
that a model mostly writes are computed here; every other command goes to the real shell. Tests compare both
with the originals.
"""

import os
import re
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from grade import passes
from tasks import FAMILIES, Task, call_all

SYSTEM = "Reply with one bash block."
FORMAT_ERROR = "Give one bash block."
ACTION = re.compile(r"\A```bash\s*\n(.*?)\n```\Z", re.DOTALL)
STEP_LIMIT = 4
MAX_TOKENS = 48
COMMAND_TIMEOUT_S = 10
FORMAT_ERRORS_IN_A_ROW = 3
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"

Message = dict[str, str]

SED = re.compile(r"sed -i '/ ([a-z_]+)/s,( [^',\\]+),( [^',\\]+),' ([a-z]+)\.py")
OPERATORS = frozenset(op for family in FAMILIES.values() for op in family.words)


def block(command: str) -> str:
    return f"```bash\n{command}\n```"


def look(module: str) -> str:
    return f"cat {module}.py; python3 {module}_test.py"


def slot(operator: str) -> str:
    """An operator as it stands in a line, so that its tokens are the same in the file and in a command."""
    return f" {operator}" if operator.isalpha() else f" {operator} "


def replace(name: str, old: str, new: str, module: str) -> str:
    """The `sed` command that replaces an operator in the line of one function."""
    return f"sed -i '/ {name}/s,{slot(old)},{slot(new)},' {module}.py"


def observation(returncode: int, output: str) -> str:
    return f"{returncode}\n{output}"


def parse_action(reply: str) -> str | None:
    """The command of a reply; None is a format error."""
    actions = [action.strip() for action in ACTION.findall(reply)]
    return actions[0] if len(actions) == 1 else None


@dataclass
class Workspace:
    """The two files of a task and a shell in their folder. `source` is the module as it stands."""

    task: Task
    test_source: str = ""
    source: str = ""
    known: bool = True
    """Whether `source` came about by known edits only, so that it may be run in this process."""

    def __post_init__(self) -> None:
        self.source = self.source or self.task.source()
        self.test_source = self.test_source or self.task.test_source()

    def execute(self, command: str) -> tuple[int, str]:
        """Exit status and output (standard error included), as `sh -c` gives them."""
        if command == SUBMIT:
            return 0, SUBMIT.removeprefix("echo ") + "\n"
        if command == look(self.task.module) and self.known:
            failed = self.first_failure()
            return (1, f"{self.source}FAILED {failed}\n") if failed else (0, f"{self.source}ok\n")
        match = SED.fullmatch(command)
        if match and match[4] == self.task.module and self.is_plain(match[2]) and self.is_plain(match[3]):
            lines = self.source.splitlines(keepends=True)
            edited = (x.replace(match[2], match[3], 1) if f" {match[1]}" in x else x for x in lines)
            self.source = "".join(edited)
            return 0, ""
        return self.execute_really(command)

    @staticmethod
    def is_plain(text: str) -> bool:
        """Whether `sed` takes the text literally and the result is code that this process may run."""
        return (text.strip() in OPERATORS - {"*"} and text == slot(text.strip())) or text == slot("*")

    def first_failure(self) -> str | None:
        """Name of the first function whose test fails, in the order of the file."""
        functions = self.task.functions
        right = call_all(self.task.source(self.task.bug.operator), functions)
        for function in functions:
            try:
                passed = call_all(self.source, (function,))[function.name] == right[function.name]
            except Exception:
                passed = False
            if not passed:
                return function.name
        return None

    def execute_really(self, command: str) -> tuple[int, str]:
        """Run the command in a real shell in a temporary folder; keep what it did to the two files."""
        module = self.task.module
        with tempfile.TemporaryDirectory(prefix="micro-") as folder:
            code, test = Path(folder, f"{module}.py"), Path(folder, f"{module}_test.py")
            code.write_text(self.source)
            test.write_text(self.test_source)
            result = run_shell(command, folder)
            before = self.source
            self.source = code.read_text(errors="replace") if code.is_file() else ""
            self.test_source = test.read_text(errors="replace") if test.is_file() else ""
            self.known = self.known and self.source == before
        return result

    def reward(self) -> float:
        """1.0 if the module as it stands passes its tests, else 0.0."""
        if self.known:
            return float(self.first_failure() is None)
        with tempfile.TemporaryDirectory(prefix="micro-") as folder:
            Path(folder, f"{self.task.module}.py").write_text(self.source)
            return float(passes(self.task.row(), Path(folder)))


def run_shell(command: str, folder: str) -> tuple[int, str]:
    """A command as mini's local environment runs it: `sh -c`, standard error joined to the output."""
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    try:
        result = subprocess.run(
            ["/bin/sh", "-c", command],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as expired:
        return -1, (expired.output or b"").decode(errors="replace")
    return result.returncode, result.stdout.decode(errors="replace")


@dataclass
class Episode:
    """One run of mini. `messages` is what mini sends with its next request."""

    task: Task
    workspace: Workspace = field(init=False)
    messages: list[Message] = field(init=False)
    calls: int = 0
    format_errors: int = 0
    exit_status: str = ""

    def __post_init__(self) -> None:
        self.workspace = Workspace(self.task)
        self.messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": self.task.prompt}]

    @property
    def done(self) -> bool:
        return bool(self.exit_status)

    def answer(self, reply: str, result: tuple[int, str] | None = None) -> bool:
        """Take the model's reply; False: a format error, whose reply mini drops from the conversation.

        `result` stands in for running the command.
        """
        self.calls += 1
        command = parse_action(reply)
        if command is None:
            self.format_errors += 1
            self.messages.append({"role": "user", "content": FORMAT_ERROR})
            if self.format_errors >= FORMAT_ERRORS_IN_A_ROW:
                self.exit_status = "RepeatedFormatError"
        else:
            self.format_errors = 0
            self.messages.append({"role": "assistant", "content": reply})
            self.observe(*(result or self.workspace.execute(command)))
        if not self.done and self.calls >= STEP_LIMIT:
            self.exit_status = "LimitsExceeded"
        return command is not None

    def reward(self) -> float:
        """What the grader gives: the module's tests have to pass, and the run has to end by submitting."""
        return self.workspace.reward() if self.exit_status == "Submitted" else 0.0

    def observe(self, returncode: int, output: str) -> None:
        first = output.lstrip().split("\n", 1)[0].strip()
        if returncode == 0 and first == SUBMIT.removeprefix("echo "):
            self.exit_status = "Submitted"
        else:
            self.messages.append({"role": "user", "content": observation(returncode, output)})
