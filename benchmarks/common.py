"""What the benchmarks share: a run file for them, child processes, tables, and where results go."""

from __future__ import annotations

import json
import os
import platform
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "build" / "bench"
MODEL = ROOT / "examples" / "micro_swe" / "base"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@contextmanager
def child(
    command: list[str], log: Path, environment: dict[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A process of the benchmark, ended with it. Its output goes to `log`."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, cwd=ROOT, env=environment)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_for(url: str, limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def write_run_file(folder: Path, **sections: Any) -> Path:
    """A run file in `folder`; `sections` override the smallest one that is valid."""
    document: dict[str, Any] = {
        "run_dir": str(folder / "run"),
        "model": {"path": str(MODEL), "name": "bench", "renderer": "qwen3", "context_tokens": 65536},
        "data": {"train": str(folder / "train.jsonl")},
        "harness": {"command": ["true"], "max_turns": 10**9},
        "grader": {"command": ["true"]},
    }
    for name, section in sections.items():
        document[name] = document.get(name, {}) | section
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def leyden(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "leyden", *arguments]


def gateway_url(run_dir: Path) -> str:
    """The address that a gateway which is starting announces."""
    path = run_dir / "gateway.json"
    deadline = time.monotonic() + 60
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no gateway announced itself in {path}")
        time.sleep(0.05)
    url: str = json.loads(path.read_text())["url"]
    wait_for(f"{url}/health")
    return url


def report(name: str, columns: list[str], rows: list[list[Any]], **facts: Any) -> None:
    """Print a table and write build/bench/NAME.json."""
    cells = [columns, *[[f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    for row in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    machine = {"cores": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()}
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"columns": columns, "rows": rows, **facts, "machine": machine}, indent=1))
    print(f"\n{path.relative_to(ROOT)}")
