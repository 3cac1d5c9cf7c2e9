"""The processes around a trainer: one lock on the run folder, and the gateway and controller as children.

Each child runs in a session of its own (a Ctrl-C at the terminal reaches the trainer alone, which ends them
in order) and holds two descriptors of the trainer's: the read end of a pipe as stdin, whose end-of-file tells
the child that the trainer is gone, however it went; and the lock `lock.children`, which is free again only
when the last of them has gone. So the next trainer on this folder starts after the children of one that was
killed, not beside them.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, NoReturn, Self

from leyden.client import ControlClient
from leyden.client.announcement import read_announcement
from leyden.errors import TrainingError

START_LIMIT_S = 60.0
LINGER_LIMIT_S = 30.0
END_GRACE_S = 15.0
KILL_GRACE_S = 5.0
POLL_S = 0.02


@contextlib.contextmanager
def run_lock(run_dir: Path, linger_limit_s: float = LINGER_LIMIT_S) -> Iterator[int]:
    """Hold the run folder. Gives the descriptor of `lock.children`, for the children to inherit.

    Raises TrainingError with the pid if another trainer holds the folder, or if children of an earlier one
    are still there after `linger_limit_s`.
    """
    with (run_dir / "lock").open("a+") as own, (run_dir / "lock.children").open("a+") as children:
        if not _try_lock(own):
            own.seek(0)
            holder = own.read().strip() or "unknown"
            raise TrainingError(
                f"{run_dir} is in use by another `leyden train` (pid {holder}); end it or choose another run_dir"
            )
        own.truncate(0)
        own.write(str(os.getpid()))
        own.flush()
        give_up = time.monotonic() + linger_limit_s
        while not _try_lock(children):
            if time.monotonic() > give_up:
                raise TrainingError(
                    f"processes of an earlier run still hold {run_dir}/lock.children "
                    f"after {linger_limit_s:.0f} s; end them (`fuser` names them)"
                )
            time.sleep(POLL_S)
        yield children.fileno()


def _try_lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class Child:
    name: str
    process: asyncio.subprocess.Process
    log: Path


class Children:
    """Children of this process, ended in reverse order of their start when the context ends."""

    def __init__(self, log_dir: Path, lock_fd: int | None = None) -> None:
        self._log_dir = log_dir
        self._pass_fds = () if lock_fd is None else (lock_fd,)
        self._children: list[Child] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for child in reversed(self._children):
            await _end(child)

    async def start(self, name: str, command: Sequence[str]) -> Child:
        """Start `command` with its output appended to `logs/NAME.log`."""
        self._log_dir.mkdir(parents=True, exist_ok=True)
        log = self._log_dir / f"{name}.log"
        with log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,
                pass_fds=self._pass_fds,
            )
        child = Child(name, process, log)
        self._children.append(child)
        return child

    async def watch(self) -> NoReturn:
        """Wait until a child ends, then raise TrainingError naming its exit status and log."""
        if not self._children:
            await asyncio.Event().wait()
        waits = {asyncio.create_task(child.process.wait()): child for child in self._children}
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waits:
                task.cancel()
        raise died(waits[next(iter(done))])


def died(child: Child) -> TrainingError:
    status = child.process.returncode
    how = f"was killed by signal {-status}" if status is not None and status < 0 else f"ended with exit status {status}"
    return TrainingError(
        f"the {child.name} {how}; its log is {child.log}{_last_words(child.log)}. The same command resumes"
    )


def child_command(name: str, run_file: Path, overrides: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "leyden", name, str(run_file), *overrides, "--with-parent"]


async def wait_for_gateway(run_dir: Path, child: Child, key: str, limit_s: float = START_LIMIT_S) -> str:
    """The URL of the gateway that `child` runs, once it has written gateway.json and answers. `key`: control."""
    give_up = time.monotonic() + limit_s
    while (url := _announced_by(child, run_dir)) is None:
        if child.process.returncode is not None:
            raise died(child)
        if time.monotonic() > give_up:
            raise TrainingError(f"the gateway did not listen within {limit_s:.0f} s; its log is {child.log}")
        await asyncio.sleep(POLL_S)
    async with ControlClient(url, key, retry_limit_s=limit_s) as client:
        await client.health()
    return url


def _announced_by(child: Child, run_dir: Path) -> str | None:
    """The URL, if this child is the gateway that listened last."""
    try:
        found = read_announcement(run_dir)
    except (OSError, ValueError):
        return None
    return found.url if found.pid == child.process.pid else None


async def _end(child: Child) -> None:
    """Close stdin and wait; after a grace SIGTERM, then SIGKILL."""
    process = child.process
    if process.stdin is not None:
        process.stdin.close()
    for grace_s, stop in ((END_GRACE_S, process.terminate), (KILL_GRACE_S, process.kill)):
        try:
            await asyncio.wait_for(process.wait(), grace_s)
            return
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                stop()
    await process.wait()


def _last_words(log: Path, limit: int = 300) -> str:
    """The last line of a log, to save the reader a step."""
    try:
        lines = log.read_text(errors="replace").strip().splitlines()
    except OSError:
        return ""
    return f" (last line: {lines[-1][-limit:]})" if lines else ""
