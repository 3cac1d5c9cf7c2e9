"""`leyden train` as a user runs it: real processes, a tiny random model, a harness of the standard library.

One run meets every way to die in the middle of a step. Each time the same command goes on.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import yaml

from leyden.trainer.metrics_log import current, read_metrics
from leyden.trainer.tasks import tasks_for_step

AGENT = """
import json, os, pathlib, sys, time, urllib.request

task = json.load(open(os.environ["LEYDEN_TASK"]))
messages = [{"role": "user", "content": task["question"]}]
for _ in range(2):
    body = {"model": os.environ["LEYDEN_MODEL"], "messages": messages, "max_tokens": 8}
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    reply = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
    messages += [{"role": "assistant", "content": reply["content"] or ""}, {"role": "user", "content": "go on"}]
    while pathlib.Path(sys.argv[1], "hold", os.environ["LEYDEN_ROLLOUT_ID"][:11]).exists():
        time.sleep(0.02)
pathlib.Path("answer.txt").write_text(json.dumps(messages))
"""
GRADER = """
def score(task, workspace):
    "The second member of each group passes: every step has something to learn."
    assert (workspace / "answer.txt").read_text().startswith("[")
    return float(workspace.parent.parent.name.endswith("1"))
"""
STEPS, GROUPS, SIZE, TASKS = 5, 2, 2, 5


@pytest.fixture
def folder(tmp_path: Path, tiny_model_path: Path) -> Path:
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "hold").mkdir()
    (tmp_path / "grade.py").write_text(GRADER)
    for name, count in (("train", TASKS), ("val", 2)):
        rows = [json.dumps({"n": n, "question": f"the dog {n}"}) for n in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    settings = {
        "run_dir": "run",
        "model": {"path": str(tiny_model_path), "context_tokens": 256, "renderer": "qwen3"},
        "data": {"train": "train.jsonl", "validation": "val.jsonl"},
        "harness": {"command": [sys.executable, str(tmp_path / "agent.py"), str(tmp_path)], "max_attempts": 5},
        "grader": {"function": "grade:score"},
        "trainer": {"steps": STEPS, "groups_per_step": GROUPS, "group_size": SIZE, "checkpoint_every": 1},
        "optimizer": {"lr": 1e-3},
        "embedded": {"device": "cpu", "threads": 1, "slots": 4},
        "eval": {"at_start": True, "at_end": True},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    return tmp_path


class Train:
    """One `leyden train` process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.output = folder / "output.txt"
        self.output.write_text("")
        command = [sys.executable, "-m", "leyden", "train", "run.yaml"]
        self.process = subprocess.Popen(
            command, cwd=folder, stdout=self.output.open("w"), stderr=subprocess.STDOUT, text=True
        )

    def until(self, condition: Callable[[], bool], limit_s: float = 300.0) -> None:
        end = time.monotonic() + limit_s
        while not condition():
            assert self.process.poll() is None, f"ended early: {self.output.read_text()}"
            assert time.monotonic() < end, f"nothing after {limit_s} s: {self.output.read_text()}"
            time.sleep(0.02)

    @contextlib.contextmanager
    def within(self, step: int) -> Iterator[None]:
        """Harnesses of this step are there, and none ends before the block does."""
        name = f"train-{step:05d}"
        (self.folder / "hold" / name).touch()
        self.until(lambda: any((self.folder / "run/attempts").glob(f"{name}-*/*/harness.log")))
        yield
        (self.folder / "hold" / name).unlink()

    def child(self, name: str) -> psutil.Process:
        """The gateway or controller that this trainer started."""
        found = [c for c in psutil.Process(self.process.pid).children() if name in c.cmdline()]
        assert len(found) == 1, [c.cmdline() for c in found]
        return found[0]

    def end(self) -> int:
        return self.process.wait(timeout=300)


def processes_of(folder: Path) -> list[list[str]]:
    """Command lines of processes that run in or for `folder`."""
    found = []
    for process in psutil.process_iter():
        try:
            text = [*process.cmdline(), process.cwd()]
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        if process.pid != os.getpid() and any(str(folder) in part for part in text):
            found.append(text)
    return found


def wait_until_alone(folder: Path, limit_s: float = 200.0) -> None:
    end = time.monotonic() + limit_s
    while left := processes_of(folder):
        assert time.monotonic() < end, f"still running: {left}"
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_process_is_killed_once_in_the_middle_of_a_step(folder):
    train = Train(folder)
    with train.within(1):
        train.process.kill()
        train.end()
    wait_until_alone(folder)

    train = Train(folder)
    with train.within(2):
        train.child("gateway").kill()
        assert train.end() == 1, train.output.read_text()
    assert "error: the gateway was killed by signal 9; its log is" in train.output.read_text()
    wait_until_alone(folder)

    train = Train(folder)
    with train.within(3):
        train.child("controller").kill()
        assert train.end() == 1, train.output.read_text()
    assert "error: the controller was killed by signal 9; its log is" in train.output.read_text()

    train = Train(folder)  # the launcher waits a minute for a controller to come back, so harnesses go on
    with train.within(4):
        second = subprocess.run(
            [sys.executable, "-m", "leyden", "train", "run.yaml"],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
        assert second.returncode == 1
        assert f"is in use by another `leyden train` (pid {train.process.pid})" in second.stderr
        train.process.send_signal(signal.SIGINT)
        assert train.end() == 130, train.output.read_text()
    assert "stopped; resume with: leyden train run.yaml" in train.output.read_text()
    wait_until_alone(folder)

    train = Train(folder)
    assert train.end() == 0, train.output.read_text()
    wait_until_alone(folder)
    check_finished(folder / "run")

    shown = leyden(folder, "show", "run", "train-00001-0000-000")
    assert "| sample 1\n" in shown
    assert "\n| <|im_start|>user\n" in shown
    assert "1 samples: turns " in shown
    document = json.loads(leyden(folder, "show", "run", "--json"))
    assert [line["step"] for line in document["steps"]] == [1, 2, 3, 4, 5]
    assert [line["step"] for line in document["evaluations"]][-1] == 5
    assert "step 5" in leyden(folder, "show", "run")
    assert "rollouts, 1.00 samples each; forks repeat 0 of " in leyden(folder, "show", "run", "--forks")
    evaluated = leyden(folder, "eval", "run.yaml", "-k", "2", "--limit", "1")
    assert "evaluating " + str(folder / "run/checkpoints/step-000005") + " on 1 tasks x 2" in evaluated
    (result,) = (folder / "run/eval").glob("*-step-000005/result.json")
    document = json.loads(result.read_text())
    assert (document["version"], document["rewarded"]) == (5, 2)
    assert (document["pass"][0]["k"], document["pass"][0]["value"]) == (2, 1.0)
    wait_until_alone(folder)


def leyden(folder: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "leyden", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout


def check_finished(run: Path) -> None:
    """Each step trained its own tasks once, each rollout once, and the numbers add up."""
    with sqlite3.connect(run / "store.sqlite") as store:
        groups = store.execute(
            "SELECT step, slot, task, group_id FROM groups WHERE kind = 'train' AND state = 'consumed' ORDER BY 1, 2"
        ).fetchall()
        states = store.execute(
            "SELECT g.group_id, r.state, COUNT(*) FROM groups g JOIN rollouts r USING (group_id) "
            "WHERE g.state = 'consumed' AND g.kind = 'train' GROUP BY 1, 2"
        ).fetchall()
        active = store.execute("SELECT COUNT(*) FROM groups WHERE state = 'active'").fetchone()[0]
    expected = [
        (step, slot, index)
        for step in range(1, STEPS + 1)
        for slot, index in enumerate(tasks_for_step(TASKS, step, GROUPS, seed=0, shuffle=True))
    ]
    assert [(step, slot, json.loads(task)["n"]) for step, slot, task, _ in groups] == expected
    assert sorted(states) == sorted((group_id, "succeeded", SIZE) for *_, group_id in groups)
    assert active == 0

    lines = read_metrics(run / "metrics.jsonl")
    steps = [line for line in current(lines) if line["event"] in ("step", "skip")]
    assert [line["step"] for line in steps] == list(range(1, STEPS + 1))
    assert all(line["rollouts"] == GROUPS * SIZE and not line["excluded"] for line in steps)
    assert [e["step"] for e in current(lines) if e["event"] == "eval"] == [0, STEPS]
    summary = json.loads((run / "summary.json").read_text())
    assert summary["policy_version"] == STEPS
    assert summary["counts"]["rollouts"] == STEPS * GROUPS * SIZE
    assert summary["lineages"] == 5
    assert summary["max_logprob_diff"] < 1e-4
    assert [p.name for p in sorted((run / "checkpoints").iterdir())] == ["step-000004", "step-000005"]
