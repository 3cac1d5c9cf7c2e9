"""`leyden doctor` for runs in a cluster: what it finds on a real one, and that it leaves nothing there."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from leyden.controller.backends.kubernetes.manifest import TEMPLATE
from leyden.doctor.checkup import Checkup
from leyden.doctor.cluster import RIGHTS
from leyden.doctor.findings import Finding, Level
from leyden.run_file import load
from tests.kube.accounts import kubeconfig_of
from tests.kube.cluster import Cluster
from tests.kube.runs import CALL, GRADE

pytestmark = [pytest.mark.kube, pytest.mark.timeout(300)]

Make = Callable[..., Path]


@pytest.fixture
def make(kube: Cluster, namespace: str, python_image: str, tokenizer_path: Path, tmp_path: Path) -> Make:
    def write(**sections: Any) -> Path:
        (tmp_path / "train.jsonl").write_text('{"score": 0.5}\n')
        script = f"{CALL} && echo {{{{ task.score }}}} > score"
        document: dict[str, Any] = {
            "run_dir": "run",
            "model": {"path": str(tokenizer_path), "renderer": "qwen3", "context_tokens": 2000},
            "data": {"train": "train.jsonl"},
            "harness": {"command": ["sh", "-c", script], "timeout_s": 60},
            "grader": {"command": ["sh", "-c", GRADE]},
            "gateway": {"host": kube.host},
            "controller": {"backend": "kubernetes", "start_timeout_s": 60},
            "kubernetes": {
                "image": kube.busybox,
                "keeper_image": python_image,
                "namespace": namespace,
                "kubeconfig": str(kube.kubeconfig),
                "image_wait_s": 3,
            },
        }
        for name, section in sections.items():
            document[name] = document.get(name, {}) | section
        path = tmp_path / "run.yaml"
        path.write_text(yaml.safe_dump(document))
        return path

    return write


async def examine(
    run_file: Path, *overrides: str, secret: bytes = b"s" * 32, patience_s: float = 90
) -> dict[str, Finding]:
    parent = dict(os.environ)
    checkup = Checkup(load(run_file, list(overrides)), secret, parent, patience_s, print, lambda _: None)
    await checkup.run()
    return {f.check: f for f in checkup.findings}


@pytest.fixture
def nothing_left(kube: Cluster, namespace: str) -> Iterator[None]:
    """Whatever the doctor made is gone within a minute."""
    yield
    end = time.monotonic() + 60
    while found := kube.get("jobs,pods,secrets", "-n", namespace, "-l", "leyden/run")["items"]:
        assert time.monotonic() < end, [f"{thing['kind']} {thing['metadata']['name']}" for thing in found]
        time.sleep(0.5)


pytestmark += [pytest.mark.usefixtures("nothing_left")]

CLOSED = {
    "apiVersion": "networking.k8s.io/v1",
    "kind": "NetworkPolicy",
    "metadata": {"name": "agents"},
    "spec": {
        "podSelector": {"matchExpressions": [{"key": "leyden/rollout", "operator": "Exists"}]},
        "policyTypes": ["Ingress", "Egress"],
    },
}


async def test_a_run_that_is_well_but_for_its_open_network(kube: Cluster, namespace: str, make: Make) -> None:
    """The test bed enforces no NetworkPolicy: without one that is a problem, with one a warning."""
    found = await examine(make())
    assert {check: f.level.value for check, f in found.items() if f.level is not Level.OK} == {"egress": "problem"}
    api_server = f"{kube.host.replace('213', '214')}:443"
    assert found["egress"].what == f"pods also reach {api_server}: no NetworkPolicy is for them"
    assert found["rights"].what == f"all {len(RIGHTS)} that the controller uses in namespace {namespace}"
    assert found["image"].what.startswith("the cluster starts ")
    assert found["reach"].what.startswith(f"pods reach http://{kube.host}:")
    assert found["pod key"].what.endswith(" takes an agent's key from a pod")
    assert found["harness"].what == "model calls: 1 openai-chat; exit 0"
    assert found["grader"].what == "reward 0.5 for what the harness left"
    kube.apply(CLOSED, namespace=namespace)
    again = await examine(make())
    assert again["egress"].level is Level.WARNING
    assert again["egress"].what == f"pods also reach {api_server} under NetworkPolicy agents"


async def test_images_that_the_cluster_cannot_get(make: Make) -> None:
    found = await examine(make(kubernetes={"image": "testbed.local/missing:1"}))
    assert found["image"].what.startswith("testbed.local/missing:1: ErrImage") or "BackOff" in found["image"].what
    assert found["image"].advice.startswith("push it, correct kubernetes.image, or give the pods an imagePullSecret")
    assert {found[check].level for check in ("reach", "pod key", "egress", "harness", "grader")} == {Level.SKIPPED}


async def test_a_helper_image_without_python(kube: Cluster, make: Make) -> None:
    found = await examine(make(kubernetes={"keeper_image": kube.busybox}))
    assert found["image"].level is Level.OK
    assert found["reach"].level is Level.PROBLEM
    assert "python3" in found["reach"].what
    assert found["reach"].advice == "kubernetes.keeper_image must hold python3"


async def test_a_pod_that_no_node_takes(make: Make, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(TEMPLATE + "      nodeSelector: {disk: fast}\n")
    found = await examine(make(kubernetes={"template": "job.yaml"}), patience_s=3)
    assert found["image"].what.startswith("no pod of this run starts: Unschedulable: 0/1 nodes are available")
    assert found["harness"].level is Level.SKIPPED


async def test_a_gateway_that_pods_do_not_reach(kube: Cluster, make: Make) -> None:
    found = await examine(make(), "gateway.host=127.0.0.1")
    assert found["cluster"].what.startswith("gateway.host: '127.0.0.1' is this machine alone; give the address")
    found = await examine(make(), "gateway.host=127.0.0.1", f"kubernetes.gateway_url=http://{kube.host}:9")
    assert found["reach"].what.startswith(f"pods do not reach http://{kube.host}:")
    assert found["reach"].level is Level.PROBLEM
    assert found["harness"].level is Level.SKIPPED


async def test_a_gateway_in_use_and_one_with_another_secret(kube: Cluster, make: Make, tmp_path: Path) -> None:
    run_file = make()
    with leyden_gateway(run_file, kube.host) as url:
        found = await examine(run_file, f"gateway.url={url}")
        assert found["gateway"].what == f"{url} answers and takes this run's control key"
        assert (found["harness"].what, found["grader"].level) == ("model calls: 1 openai-chat; exit 0", Level.OK)
        found = await examine(run_file, f"gateway.url={url}", secret=b"x" * 32)
        assert found["gateway"].level is Level.PROBLEM


async def test_credentials_that_may_do_little(kube: Cluster, namespace: str, make: Make, tmp_path: Path) -> None:
    kube.kubectl("create", "serviceaccount", "stranger", "-n", namespace)
    config = kubeconfig_of(kube, namespace, "stranger", tmp_path)
    found = await examine(make(kubernetes={"kubeconfig": str(config)}))
    assert found["cluster"].level is Level.OK
    assert found["rights"].what == (
        f"missing in namespace {namespace}: jobs.batch: create, get, list, watch, patch, delete; pods: list, watch; "
        "pods/log: get; secrets: create, list, patch, delete; events: list, watch"
    )
    assert found["rights"].advice == "deploy/base/rbac.yaml has the Role that the controller needs"


async def test_a_cluster_that_does_not_answer(make: Make, tmp_path: Path) -> None:
    nowhere = {"clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:9"}}], "users": [], "contexts": []}
    nowhere |= {"contexts": [{"name": "x", "context": {"cluster": "c"}}], "current-context": "x"}
    (tmp_path / "nowhere").write_text(yaml.safe_dump({"apiVersion": "v1", "kind": "Config", **nowhere}))
    found = await examine(make(kubernetes={"kubeconfig": str(tmp_path / "nowhere")}))
    assert found["cluster"].what.startswith("GET /version: ClientConnectorError")
    assert found["cluster"].advice == "is the cluster up, and does kubernetes.kubeconfig (or KUBECONFIG) name it?"
    found = await examine(make(kubernetes={"kubeconfig": str(tmp_path / "none")}))
    assert found["cluster"].what.startswith("kubernetes.kubeconfig: ")


@contextlib.contextmanager
def leyden_gateway(run_file: Path, host: str) -> Iterator[str]:
    """A gateway of the run in a process of its own."""
    environment = os.environ | {"LEYDEN_SECRET": "s" * 32}
    command = [sys.executable, "-m", "leyden", "gateway", str(run_file)]
    announced = run_file.parent / "run" / "gateway.json"
    with subprocess.Popen(command, env=environment) as process:
        try:
            end = time.monotonic() + 30
            while not announced.exists():
                assert time.monotonic() < end
                time.sleep(0.1)
            yield json.loads(announced.read_text())["url"]
        finally:
            process.terminate()
