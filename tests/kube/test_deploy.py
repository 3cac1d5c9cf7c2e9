"""deploy/ on a real cluster: its API server takes every object, the controller's rights are just those of the Role,
and gateway, controller and doctor work as they are deployed."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml

from leyden.client import ControlClient, control_key
from leyden.controller.backends.kubernetes.api import KubernetesApi
from leyden.doctor.cluster import RIGHTS
from leyden.records import Rollout
from tests.deploy.manifests import DEPLOY, Object, objects, one, pods
from tests.gateway.fake_vllm import FakeVllm, listening
from tests.kube.accounts import kubeconfig_of
from tests.kube.cluster import Cluster
from tests.kube.images import IMAGES
from tests.kube.runs import CALL, GRADE

pytestmark = [pytest.mark.kube, pytest.mark.timeout(600)]

VERBS = ("get", "list", "watch", "create", "update", "patch", "delete", "deletecollection")
RESOURCES = (
    *(("", r) for r in ("pods", "pods/log", "pods/exec", "secrets", "events", "configmaps", "services", "nodes")),
    *(("", r) for r in ("namespaces", "serviceaccounts", "serviceaccounts/token", "persistentvolumeclaims")),
    *(("batch", r) for r in ("jobs", "jobs/status", "cronjobs")),
    *(("apps", r) for r in ("deployments", "daemonsets")),
    *(("rbac.authorization.k8s.io", r) for r in ("roles", "rolebindings", "clusterroles", "clusterrolebindings")),
    ("networking.k8s.io", "networkpolicies"),
)
SECRET = "d" * 40
TASK = {"prompt": "p", "files": {"words.txt": "0.25\n"}}
IMAGE = IMAGES["leyden_image"].name


@pytest.fixture(scope="module")
def suffix() -> str:
    """Of the namespaces, so that a cluster that was given keeps its own."""
    return uuid.uuid4().hex[:8]


def moved(things: list[Object], suffix: str) -> list[Object]:
    """The objects in namespaces of the test's own."""
    text = json.dumps(things)
    for name in ("leyden-rollouts", "leyden"):
        for field in ("namespace", "kubernetes.io/metadata.name"):
            text = text.replace(f'"{field}": "{name}"', f'"{field}": "{name}-{suffix}"')
    changed: list[Object] = json.loads(text)
    for thing in changed:
        if thing["kind"] == "Namespace":
            thing["metadata"]["name"] += f"-{suffix}"
    return changed


def apply(kube: Cluster, things: list[Object], *options: str) -> None:
    kube.kubectl("apply", *options, "-f", "-", stdin=yaml.safe_dump_all(things))


@pytest.fixture(scope="module")
def namespaces(kube: Cluster, suffix: str) -> Iterator[tuple[str, str]]:
    """Leyden's and the attempts' namespace as deploy/ makes them, with the rights."""
    names = f"leyden-{suffix}", f"leyden-rollouts-{suffix}"
    things = [t for t in moved(objects("base", "doctor"), suffix) if t["kind"] in ("Namespace", "ServiceAccount")]
    things += [t for t in moved(objects("base", "doctor"), suffix) if t["kind"] in ("Role", "RoleBinding")]
    try:
        apply(kube, things)
        yield names
    finally:
        kube.kubectl("delete", "namespace", *names, "--wait=false", "--ignore-not-found")


def rendered(kube: Cluster, name: str) -> list[Object]:
    return list(yaml.safe_load_all(kube.kubectl("kustomize", str(DEPLOY / name))))


@pytest.mark.parametrize("name", ["base", "doctor"])
def test_the_api_server_takes_every_object(kube: Cluster, namespaces: Any, suffix: str, name: str) -> None:
    """As kustomize makes them; the generated ConfigMap holds the run file."""
    things = rendered(kube, name)
    listed = {(t["kind"], t["metadata"]["name"]) for t in objects(name)}
    generated = {("ConfigMap", "leyden-run")} if name == "base" else set()
    assert {(t["kind"], t["metadata"]["name"]) for t in things} == listed | generated
    if generated:
        held = one(things, "ConfigMap", "leyden-run")["data"]
        assert held == {f: (DEPLOY / "base" / f).read_text() for f in ("run.yaml", "tasks.jsonl", "grade.py")}
    for template in pods(things).values():
        assert [c["image"] for c in template["spec"]["containers"]] == ["registry.example/leyden:0.1.0"]
    apply(kube, moved(things, suffix), "--dry-run=client")
    apply(kube, moved(things, suffix), "--dry-run=server")


async def test_rights_are_exactly_those_of_the_backend(
    kube: Cluster, namespaces: tuple[str, str], tmp_path: Path
) -> None:
    """Asked with the service account's own token, in its own namespace, the attempts' and another one."""
    own, rollouts = namespaces
    config = kubeconfig_of(kube, own, "leyden-controller", tmp_path)
    for namespace, expected in ((rollouts, set(RIGHTS)), (own, set()), ("kube-system", set())):
        async with await KubernetesApi.connect(namespace, config) as api:
            allowed = {
                (verb, group, resource)
                for verb, (group, resource) in product(VERBS, RESOURCES)
                if await api.allowed(verb, group, resource)
            }
        assert allowed == expected, namespace


def run_file(kube: Cluster, rollouts: str, engine: str, port: int) -> dict[str, Any]:
    """That of deploy/ with what this cluster has: the host's address for a service, busybox for an agent."""
    document: dict[str, Any] = yaml.safe_load((DEPLOY / "base" / "run.yaml").read_text())
    document["model"] = {"path": "/leyden/examples/micro_swe/base", "renderer": "qwen3", "context_tokens": 448}
    document["engine"]["urls"] = [engine]
    document["harness"] = {"command": ["sh", "-c", f"{CALL} > /dev/null && cp words.txt score"], "timeout_s": 60}
    document["grader"] = {"command": ["sh", "-c", GRADE]}
    document["gateway"] |= {"port": port, "url": f"http://{kube.host}:{port}"}
    document["kubernetes"] |= {"namespace": rollouts, "image": kube.busybox, "keeper_image": IMAGE, "resources": {}}
    return document


def deployed(kube: Cluster, suffix: str, folder: Path, document: dict[str, Any], *names: str) -> list[Object]:
    """deploy/ in this cluster, which has no services, no registry and no storage classes."""
    things = moved([t for name in names for t in rendered(kube, name)], suffix)
    for thing in things:
        if thing["kind"] == "ConfigMap":
            thing["data"] |= {"run.yaml": yaml.safe_dump(document), "tasks.jsonl": json.dumps(TASK)}
        if thing["kind"] == "PersistentVolumeClaim":
            thing["spec"] |= {"storageClassName": "", "volumeName": f"{thing['metadata']['name']}-{suffix}"}
    for name, template in pods(things).items():
        (container,) = template["spec"]["containers"]
        container["image"] = IMAGE
        container["resources"]["requests"] = {"cpu": "10m", "memory": "64Mi"}
        container["env"].append({"name": "HOME", "value": "/tmp"})
        if name != "leyden-controller":
            template["spec"]["hostNetwork"] = True
            for port in container.get("ports", ()):
                port["containerPort"] = document["gateway"]["port"]
    return [*things, *volumes(things, folder)]


def volumes(things: list[Object], folder: Path) -> list[Object]:
    made = []
    for claim in (t for t in things if t["kind"] == "PersistentVolumeClaim"):
        path = folder / claim["metadata"]["name"]
        path.mkdir()
        path.chmod(0o777)
        spec = {
            "capacity": claim["spec"]["resources"]["requests"],
            "accessModes": ["ReadWriteOnce"],
            "hostPath": {"path": str(path)},
            "claimRef": {"name": claim["metadata"]["name"], "namespace": claim["metadata"]["namespace"]},
        }
        metadata = {"name": claim["spec"]["volumeName"]}
        made.append({"apiVersion": "v1", "kind": "PersistentVolume", "metadata": metadata, "spec": spec})
    return made


async def test_a_rollout_and_the_doctor_as_they_are_deployed(
    kube: Cluster, namespaces: tuple[str, str], suffix: str, leyden_image: str, tmp_path: Path
) -> None:
    """From the secret to a reward, with the pods' own users, rights and read-only file systems; the steps of
    docs/kubernetes.md."""
    own, rollouts = namespaces
    assert kube.state is not None
    folder = kube.state / f"deploy-{suffix}"
    folder.mkdir(mode=0o755)
    kube.kubectl("create", "secret", "generic", "leyden", "-n", own, f"--from-literal=secret={SECRET}")

    def describe() -> str:
        logs = [kube.kubectl("logs", "-n", own, name, "--tail=40", check=False) for name in LOGS]
        return "\n".join([kube.kubectl("get", "pods,jobs", "-A"), kube.kubectl("describe", "pods", "-n", own), *logs])

    fake = FakeVllm()
    async with listening(fake):
        document = run_file(kube, rollouts, fake.url, 20_000 + os.getpid() % 10_000)
        apply(kube, deployed(kube, suffix, folder, document, "base"))
        gateway = ("deployment", "leyden-gateway", "-n", own)
        await until(lambda: kube.get(*gateway)["status"].get("readyReplicas"), describe)
        async with ControlClient(document["gateway"]["url"], control_key(SECRET.encode())) as client:
            rollout = await first_rollout(client, describe)
        assert (rollout.state, rollout.reward, rollout.turns) == ("succeeded", 0.25, 1), describe()
        assert [path for path, _ in fake.asked] == ["/inference/v1/generate"]
        evaluated = await asyncio.to_thread(evaluate, document, tmp_path)
        results = [json.loads(path.read_text()) for path in (tmp_path / "first").rglob("result.json")]
        assert [(r["rewarded"], r["mean_reward"]) for r in results] == [(1, 0.25)], evaluated
        apply(kube, deployed(kube, suffix, folder, document, "doctor"))
        job = ("job", "leyden-doctor", "-n", own)
        await until(lambda: kube.get(*job)["status"].get("conditions"), describe)
        lines = kube.kubectl("logs", "-n", own, "job/leyden-doctor").splitlines()
        levels = {line[9:21].strip(): line.split()[0] for line in lines}
        assert levels == CHECKS | {"egress": "warning", "training": "skipped"}, "\n".join(lines)
        kube.kubectl("delete", "-n", own, "deployment/leyden-controller", "--timeout=60s")
        await until(lambda: not kube.get("jobs,pods,secrets", "-n", rollouts, "-l", "leyden/run")["items"], describe)


LOGS = ("deployment/leyden-gateway", "deployment/leyden-controller", "job/leyden-doctor")
CHECKS = dict.fromkeys(
    (
        *("run file", "folder", "data", "templates", "renderer", "template", "engine", "gateway", "keys", "cluster"),
        *("rights", "own gateway", "image", "reach", "pod key", "egress", "harness", "grader"),
    ),
    "ok",
)


def evaluate(document: dict[str, Any], folder: Path) -> str:
    """`leyden eval` from this machine, with the deployed gateway and its engines."""
    (folder / "tasks.jsonl").write_text(json.dumps(TASK))
    (folder / "run.yaml").write_text(yaml.safe_dump(document | {"model": {**document["model"], "path": "none"}}))
    command = [sys.executable, "-m", "leyden", "eval", str(folder / "run.yaml"), "--split", "train", "run_dir=first"]
    done = subprocess.run(
        command, env=os.environ | {"LEYDEN_SECRET": SECRET}, capture_output=True, text=True, timeout=120, check=False
    )
    return done.stdout + done.stderr


async def first_rollout(client: ControlClient, describe: Callable[[], str]) -> Rollout:
    """One of the example's kind, when it is over."""
    spec = {"kind": "eval", "step": 1, "slot": 1, "size": 1, "task": TASK}
    (group,) = await client.create_groups([spec])
    end, rollout = time.monotonic() + 120, group.rollouts[0]
    while not rollout.state.terminal:
        assert time.monotonic() < end, describe()
        await asyncio.sleep(0.5)
        rollout = await client.rollout(rollout.rollout_id)
    return rollout


async def until(condition: Callable[[], Any], describe: Callable[[], str]) -> None:
    end = time.monotonic() + 120
    while not await asyncio.to_thread(condition):
        assert time.monotonic() < end, describe()
        await asyncio.sleep(0.5)
