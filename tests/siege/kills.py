"""Runs whose programs are killed at random, until they are done all the same.

    train       one `leyden train`, which starts gateway and controller; the same command goes on after each kill
    services    gateway, controller and trainer side by side; whichever dies is started again

Each finished run trained each task of each step once, at the version that the step is sampled at, and gave each rollout
the reward that its harness earned. The harness tries nothing again: a call that is refused ends it.
"""

from __future__ import annotations

import contextlib
import json
import random
import signal
import sqlite3
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import yaml

from leyden.trainer.metrics_log import current, read_metrics
from leyden.trainer.tasks import tasks_for_step
from tests.siege.programs import Program, free_port, of_folder, until, wait_until_alone

AGENT = """
import json, os, pathlib, random, time, urllib.request

task = json.load(open(os.environ["LEYDEN_TASK"]))
messages = [{"role": "user", "content": task["question"]}]
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
for _ in range(3):
    body = {"model": os.environ["LEYDEN_MODEL"], "messages": messages, "max_tokens": 6}
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    reply = json.load(opener.open(request))["choices"][0]["message"]
    messages += [{"role": "assistant", "content": reply["content"] or ""}, {"role": "user", "content": "go on"}]
    time.sleep(random.random() / 4)
pathlib.Path("answer.txt").write_text("done")
"""
GRADER = """
def score(task, workspace):
    "0 for a harness that did not get to its end; else the second member of each group is right."
    if not (workspace / "answer.txt").exists():
        return -1.0
    return float(workspace.parent.parent.name.endswith("1"))
"""
STEPS, GROUPS, SIZE, TASKS = 9, 2, 2, 5
LIFE_S = (0.0, 6.0)
VICTIMS = ("gateway", "controller", "launcher", "trainer")
RUN_S = 1800.0


@dataclass
class Campaign:
    """`kills` by victim; `faults` in words."""

    runs: int = 0
    kills: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


def campaign(mode: str, count: int, seed: int, model: Path, root: Path, say: Callable[[str], None]) -> Campaign:
    """`count` kills over as many runs as they take; `mode` is `train` or `services`."""
    found, rng = Campaign(), random.Random(f"{seed}/{mode}")
    while found.kills.total() < count and not found.faults:
        found.runs += 1
        folder = root / f"{mode}-{found.runs}"
        prepare(folder, model, seed=seed + found.runs)
        one = _one_train if mode == "train" else _services
        try:
            one(folder, count - found.kills.total(), rng, found)
            wait_until_alone(folder)
            found.faults += [f"{folder}: {fault}" for fault in faults_of(folder / "run", seed + found.runs)]
        except Exception as error:
            found.faults.append(f"{folder}: {type(error).__name__}: {error}")
            _end_all(folder)
        say(f"{mode}: {found.kills.total()} of {count} kills, {found.runs} runs, {len(found.faults)} faults")
    return found


def prepare(folder: Path, model: Path, seed: int) -> None:
    folder.mkdir(parents=True)
    (folder / "agent.py").write_text(AGENT)
    (folder / "grade.py").write_text(GRADER)
    rows = [json.dumps({"n": n, "question": f"the dog {n}"}) for n in range(TASKS)]
    (folder / "train.jsonl").write_text("\n".join(rows))
    settings = {
        "run_dir": "run",
        "model": {"path": str(model), "context_tokens": 256, "renderer": "qwen3"},
        "data": {"train": "train.jsonl"},
        "harness": {"command": [sys.executable, str(folder / "agent.py")], "max_attempts": 3, "retry_backoff_s": 0.1},
        "grader": {"function": "grade:score"},
        "trainer": {
            "steps": STEPS, "groups_per_step": GROUPS, "group_size": SIZE, "checkpoint_every": 3, "seed": seed,
        },
        "optimizer": {"lr": 1e-3},
        "embedded": {"device": "cpu", "threads": 1, "slots": 4},
        "gateway": {"port": free_port()},
    }  # fmt: skip
    (folder / "run.yaml").write_text(yaml.safe_dump(settings))


def _one_train(folder: Path, most: int, rng: random.Random, found: Campaign) -> None:
    end, before = time.monotonic() + RUN_S, found.kills.total()
    while not _life(folder, most - (found.kills.total() - before), rng, found):
        if time.monotonic() > end:
            raise TimeoutError(f"no end after {RUN_S:g} s: {(folder / 'train.out').read_text()[-2000:]}")


def _life(folder: Path, most: int, rng: random.Random, found: Campaign) -> bool:
    """One `leyden train`, until a kill ends it or it is done: whether it is done."""
    train, killed = Program(folder, "train", "train", "run.yaml"), ""
    while most > 0 and train.runs and killed in ("", "launcher"):
        until(lambda: not train.runs or _working(folder), f"nothing is running: {train.tail()}")
        _live(rng, lambda: train.runs)
        victim = rng.choice(VICTIMS)
        process = _process(train.process.pid) if victim == "trainer" else _of(folder, victim)
        if train.runs and process is not None and _kill(process):
            killed, most = victim, most - 1
            found.kills[victim] += 1
    until(lambda: not train.runs, f"a run whose {killed or 'life'} ended does not end: {train.tail()}", RUN_S)
    if train.process.returncode != 0 and killed in ("", "launcher"):
        raise RuntimeError(f"leyden train ended with {train.process.returncode}: {train.tail()}")
    return train.process.returncode == 0


def _services(folder: Path, most: int, rng: random.Random, found: Campaign) -> None:
    port = yaml.safe_load((folder / "run.yaml").read_text())["gateway"]["port"]
    there = [f"gateway.url=http://127.0.0.1:{port}", "controller.start=false"]
    commands = {
        "gateway": ["gateway", "run.yaml"],
        "controller": ["controller", "run.yaml", there[0]],
        "trainer": ["train", "run.yaml", *there],
    }
    programs = {name: Program(folder, name, *command) for name, command in commands.items()}
    end, kills, next_kill = time.monotonic() + RUN_S, 0, time.monotonic() + 10 * rng.random()
    try:
        while programs["trainer"].runs or programs["trainer"].process.returncode != 0:
            for name, program in programs.items():
                if not program.runs and (name != "trainer" or program.process.returncode != 0):
                    time.sleep(rng.random())
                    programs[name] = Program(folder, name, *commands[name])
            if kills < most and time.monotonic() > next_kill:
                victim = rng.choice(VICTIMS)
                process = _of(folder, victim) if victim == "launcher" else _process(programs[victim].process.pid)
                if process is not None and _kill(process):
                    kills += 1
                    found.kills[victim] += 1
                next_kill = time.monotonic() + (12 if victim == "trainer" else 4) * rng.random()
            if time.monotonic() > end:
                raise TimeoutError(f"no end after {RUN_S:g} s and {kills} kills: {programs['trainer'].tail()}")
            time.sleep(0.02)
    finally:
        for name in ("trainer", "controller", "gateway"):
            programs[name].end()


def _working(folder: Path) -> bool:
    return bool(_of(folder, "gateway") and _of(folder, "controller"))


def _of(folder: Path, name: str) -> psutil.Process | None:
    """The gateway, controller or launcher of a run folder."""
    word = "leyden_launcher" if name == "launcher" else name
    with contextlib.suppress(psutil.NoSuchProcess):  # it ended while it was looked at
        found = [p for p in of_folder(folder, word) if name == "launcher" or "leyden" in " ".join(p.cmdline())]
        return min(found, key=lambda p: p.create_time(), default=None)
    return None


def _process(pid: int) -> psutil.Process | None:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid)
    return None


def _live(rng: random.Random, runs: Callable[[], bool]) -> None:
    end = time.monotonic() + rng.uniform(*LIFE_S)
    while runs() and time.monotonic() < end:
        time.sleep(0.02)


def _kill(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        process.send_signal(signal.SIGKILL)
        return True
    return False


def _end_all(folder: Path) -> None:
    for process in of_folder(folder):
        _kill(process)


def faults_of(run: Path, seed: int) -> list[str]:
    """What is wrong with a finished run: steps, tasks, versions, rewards, attempts that somebody was scored for."""
    faults: list[str] = []
    with contextlib.closing(sqlite3.connect(run / "store.sqlite")) as store:
        groups = store.execute(
            "SELECT step, slot, task FROM groups WHERE kind = 'train' AND state = 'consumed' ORDER BY step, slot"
        ).fetchall()
        rollouts = store.execute(
            "SELECT r.rollout_id, r.state, r.reason, r.member, g.step, a.reward, a.min_version, a.max_version "
            "FROM rollouts r JOIN groups g USING (group_id) "
            "LEFT JOIN attempts a ON a.rollout_id = r.rollout_id AND a.attempt = r.attempt "
            "WHERE g.kind = 'train' AND g.state = 'consumed'"
        ).fetchall()
        active = store.execute("SELECT COUNT(*) FROM groups WHERE state = 'active'").fetchone()[0]
    expected = [
        (step, slot, task)
        for step in range(1, STEPS + 1)
        for slot, task in enumerate(tasks_for_step(TASKS, step, GROUPS, seed=seed, shuffle=True))
    ]
    trained = [(step, slot, json.loads(task)["n"]) for step, slot, task in groups]
    if trained != expected:
        faults.append(f"trained (step, slot, task) are {trained}, not {expected}")
    if active:
        faults.append(f"{active} groups are still active")
    for rollout_id, state, reason, member, step, reward, oldest, newest in rollouts:
        if state != "succeeded":
            faults.append(f"{rollout_id} {state}: {reason}")
        elif reward != float(member == 1):
            faults.append(f"{rollout_id} has reward {reward}")
        if (oldest, newest) != (step - 1, step - 1):
            faults.append(f"{rollout_id} of step {step} was sampled at versions {oldest} to {newest}")
    steps = [line["step"] for line in current(read_metrics(run / "metrics.jsonl")) if line["event"] in ("step", "skip")]
    if steps != list(range(1, STEPS + 1)):
        faults.append(f"metrics.jsonl has steps {steps}")
    return faults
