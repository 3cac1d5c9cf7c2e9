"""What hostile agents leave, under the real gateway and controller: each is graded as it lies, and harms nobody else.

First one after the other, with an innocent rollout behind each; then all of them at once, while the controller is
killed and started again on top of what lies there.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from leyden.client import ControlClient, Rollout, control_key
from leyden.types import FailureClass, RolloutState
from tests.controller.hostile import LEFTOVERS, STAYS
from tests.kube.cluster import cache
from tests.siege.programs import SECRET, Program, gateway_url, wait_until_alone
from tests.tiny_model import make_tiny_model

SCORE = """
import json, os
from leyden.client import post_reward
post_reward(json.load(open(os.environ["LEYDEN_TASK"]))["answer"] + len(os.listdir(".")) / 8)
"""
ROOT = Path(__file__).resolve().parents[2]
PODS = "scripts/test -m kube tests/kube -k hostile"
INNOCENT = "touch innocent"
TIMEOUT_S, LIMIT_S = 15, 240.0
WORKSPACE_BYTES = 64 << 20
TERMINAL = [state for state in RolloutState if state.terminal]
FULL_DISK = "head -c 100000000 /dev/zero > big; sleep 300"
OPEN_FILE = "exec 3> gone; rm gone; head -c 100000000 /dev/zero >&3; sleep 300"


@dataclass(frozen=True, slots=True)
class Case:
    """`files` that the grader finds: None where a sandbox, or what stopped the script, decides."""

    script: str
    files: int | None
    ends: bool = True  # by itself; else by its time-out or a limit


@dataclass
class Siege:
    """One backend's run folder with its gateway and controller."""

    name: str
    folder: Path
    harness: dict[str, Any]
    faults: list[str] = field(default_factory=list)
    graded: int = 0
    groups: int = 0

    def start(self) -> None:
        self.folder.mkdir(parents=True)
        (self.folder / "outside").mkdir()
        (self.folder / "outside/file").write_text("mine")
        (self.folder / "train.jsonl").write_text("{}\n")
        settings = {
            "run_dir": "run",
            "model": {"path": str(make_tiny_model(self.folder / "model")), "renderer": "qwen3", "context_tokens": 256},
            "data": {"train": "train.jsonl"},
            "harness": {
                "command": ["sh", "-c", "{{ task.script }}"],
                "timeout_s": TIMEOUT_S,
                "limits": {"workspace_bytes": WORKSPACE_BYTES},
                **self.harness,
            },
            "grader": {"command": [sys.executable, "-c", SCORE]},
            "workspace": {"keep": "none"},
            "controller": {"concurrency": 8},
        }
        (self.folder / "run.yaml").write_text(yaml.safe_dump(settings))
        self.gateway = Program(self.folder, "gateway", "gateway", "run.yaml")
        self.url = gateway_url(self.folder / "run", self.gateway)
        self.controller = self.another_controller()

    def another_controller(self) -> Program:
        return Program(self.folder, "controller", "controller", "run.yaml", f"gateway.url={self.url}")

    def end(self) -> None:
        for name in ("controller", "gateway"):
            if hasattr(self, name):
                getattr(self, name).end()

    async def queue(self, client: ControlClient, scripts: Sequence[str]) -> list[str]:
        """The ids of one rollout per script."""
        tasks: list[dict[str, Any]] = [{"script": script, "answer": 7.0} for script in scripts]
        slots = range(self.groups, self.groups + len(tasks))
        self.groups += len(tasks)
        groups = await client.create_groups(
            {"kind": "train", "step": 0, "slot": slot, "size": 1, "task": task}
            for slot, task in zip(slots, tasks, strict=True)
        )
        return [group.rollouts[0].rollout_id for group in groups]

    async def ended(self, client: ControlClient, ids: Sequence[str]) -> list[Rollout]:
        found: dict[str, Rollout] = {}
        cursor = 0
        async with asyncio.timeout(LIMIT_S):
            while not found.keys() >= set(ids):
                if not self.controller.runs:
                    raise RuntimeError(f"the controller has ended: {self.controller.tail()}")
                rollouts, cursor = await client.rollouts(after=cursor, states=TERMINAL, wait_s=2)
                found |= {rollout.rollout_id: rollout for rollout in rollouts}
        return [found[one] for one in ids]

    def judge(self, case: Case, rollout: Rollout, *, first_attempt: bool = True) -> None:
        """Graded as it lies, in its first attempt, and never void."""
        void = rollout.reward is None or rollout.failure is FailureClass.INFRASTRUCTURE
        if void or (first_attempt and rollout.attempt != 1):
            self.fault(case, f"{rollout.state} in attempt {rollout.attempt}, reward {rollout.reward}: {rollout.reason}")
        elif case.files is not None and rollout.reward != 7.0 + case.files / 8:
            self.fault(case, f"reward {rollout.reward} for {case.files} files")
        elif not case.ends and rollout.failure is not FailureClass.AGENT:
            self.fault(case, f"{rollout.state}: nothing has ended it")
        else:
            self.graded += 1

    def fault(self, case: Case, what: str) -> None:
        self.faults.append(f"{self.name}: {case.script[:100]!r}: {what}")


def leftovers(folder: Path, *, small: bool = False) -> tuple[str, list[str]]:
    """A line for people, and the faults in words. A `small` one has the second part only."""
    lines, faults = [], []
    sieges: list[tuple[str, dict[str, Any]]] = [("local", {})]
    if shutil.which("bwrap"):
        sieges.append(("sandbox", {"sandbox": "bubblewrap"}))
    else:
        lines.append("sandbox skipped: bubblewrap is not installed")
    for name, harness in sieges:
        siege = Siege(name, folder / name, harness)
        line = _besieged(siege, small=small)
        lines.append(f"{name}: {line}")
        faults += siege.faults
    line, found = (f"pods: {PODS}", []) if small else _pods()
    return "; ".join([*lines, line]), faults + found


def _pods() -> tuple[str, list[str]]:
    """The same in a cluster, where one is named or was set up already."""
    if not os.environ.get("KUBECONFIG") and not (cache() / "bin/kubelet").exists():
        return f"pods skipped: `make kube-smoke` makes a cluster, then {PODS}", []
    done = subprocess.run(PODS.split(), cwd=ROOT, capture_output=True, text=True, check=False)
    words = (done.stdout + done.stderr).strip().splitlines() or [""]
    return f"pods: {words[-1]}", [] if done.returncode == 0 else [f"pods: {line}" for line in words[-10:]]


def _besieged(siege: Siege, *, small: bool) -> str:
    before = {}
    try:
        siege.start()
        before = outside(siege.folder)
        asyncio.run(_all(siege, small=small))
        siege.end()
        wait_until_alone(siege.folder)
    except Exception as error:
        siege.faults.append(f"{siege.name}: {type(error).__name__}: {error}")
        siege.end()
    siege.faults += [f"{siege.name}: {path} has changed" for path in changed(before, outside(siege.folder)) if before]
    siege.faults += [f"{siege.name}: {what}" for what in unclean(siege.folder)]
    return f"{siege.graded} attempts graded as they lay"


def cases(name: str) -> list[Case]:
    sandboxed = name == "sandbox"
    return [
        *(Case(one.script, None if sandboxed else one.files) for one in LEFTOVERS if one.possible),
        *(Case(script, None, ends=False) for script in (*STAYS, FULL_DISK, OPEN_FILE)),
    ]


async def _all(siege: Siege, *, small: bool) -> None:
    every, innocent = cases(siege.name), Case(INNOCENT, 1)
    async with ControlClient(siege.url, control_key(SECRET.encode())) as client:
        if not small:
            await _one_by_one(siege, client, every, innocent)
        await _killed_meanwhile(siege, client, [*every, innocent])


async def _one_by_one(siege: Siege, client: ControlClient, every: list[Case], innocent: Case) -> None:
    """Those that stay until their time-out run side by side."""
    for case in every:
        for one in (case, innocent) if case.ends else ():
            (rollout,) = await siege.ended(client, await siege.queue(client, [one.script]))
            siege.judge(one, rollout)
    both = [one for case in every if not case.ends for one in (case, innocent)]
    ids = await siege.queue(client, [case.script for case in both])
    for case, rollout in zip(both, await siege.ended(client, ids), strict=True):
        siege.judge(case, rollout)
    if not siege.controller.runs:
        siege.faults.append(f"{siege.name}: the controller has ended: {siege.controller.tail()}")


async def _killed_meanwhile(siege: Siege, client: ControlClient, every: list[Case]) -> None:
    """A claim whose harness was not started yet when the controller was killed is void: that is another attempt."""
    ids = await siege.queue(client, [case.script for case in every])
    for part in (3, 2):
        await siege.ended(client, ids[: len(ids) // part])
        siege.controller.kill()
        siege.controller = siege.another_controller()
    for case, rollout in zip(every, await siege.ended(client, ids), strict=True):
        siege.judge(case, rollout, first_attempt=False)


def outside(folder: Path) -> dict[Path, tuple[int, int, int]]:
    """Mode, size and time of what agents must not change: /etc, and what lies beside the run folder."""
    found = {}
    for top in (Path("/etc"), folder):
        for path in [top, *top.iterdir()] if top.is_dir() else []:
            if path.suffix != ".out" and path.name != "run":
                facts = path.lstat()
                found[path] = (facts.st_mode, facts.st_size if path.is_file() else 0, facts.st_mtime_ns)
    return found


def changed(before: dict[Path, tuple[int, int, int]], after: dict[Path, tuple[int, int, int]]) -> list[Path]:
    return sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))


def unclean(folder: Path) -> list[str]:
    """What is left although every attempt is over: jobs, workspaces, attempts that nobody settled."""
    run = folder / "run"
    found = [f"{path} is left" for path in (run / "launcher/jobs").glob("*")]
    for attempt in (run / "attempts").glob("*/*"):
        with contextlib.suppress(NotADirectoryError):
            names = [path.name for path in attempt.iterdir()]
            if not (run / f"settled/{attempt.parent.name}.{attempt.name}").exists():
                found.append(f"{attempt} is not settled")
            if "workspace" in names:
                found.append(f"{attempt} still has its workspace")
    log = folder / "controller.out"
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return found + [line for line in lines if "Traceback" in line]
