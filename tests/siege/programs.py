"""Leyden's programs as processes, what they leave behind, and the worst answer time of a gateway's /health."""

from __future__ import annotations

import contextlib
import http.client
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.synchronize import Event
from pathlib import Path
from urllib.parse import urlsplit

import psutil

LIMIT_S = 300.0
Asked = tuple[float, float]
SECRET = "siege-" + "s" * 40


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


class Program:
    """A `leyden` command in a folder, with its output in a file."""

    def __init__(self, folder: Path, name: str, *arguments: str) -> None:
        self.log = folder / f"{name}.out"
        command = [sys.executable, "-m", "leyden", *arguments]
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                command, cwd=folder, stdout=output, stderr=output, env={**os.environ, "LEYDEN_SECRET": SECRET}
            )

    @property
    def runs(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGKILL)
        self.process.wait(LIMIT_S)

    def end(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.kill()

    def tail(self, characters: int = 2000) -> str:
        return self.log.read_text(errors="replace")[-characters:]


def until(condition: Callable[[], bool], what: str, limit_s: float = LIMIT_S) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"after {limit_s:g} s: {what}")
        time.sleep(0.02)


def gateway_url(run_dir: Path, program: Program) -> str:
    """The address at which a gateway that was just started answers."""

    def answers() -> bool:
        if not program.runs:
            raise RuntimeError(program.tail())
        with contextlib.suppress(OSError, ValueError, KeyError):
            found = json.loads((run_dir / "gateway.json").read_text())
            return found["pid"] == program.process.pid and health(found["url"]) is not None
        return False

    until(answers, f"no gateway answers in {run_dir}")
    return str(json.loads((run_dir / "gateway.json").read_text())["url"])


def health(url: str, timeout_s: float = 30.0) -> float | None:
    """Seconds that /health took on a new connection; None if it did not answer 200."""
    parts, start = urlsplit(url), time.perf_counter()
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout_s)
    try:
        connection.request("GET", "/health")
        return time.perf_counter() - start if connection.getresponse().status == 200 else None
    except OSError:
        return None
    finally:
        connection.close()


@contextlib.contextmanager
def watched(url: str) -> Iterator[list[Asked]]:
    """Asks /health all the time from a process of its own; once the block is over the list has, of each, when it was
    asked (`perf_counter`, which processes share) and the seconds that it took."""
    context = multiprocessing.get_context("spawn")
    over, results = context.Event(), context.SimpleQueue()
    watcher = context.Process(target=_watch, args=(url, over, results), daemon=True)
    watcher.start()
    asked: list[Asked] = []
    try:
        yield asked
    finally:
        over.set()
        asked += results.get()
        watcher.join()


def _watch(url: str, over: Event, results: multiprocessing.SimpleQueue[list[Asked]]) -> None:
    asked = []
    while not over.wait(0.02):
        start, found = time.perf_counter(), health(url)
        asked.append((start, float("inf") if found is None else found))
    results.put(asked)


def of_folder(folder: Path, *words: str) -> list[psutil.Process]:
    """Processes that run in or for `folder`, with all `words` in their command lines."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            line = process.cmdline()
            inside = any(str(folder) in part for part in [*line, process.cwd()])
            if process.pid != os.getpid() and inside and all(any(w in part for part in line) for w in words):
                found.append(process)
    return found


def wait_until_alone(folder: Path) -> None:
    until(lambda: not of_folder(folder), f"processes of {folder} still run", 200)
