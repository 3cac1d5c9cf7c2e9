"""The test bed itself: a plain Job runs, pods reach a server of this machine, images come from local files."""

from __future__ import annotations

import http.server
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.kube.cluster import Cluster

pytestmark = [pytest.mark.kube, pytest.mark.timeout(300)]


@pytest.fixture
def server(kube: Cluster) -> Iterator[str]:
    class Hello(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"hello from the host")

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer((kube.host, 0), Hello) as it:
        threading.Thread(target=it.serve_forever, daemon=True).start()
        yield f"http://{kube.host}:{it.server_port}"
        it.shutdown()


def job(name: str, image: str, *command: str) -> dict[str, Any]:
    container = {
        "name": "harness",
        "image": image,
        "command": list(command),
        "env": [{"name": "LITELLM_LOCAL_MODEL_COST_MAP", "value": "True"}],
    }
    spec = {"restartPolicy": "Never", "containers": [container], "terminationGracePeriodSeconds": 1}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name},
        "spec": {"backoffLimit": 0, "template": {"spec": spec}},
    }


def run(kube: Cluster, namespace: str, made: dict[str, Any]) -> str:
    """The log of a Job that must succeed."""
    name = made["metadata"]["name"]
    kube.apply(made, namespace=namespace)
    end = time.monotonic() + 90
    while not (conditions := kube.get("job", name, "-n", namespace)["status"].get("conditions")):
        assert time.monotonic() < end, kube.kubectl("describe", "pods", "-n", namespace)
        time.sleep(0.2)
    log = kube.kubectl("logs", "-n", namespace, f"job/{name}")
    assert [c["type"] for c in conditions] == ["Complete"], log
    return log


def test_a_job_runs_and_reaches_a_server_of_this_machine(kube: Cluster, namespace: str, server: str) -> None:
    assert run(kube, namespace, job("plain", kube.busybox, "wget", "-qO-", server)) == "hello from the host"


def test_the_python_image_holds_leyden_and_a_real_harness(
    kube: Cluster, namespace: str, server: str, python_image: str
) -> None:
    code = (
        "import sys, urllib.request, leyden.client.reward, minisweagent.run.mini, litellm.main;"
        f"print(urllib.request.urlopen({server!r}).read().decode(), tuple(sys.version_info[:2]))"
    )
    log = run(kube, namespace, job("python", python_image, "python3", "-c", code))
    assert log.splitlines()[-1] == f"hello from the host {sys.version_info[:2]}"
    assert "Usage" in run(kube, namespace, job("mini", python_image, "mini", "--help"))
