"""What deploy/ says is what Leyden needs, and no more."""

from __future__ import annotations

import fnmatch
import http.server
import json
import os
import re
import subprocess
import sys
import threading

import pytest

from leyden.controller.backends.kubernetes.manifest import manifest
from leyden.controller.backends.kubernetes.programs import Programs
from leyden.controller.backends.kubernetes.programs import pods as pods_of
from leyden.doctor.cluster import RIGHTS, restricts
from leyden.doctor.first_task import check_data, check_templates
from leyden.doctor.manifests import claim_of
from leyden.run_file import load
from tests.deploy.manifests import DEPLOY, kustomization, objects, one, pods

ALL = objects("base", "doctor")
ROOT = DEPLOY.parent


@pytest.fixture
def config():
    return load(DEPLOY / "base" / "run.yaml")


def test_the_controller_may_do_what_its_backend_does_and_nothing_else():
    """Least privilege."""
    rules = one(ALL, "Role", "leyden-controller")["rules"]
    granted = {
        (verb, group, resource)
        for rule in rules
        for verb in rule["verbs"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }
    assert granted == set(RIGHTS)
    assert not any(t["kind"].startswith("Cluster") for t in ALL)
    bound = {
        (subject["name"], b["roleRef"]["name"], b["metadata"]["namespace"])
        for b in ALL
        if b["kind"] == "RoleBinding"
        for subject in b["subjects"]
    }
    assert bound == {
        ("leyden-controller", "leyden-controller", "leyden-rollouts"),
        ("leyden-doctor", "leyden-controller", "leyden-rollouts"),
        ("leyden-doctor", "leyden-doctor", "leyden-rollouts"),
    }


@pytest.mark.parametrize("name", ["leyden-gateway", "leyden-controller", "leyden-doctor"])
def test_pods_are_unprivileged(name):
    """As the `restricted` pod security standard has it, and with a root file system that is only read."""
    spec = pods(ALL)[name]["spec"]
    user = int(re.search(r"--uid (\d+)", (DEPLOY / "Dockerfile").read_text())[1])
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["runAsUser"] == user
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in spec["containers"]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
        }  # fmt: skip
        assert {"cpu", "memory"} == set(container["resources"]["requests"])
        assert "memory" in container["resources"]["limits"]
    assert spec["automountServiceAccountToken"] is (name != "leyden-gateway")
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)


def test_no_secret_is_in_the_repository():
    """Keys come from Secrets that the user makes."""
    assert "Secret" not in {t["kind"] for t in ALL}
    for template in pods(ALL).values():
        (secret,) = [e for c in template["spec"]["containers"] for e in c["env"] if e["name"] == "LEYDEN_SECRET"]
        assert secret["valueFrom"] == {"secretKeyRef": {"name": "leyden", "key": "secret"}}


def test_the_network_policy_is_for_every_pod_of_an_attempt(config):
    """The labels that Leyden sets, whatever the template says; one port of the gateway, and DNS."""
    policy = one(ALL, "NetworkPolicy", "leyden-rollouts")
    claim = claim_of("r", {"prompt": "p", "files": {}})
    job = manifest(
        pods_of(config.kubernetes, config.gateway.max_workspace_bytes, "leyden-rollouts"),
        Programs(config, "run", "http://g").harness(claim),
    ).job
    assert restricts(policy, job["spec"]["template"]["metadata"]["labels"])
    assert policy["metadata"]["namespace"] == config.kubernetes.namespace
    assert policy["spec"]["ingress"] == []
    gateway, dns = policy["spec"]["egress"]
    assert gateway["ports"] == [{"protocol": "TCP", "port": config.gateway.port}]
    assert {p["port"] for p in dns["ports"]} == {53}
    (peer,) = gateway["to"]
    for name in ("leyden-gateway", "leyden-doctor"):
        labels = pods(ALL)[name]["metadata"]["labels"]
        assert peer["podSelector"]["matchLabels"].items() <= labels.items()
    controller = pods(ALL)["leyden-controller"]["metadata"]["labels"]
    assert not peer["podSelector"]["matchLabels"].items() <= controller.items()


def test_the_run_file_and_the_manifests_agree(config):
    gateway = pods(ALL)["leyden-gateway"]
    (container,) = gateway["spec"]["containers"]
    service = one(ALL, "Service", "leyden-gateway")
    assert config.gateway.url == f"http://leyden-gateway.leyden.svc:{config.gateway.port}"
    assert [p["containerPort"] for p in container["ports"]] == [config.gateway.port]
    assert [(p["port"], p["targetPort"]) for p in service["spec"]["ports"]] == [(config.gateway.port, "http")]
    assert service["spec"]["selector"].items() <= gateway["metadata"]["labels"].items()
    assert not service["spec"]["selector"].items() <= pods(ALL)["leyden-doctor"]["metadata"]["labels"].items()
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"] == {"path": "/health", "port": "http"}
    mounts = {m["mountPath"]: m["name"] for m in container["volumeMounts"]}
    assert str(config.run_dir).startswith("/var/lib/leyden/")
    assert mounts == {"/etc/leyden": "run-file", "/var/lib/leyden": "state", "/tmp": "tmp"}
    for name in ("leyden-gateway", "leyden-controller"):
        deployment = one(ALL, "Deployment", name)["spec"]
        assert (deployment["replicas"], deployment["strategy"]["type"]) == (1, "Recreate")
    (generated,) = kustomization("base")["configMapGenerator"]
    given = {"run.yaml", *(path.name for path in config.kubernetes.files), config.data.train.name}
    assert set(generated["files"]) == given
    image = kustomization("base")["images"]
    assert image == kustomization("doctor")["images"]
    assert config.kubernetes.keeper_image == f"{image[0]['newName']}:{image[0]['newTag']}"


def test_the_example_can_be_launched(config, tmp_path):
    findings, task = check_data(config.data)
    assert [f.level.value for f in findings] == ["ok"]
    finding = check_templates(config, task, tmp_path, {})
    assert (
        finding.line == "ok       templates    command, 5 variables, grader command, Job, workspace of the first task"
    )


@pytest.mark.parametrize(("answer", "reward"), [("3\n", 1.0), ("4", 0.0), (None, 0.0)])
def test_the_example_grader(tmp_path, answer, reward):
    posted = []

    class Gateway(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            posted.append((self.path, self.headers["Authorization"], json.loads(body)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    (tmp_path / "task.json").write_text((DEPLOY / "base" / "tasks.jsonl").read_text())
    if answer is not None:
        (tmp_path / "answer.txt").write_text(answer)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Gateway) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        told = {
            "LEYDEN_TASK": "task.json",
            "LEYDEN_REWARD_URL": f"http://127.0.0.1:{server.server_port}/api/reward",
            "LEYDEN_KEY": "key",
            "NO_PROXY": "127.0.0.1",
        }
        grader = [sys.executable, str(DEPLOY / "base" / "grade.py")]
        subprocess.run(grader, cwd=tmp_path, env=os.environ | told, check=True)
        server.shutdown()
    assert posted == [("/api/reward", "Bearer key", {"value": reward})]


def test_the_image_gets_what_it_copies_and_nothing_else():
    """The build context holds what the Dockerfile copies: no run folders, no repository, no secrets."""
    copied = [
        source
        for line in (DEPLOY / "Dockerfile").read_text().splitlines()
        if line.startswith("COPY ") and "--from" not in line
        for source in line.split()[1:-1]
    ]
    ignore = (ROOT / ".dockerignore").read_text().split()
    assert ignore[0] == "*"
    assert sorted(copied) == sorted(pattern[1:] for pattern in ignore if pattern.startswith("!"))
    assert all((ROOT / source).exists() for source in copied)
    assert fnmatch.filter(ignore, "**/__pycache__")
    extras = re.search(r"'\.\[(\w+)\]'", (DEPLOY / "Dockerfile").read_text())
    assert extras[1] == "kubernetes"


def test_the_secret_of_the_guide_is_long_enough():
    """`openssl rand -hex 32` of docs/kubernetes.md: 64 characters, of which 32 are demanded."""
    guide = (ROOT / "docs" / "kubernetes.md").read_text()
    assert "--from-literal=secret=$(openssl rand -hex 32)" in guide
