"""The demo: make the tasks, train through the real mini-swe-agent, show what came of it.

make demo          or, in an environment with Leyden and mini-swe-agent: python examples/micro_swe/demo.py
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
DATA = ROOT / "build" / "micro_swe"
RUNS = ROOT / "runs"


def changed_files(distribution: metadata.Distribution) -> list[str]:
    """Files of an installed package that differ from what its wheel recorded."""
    changed = []
    for file in distribution.files or []:
        if file.hash is None:
            continue
        digest = hashlib.new(file.hash.mode, Path(str(file.locate())).read_bytes()).digest()
        if base64.urlsafe_b64encode(digest).rstrip(b"=").decode() != file.hash.value:
            changed.append(str(file))
    return changed


def next_run_dir() -> Path:
    """The folder of an interrupted run, which is resumed, or else a new one."""
    number = 1
    while (path := RUNS / f"micro_swe-{number}").exists() and "harness" in summary_of(path):
        number += 1
    return path


def summary_of(run_dir: Path) -> dict[str, Any]:
    path = run_dir / "summary.json"
    return json.loads(path.read_text()) if path.exists() else {}


def run(*arguments: str) -> None:
    """With this environment's own python3 for the agents: one of pyenv's shims takes eight times as long to start.

    What is imported is compiled once: `make demo` installs without compiling, since most modules are never imported.
    """
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    env["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    subprocess.run([sys.executable, *arguments], check=True, cwd=ROOT, env=env)


def percent(value: float, interval: list[float]) -> str:
    return f"{value:.3f}  [{interval[0]:.3f}, {interval[1]:.3f}]"


def main() -> None:
    start = time.monotonic()
    harness = metadata.distribution("mini-swe-agent")
    if changed := changed_files(harness):
        sys.exit(f"mini-swe-agent is not as PyPI ships it, these files differ: {', '.join(changed[:5])}")
    run(str(HERE / "tasks.py"), "--out", str(DATA))
    run_dir = next_run_dir()
    prepared = time.monotonic()
    run("-m", "leyden", "train", str(HERE / "run.yaml"), f"run_dir={run_dir}", *sys.argv[1:])
    summary = summary_of(run_dir)
    if "pass_at_1_after" not in summary:
        sys.exit(f"the run did not finish; its logs are in {run_dir}/logs, and `make demo` resumes it")
    installed = ROOT / ".venv" / ".install-seconds"
    summary["seconds"] |= {
        "installation": float(installed.read_text()) if installed.exists() else None,
        "tasks": round(prepared - start, 1),
        "training and validation": round(time.monotonic() - prepared, 1),
    }
    summary["harness"] = {
        "name": harness.name,
        "version": harness.version,
        "files_changed": 0,
        "training_rollouts": summary["counts"]["rollouts"],
        "processes": summary["counts"]["attempts"],
    }
    (run_dir / "summary.json").write_text(json.dumps(summary, indent=2))
    show(summary, run_dir)


def show(summary: dict[str, Any], run_dir: Path) -> None:
    counts = summary["counts"]
    print(f"\nharness            {summary['harness']['name']} {summary['harness']['version']}, as PyPI ships it")
    print(f"training rollouts  {counts['rollouts']}, each one fork of mini; excluded: {counts['excluded'] or 'none'}")
    print(f"samples a rollout  {summary['samples_per_rollout']:.3f}; forks: {counts['forks'] or 'none'}")
    print(f"log-probs          sampled against recomputed: at most {summary['max_logprob_diff']:.1e} apart")
    for phase, seconds in summary["seconds"].items():
        print(f"seconds            {phase}: {seconds}")
    for when in ("before", "after"):
        value, interval = summary[f"pass_at_1_{when}"], summary[f"pass_at_1_{when}_interval_95"]
        print(f"pass@1 {when:11} {percent(value, interval)}  (held-out tasks, 95 %)")
    print(f"run folder         {run_dir}")
    print(f"summary            {run_dir / 'summary.json'}")
    print(f"learning curve     {run_dir / 'learning_curve.png'}")


if __name__ == "__main__":
    main()
