"""The example micro_swe with its harness in Jobs: `leyden train` as it is, with the example's other run file."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import subprocess
import sys
import tarfile
import time
from collections import Counter
from importlib import metadata
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from leyden.controller.backends.kubernetes.api import JOBS, SECRETS, KubernetesApi
from leyden.records import Model, Rollout
from leyden.store import Store
from leyden.trainer.metrics_log import read_metrics
from leyden.types import TERMINAL, RolloutState, Turn
from tests.kube.cluster import Cluster
from tests.kube.observer import Observer
from tests.kube.rootfs import REPOSITORY

EXAMPLE = REPOSITORY / "examples" / "micro_swe"
sys.path.insert(0, str(EXAMPLE))

import demo  # noqa: E402
import grade  # noqa: E402

pytestmark = [pytest.mark.kube, pytest.mark.timeout(1800)]
GROUPS, SIZE = 2, 4
LIMIT_S = 1200


@pytest.fixture
def overrides(kube: Cluster, namespace: str, agent_image: str, tmp_path: Path) -> list[str]:
    """What a user says of this cluster, and one short step.

    Cooler sampling lets more rollouts pass; by the entropy term the step learns even where all of a group
    earn the same.
    """
    data = tmp_path / "data"
    counts = ["--train", "8", "--validation", "2", "--test", "2"]
    subprocess.run([sys.executable, EXAMPLE / "tasks.py", "--out", data, *counts], check=True, capture_output=True)
    return [
        f"run_dir={tmp_path / 'run'}",
        f"data.train={data / 'train.jsonl'}",
        f"data.validation={data / 'validation.jsonl'}",
        f"gateway.host={kube.host}",
        "gateway.port=0",
        f"kubernetes.image={agent_image}",
        f"kubernetes.namespace={namespace}",
        f"kubernetes.kubeconfig={kube.kubeconfig}",
        "kubernetes.resources.requests={cpu: 100m, memory: 128Mi}",
        "controller.concurrency=4",
        "harness.timeout_s=600",
        "trainer.steps=1",
        f"trainer.groups_per_step={GROUPS}",
        f"trainer.group_size={SIZE}",
        "sampling.temperature=0.6",
        "algorithm.entropy_coef=0.001",
        "workspace.keep=all",
        "eval.at_start=false",
        "eval.at_end=false",
    ]


async def train(overrides: list[str], output: Path) -> int | None:
    """Its exit status."""
    command = [sys.executable, "-m", "leyden", "train", str(EXAMPLE / "kubernetes.yaml"), *overrides]
    environment = os.environ | {"LEYDEN_SECRET": "m" * 40}
    with output.open("wb") as file:
        process = await asyncio.create_subprocess_exec(*command, env=environment, stdout=file, stderr=file)
        try:
            async with asyncio.timeout(LIMIT_S):
                await process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            await process.wait()
    return process.returncode


async def test_mini_in_the_image_is_as_its_wheel_recorded_it(kube: Cluster, namespace: str, agent_image: str) -> None:
    """Its console scripts aside, which an installer writes."""
    lines = [
        "import base64, hashlib, json",
        "from importlib import metadata",
        "from pathlib import Path",
        inspect.getsource(demo.changed_files),
        "mini = metadata.distribution('mini-swe-agent')",
        "print(json.dumps([mini.version, [f for f in changed_files(mini) if not f.startswith('..')]]))",
    ]
    container = {"name": "look", "image": agent_image, "command": ["python3", "-c", "\n".join(lines)]}
    spec = {"restartPolicy": "Never", "containers": [container]}
    kube.apply({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "look"}, "spec": spec}, namespace=namespace)
    end = time.monotonic() + 120
    while (phase := kube.get("pod", "look", "-n", namespace)["status"].get("phase")) in (None, "Pending", "Running"):
        assert time.monotonic() < end, phase
        await asyncio.sleep(0.5)
    printed = kube.kubectl("logs", "look", "-n", namespace)
    assert phase == "Succeeded", printed
    assert json.loads(printed) == [metadata.version("mini-swe-agent"), []]


async def test_one_step_of_training(
    api: KubernetesApi, observer: Observer, overrides: list[str], agent_image: str, tmp_path: Path
) -> None:
    output, run_dir = tmp_path / "output.txt", tmp_path / "run"
    assert await train(overrides, output) in (0, 3), written(output)  # 3: no reward of the one step differed
    rollouts, turns, model = recorded(run_dir)
    assert len(rollouts) == GROUPS * SIZE
    for rollout in rollouts:
        assert rollout.state in (RolloutState.SUCCEEDED, RolloutState.FAILED), rollout
        assert rollout.reward == graded_here(run_dir, rollout), rollout
    attempts = {f"{r.rollout_id}.{n}" for r in rollouts for n in range(1, r.attempt + 1)}
    jobs = [c.object for c in observer.last.values() if c.kind == JOBS and c.object]
    made = Counter(job["metadata"]["labels"]["leyden/job"] for job in jobs)
    assert {job: n for job, n in made.items() if ".grade" not in job} == dict.fromkeys(attempts, 1)
    assert {f"{r.rollout_id}.{r.attempt}.grade1" for r in rollouts} <= set(made)
    assert {c["image"] for job in jobs for c in job["spec"]["template"]["spec"]["containers"]} == {agent_image}

    assert {t.rollout_id for t in turns} == {r.rollout_id for r in rollouts}
    for turn in turns:
        assert turn.logprobs_T is not None and len(turn.logprobs_T) == len(turn.sampled_T) > 0
        assert [span.version for span in turn.spans] == [0]

    lines = read_metrics(run_dir / "metrics.jsonl")
    assert [(line["event"], line["version"]) for line in lines] == [
        ("start", 0),
        ("publish", 0),
        ("step", 1),
        ("publish", 1),
        ("checkpoint", 1),
    ]
    step = lines[2]
    assert (step["rollouts"], step["excluded"], step["turns"]) == (len(rollouts), {}, len(turns))
    assert step["max_logprob_diff"] < 1e-3
    assert model.version == 1
    before, after = load_file(EXAMPLE / "base/model.safetensors"), load_file(weights_of(run_dir))
    assert any((before[name] != after[name]).any() for name in before)

    await observer.until(lambda: all(c.event == "DELETED" for c in observer.last.values()), 120)
    async with asyncio.timeout(120):
        while (await api.list_all(SECRETS, labels="leyden/run"))[0]:  # noqa: ASYNC110  (asks the cluster)
            await asyncio.sleep(0.2)


def recorded(run_dir: Path) -> tuple[list[Rollout], list[Turn], Model]:
    """Rollouts that have ended, their turns, and the model, as the gateway left them."""
    store = Store(run_dir / "store.sqlite")
    try:
        rollouts = store.rollouts.after(0, sorted(TERMINAL), 1000)
        turns = list(store.turns.of_rollouts([r.rollout_id for r in rollouts]))
        return rollouts, turns, store.models()["micro"]
    finally:
        store.close()


def graded_here(run_dir: Path, rollout: Rollout) -> float:
    """The reward that what the harness left earns outside of the cluster."""
    attempt = run_dir / "attempts" / rollout.rollout_id / str(rollout.attempt)
    with tarfile.open(attempt / "workspace.tar.gz") as archive:
        archive.extractall(attempt / "workspace", filter="data")
    return grade.grade(rollout.task, attempt / "workspace")


def written(path: Path) -> str:
    return path.read_text(errors="replace")


def weights_of(run_dir: Path) -> Path:
    (path,) = (run_dir / "checkpoints").glob("step-*1/*.safetensors")
    return path
