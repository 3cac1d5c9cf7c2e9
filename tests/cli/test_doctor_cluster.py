"""The doctor's judgement of a cluster: pure, on what a cluster, a pod and the probe in it have said."""

from __future__ import annotations

import http.server
import json
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from leyden.config import RunConfig
from leyden.controller.backends.kubernetes.manifest import Manifest
from leyden.doctor import cluster, first_task, probe
from leyden.doctor.address import LOOPBACK, GatewayAddress, address_towards, free_port, gateway_address
from leyden.doctor.findings import Finding, Level
from leyden.doctor.probing import OTHERS, Probed, finished, prepare, read_pod
from leyden.errors import ConfigError
from leyden.run_file import parse

SHAPES = Path(__file__).parents[1] / "controller" / "kubernetes" / "shapes"
URL = "http://gateway:8000"


def config(**sections: Any) -> RunConfig:
    document: dict[str, Any] = {
        "run_dir": "/run",
        "model": {"path": "m"},
        "data": {"train": "t"},
        "harness": {"command": ["agent", "{{ task.n }}"]},
        "grader": {"command": ["grade"]},
        "controller": {"backend": "kubernetes"},
        "kubernetes": {"image": "harness:1"},
    }
    for name, section in sections.items():
        document[name] = document.get(name, {}) | section
    return parse(document)


def answered(status: int | None, text: str = "", opened: tuple[str, ...] = ()) -> Probed:
    return Probed({"a": None}, result={"gateways": {URL: {"status": status, "text": text}}, "open": list(opened)})


def lines(findings: list[Finding]) -> list[str]:
    return [f"{f.level}: {f.check}: {f.what}" for f in findings]


async def test_without_the_library(monkeypatch, tmp_path):
    """Templates are rendered without it; the cluster is not reached."""
    for name in ("kubernetes_asyncio", "leyden.controller.backends.kubernetes.api"):
        monkeypatch.setitem(sys.modules, name, None)
    assert first_task.check_templates(config(), {"n": 1}, tmp_path, {}).level is Level.OK
    with pytest.raises(ConfigError, match=r"pip install 'leyden\[kubernetes\]'"):
        await cluster.connect(config().kubernetes)


async def test_rights_are_told_by_resource():
    async def all_but_logs(verb: str, group: str, resource: str) -> bool:
        return resource != "pods/log" and (verb, resource) != ("delete", "jobs")

    finding = await cluster.check_rights("ns", all_but_logs)
    assert finding.what == "missing in namespace ns: jobs.batch: delete; pods/log: get"


def test_images():
    refused = Probed({"a:1": "ErrImagePull: not found", "b:1": None})
    assert cluster.judge_images(refused).what == "a:1: ErrImagePull: not found"
    blocked = Probed({}, blocked="FailedCreate: exceeded quota")
    assert cluster.judge_images(blocked).what == "no pod of this run starts: FailedCreate: exceeded quota"
    assert cluster.judge_images(Probed({"a:1": None, "b:1": None})).what == "the cluster starts a:1, b:1"


def test_the_gateway_from_a_pod():
    unknown = '{"error":{"message":"there is no rollout \'doctor\'"}}'
    assert lines(cluster.judge_reach(answered(404, unknown), URL, ours=False)) == [
        f"ok: reach: pods reach {URL}", f"ok: pod key: {URL} takes an agent's key from a pod",
    ]  # fmt: skip
    assert lines(cluster.judge_reach(answered(401, "not issued by this run"), URL, ours=False))[1] == (
        f"problem: pod key: {URL} answers a pod's key with 401: not issued by this run"
    )
    assert lines(cluster.judge_reach(answered(404, "Not Found"), URL, ours=False))[1] == (
        f"problem: pod key: {URL} answers a pod's key with 404: Not Found"
    )
    (far, skipped) = cluster.judge_reach(answered(None, "timed out"), URL, ours=False)
    assert (far.level, far.what) == (Level.PROBLEM, f"pods do not reach {URL}: timed out")
    assert skipped.level is Level.SKIPPED
    (far, _) = cluster.judge_reach(answered(None, "timed out"), URL, ours=True)
    assert far.level is Level.WARNING
    assert far.advice == "to try the harness run `leyden doctor` in the cluster, see docs/kubernetes.md"
    (no_python, _) = cluster.judge_reach(Probed({"a": None}, error="python3: not found"), URL, ours=False)
    assert no_python.line == (
        "problem  reach        the probe did not run: python3: not found; kubernetes.keeper_image must hold python3"
    )
    assert [f.level for f in cluster.judge_reach(Probed({}, blocked="b"), URL, ours=False)] == [Level.SKIPPED] * 2


LABELS = {"leyden/rollout": "r", "leyden/run": "x"}


def policy(**spec: Any) -> dict[str, Any]:
    return {"metadata": {"name": "p"}, "spec": spec}


@pytest.mark.parametrize(
    ("spec", "restricts"),
    [
        ({"podSelector": {}, "policyTypes": ["Egress"]}, True),
        ({"podSelector": {}, "policyTypes": ["Ingress"]}, False),
        ({"podSelector": {}}, False),
        ({"podSelector": {}, "egress": []}, True),
        ({"podSelector": {"matchLabels": {"leyden/run": "x"}}, "policyTypes": ["Egress"]}, True),
        ({"podSelector": {"matchLabels": {"app": "web"}}, "policyTypes": ["Egress"]}, False),
        *(
            ({"podSelector": {"matchExpressions": [{"key": k, "operator": o, "values": v}]}, "egress": []}, expected)
            for k, o, v, expected in (
                ("leyden/rollout", "Exists", None, True),
                ("app", "Exists", None, False),
                ("app", "DoesNotExist", None, True),
                ("leyden/run", "In", ["x", "y"], True),
                ("leyden/run", "NotIn", ["x"], False),
            )
        ),
    ],
)
def test_which_policies_are_for_agents(spec, restricts):
    assert cluster.restricts(policy(**spec), LABELS) is restricts


def test_egress():
    """An agent's pod must reach nothing but the gateway."""
    closed, opened = answered(200), answered(200, opened=("10.0.0.1:443", "1.1.1.1:443"))
    ours, strange = policy(podSelector={}, egress=[]), policy(podSelector={"matchLabels": {"app": "web"}}, egress=[])
    assert cluster.judge_egress(closed, None, LABELS).level is Level.OK
    assert cluster.judge_egress(opened, [strange], LABELS).line == (
        "problem  egress       pods also reach 1.1.1.1:443, 10.0.0.1:443: no NetworkPolicy is for them; apply "
        "deploy/base/network.yaml"
    )
    warned = cluster.judge_egress(opened, [strange, ours], LABELS)
    assert (warned.level, warned.what) == (
        Level.WARNING, "pods also reach 1.1.1.1:443, 10.0.0.1:443 under NetworkPolicy p",
    )  # fmt: skip
    assert "may not be read" in cluster.judge_egress(opened, None, LABELS).what
    assert cluster.judge_egress(Probed({}), [], LABELS).level is Level.SKIPPED


def shape(name: str) -> dict[str, Any]:
    pod: dict[str, Any] = json.loads((SHAPES / f"{name}.json").read_text())["pods"][0]
    return pod


def test_pods_as_clusters_show_them():
    """On recorded pods of a real cluster."""
    assert read_pod(None, []) == Probed({})
    assert read_pod(None, ["FailedCreate: exceeded quota"]).blocked == "FailedCreate: exceeded quota"
    assert (read_pod(shape("unschedulable"), []).blocked or "").startswith("Unschedulable: 0/1 nodes are available")
    (why,) = [why for why in read_pod(shape("image_missing"), []).images.values() if why]
    assert why.startswith(("ErrImagePull", "ImagePullBackOff"))
    (why,) = [why for why in read_pod(shape("image_name_invalid"), []).images.values() if why]
    assert why.startswith("InvalidImageName")
    assert not finished(shape("starting"))
    assert read_pod(shape("starting"), []).blocked is None
    assert finished(shape("succeeded"))
    assert set(read_pod(shape("succeeded"), []).images.values()) == {None}


def made(**sections: Any) -> Manifest:
    return prepare(config(**sections), "ns", {"n": 1}, {URL: "lk-a-one-key-of-many", "http://b:1": "lk-a-another-key"})


def test_the_probes_job():
    """No key in clear text. The Job is the run's own, with other programs."""
    job = made(kubernetes={"keeper_image": "python:3", "grader_image": "grader:1"}).job
    pod = job["spec"]["template"]["spec"]
    assert "lk-a-" not in json.dumps(job)
    assert [c["image"] for c in pod["containers"]] == ["python:3", "python:3", "harness:1", "grader:1"]
    assert [c["command"] for c in pod["containers"][1:]] == [["true"]] * 3
    settings, *keys = pod["containers"][0]["env"]
    assert json.loads(settings["value"]) == {
        "gateways": {URL: "LEYDEN_PROBE_KEY_0", "http://b:1": "LEYDEN_PROBE_KEY_1"}, "others": list(OTHERS),
    }  # fmt: skip
    assert [k["valueFrom"]["secretKeyRef"]["key"] for k in keys] == ["LEYDEN_PROBE_KEY_0", "LEYDEN_PROBE_KEY_1"]
    assert "volumes" not in pod
    assert "initContainers" not in pod
    assert {"leyden/rollout", "leyden/run"} <= set(job["spec"]["template"]["metadata"]["labels"])
    assert job["spec"]["backoffLimit"] == 0


@pytest.fixture
def gateway() -> Iterator[str]:
    class Models(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            good = self.headers["Authorization"] == "Bearer good" and self.path == "/v1/models"
            self.send_response(200 if good else 401)
            self.end_headers()
            self.wfile.write(b"" if good else b"no")

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Models) as it:
        threading.Thread(target=it.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{it.server_port}"
        it.shutdown()


def test_what_the_probe_says(gateway, capsys):
    address = gateway.removeprefix("http://")
    settings = {"gateways": {gateway: "A", "http://127.0.0.1:9": "A"}, "others": [address, "127.0.0.1:9"]}
    host = address.partition(":")[0]
    environment = {"LEYDEN_PROBE": json.dumps(settings), "A": "good"}
    probe.main(environment | {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": "9"})
    said = json.loads(capsys.readouterr().out)
    assert said == {
        "gateways": {
            gateway: {"status": 200, "text": ""},
            "http://127.0.0.1:9": {"status": None, "text": "[Errno 111] Connection refused"},
        },
        "open": [address],
    }
    probe.main(environment | {"A": "bad"})
    assert json.loads(capsys.readouterr().out)["gateways"][gateway] == {"status": 401, "text": "no"}


@pytest.mark.parametrize(
    ("sections", "place", "url"),
    [
        ({"controller": {"backend": "local"}}, GatewayAddress(), None),
        ({"gateway": {"host": "10.0.0.5"}}, GatewayAddress("10.0.0.5"), "http://10.0.0.5:7"),
        (
            {"gateway": {"host": "0.0.0.0", "port": 80}, "kubernetes": {"gateway_url": "http://node:80"}},
            GatewayAddress("0.0.0.0", 80, "node"),
            "http://node:7",
        ),
        (
            {"gateway": {"url": "http://gw:8000"}},
            GatewayAddress("10.0.0.9", 8000),
            "http://10.0.0.9:7",
        ),
        (
            {"gateway": {"url": "http://127.0.0.1:1"}, "kubernetes": {"gateway_url": "http://gw.ns.svc"}},
            GatewayAddress("10.0.0.9", 80),
            "http://10.0.0.9:7",
        ),
    ],
)
def test_where_the_rehearsal_listens(sections, place, url):
    assert gateway_address(config(**sections), "10.0.0.9") == place
    if url:
        assert place.url(7) == url


@pytest.mark.parametrize("host", [*LOOPBACK, "0.0.0.0"])
def test_addresses_that_no_pod_can_call(host):
    with pytest.raises(ConfigError):
        gateway_address(config(gateway={"host": host}), "10.0.0.9")


def test_addresses_and_ports():
    assert GatewayAddress("fd00::1").url(80) == "http://[fd00::1]:80"
    assert address_towards("https://127.0.0.1:6443") == "127.0.0.1"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert free_port("127.0.0.1", port) == 0
    assert free_port("127.0.0.1", port) == port
