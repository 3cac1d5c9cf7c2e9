"""What is installed and built before any test: once, with progress, under no test's limit.

Several set-ups may run at once, and each may be interrupted: whoever holds the lock of a folder works on it, commands
that outlive their set-up hold it on, and a folder counts only when its mark is written, which comes last.
"""

from __future__ import annotations

import fcntl
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

EVERY_S = 15.0
LAST_LINE = 100


class NotHere(Exception):
    """The machine lacks what a set-up needs; the message says what, and what to do."""


class SetUpFailed(Exception):
    """A command of a set-up failed; the message holds the end of its output and where the rest is."""


def cache() -> Path:
    return Path.home() / ".cache" / "leyden"


def say(line: str) -> None:
    print(line, flush=True)


@dataclass(frozen=True)
class Step:
    """One thing to set up. The output of its commands goes to `log`; they hold `lock` while they live."""

    what: str
    log: Path
    lock: int

    def run(self, command: Sequence[str | Path], cwd: Path | None = None, env: dict[str, str] | None = None) -> None:
        """Run a command, with a line now and then that says how it stands. Raises SetUpFailed."""
        began = time.monotonic()
        with self.log.open("a") as output:
            output.write(f"$ {' '.join(map(str, command))}\n")
            output.flush()
            with subprocess.Popen(
                command, cwd=cwd, env=env, stdout=output, stderr=output, stdin=subprocess.DEVNULL, pass_fds=[self.lock]
            ) as process:
                try:
                    while not _ended(process):
                        say(f"{self.what}: {time.monotonic() - began:.0f} s: {self._last_line()}")
                except BaseException:
                    process.terminate()
                    raise
        if process.returncode:
            tail = "".join(self.log.read_text(errors="replace").splitlines(keepends=True)[-20:])
            raise SetUpFailed(f"{self.what}: {command[0]} ended with {process.returncode}; {self.log} ends:\n{tail}")

    def _last_line(self) -> str:
        lines = self.log.read_text(errors="replace").split("\n")
        return next((line.strip()[:LAST_LINE] for line in reversed(lines) if line.strip()), "")


def _ended(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(EVERY_S)
    except subprocess.TimeoutExpired:
        return False
    return True


@contextmanager
def step(what: str, folder: Path) -> Iterator[Step]:
    """The set-up of a folder, by one process at a time; its log lies beside it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"{what}: waiting for another set-up of {folder}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield Step(what, folder.with_name(f"{folder.name}.log"), lock.fileno())


def install_once(what: str, folder: Path, facts: Sequence[str], install: Callable[[Step], None]) -> None:
    """Fill `folder` unless it was filled with equal `facts`. Raises NotHere and SetUpFailed."""
    with step(what, folder) as it:
        mark = folder / ".installed"
        if mark.exists() and json.loads(mark.read_text()) == list(facts):
            return
        shutil.rmtree(folder, ignore_errors=True)
        it.log.unlink(missing_ok=True)
        began = time.monotonic()
        say(f"{what}: into {folder}, output in {it.log}")
        install(it)
        mark.write_text(json.dumps(list(facts)))
        say(f"{what}: ready in {time.monotonic() - began:.0f} s")


def python_that_runs(*versions: str) -> str | None:
    """The first of these versions (`3.12`) that can be started; a name on PATH may be an empty shim."""
    for version in versions:
        if sys.version_info[:2] == tuple(map(int, version.split("."))):
            return sys.executable
        found = shutil.which(f"python{version}")
        if found and subprocess.run([found, "-c", "import venv"], capture_output=True, check=False).returncode == 0:
            return found
    return None
