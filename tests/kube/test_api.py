"""Calls and watches against a real API server, which is stopped, compacted and cut off."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from leyden.controller.backends.kubernetes.api import EVENTS, JOBS, PODS, SECRETS, KubernetesApi
from leyden.controller.backends.kubernetes.cluster_errors import (
    ClusterError,
    ObjectBeingDeleted,
    ObjectExists,
    ObjectMissing,
    QuotaExceeded,
    VersionGone,
)
from leyden.controller.backends.kubernetes.manifest import Manifest
from leyden.controller.backends.kubernetes.states import Ended, Running
from leyden.controller.backends.kubernetes.watch import Timing
from leyden.controller.jobs import Exit
from tests.kube.cluster import Cluster
from tests.kube.observer import Observer

pytestmark = [pytest.mark.kube, pytest.mark.timeout(300)]


def job(name: str, image: str, script: str, *, grace_s: int = 1, **spec: Any) -> dict[str, Any]:
    container = {"name": "harness", "image": image, "command": ["sh", "-c", script]}
    pod = {"restartPolicy": "Never", "terminationGracePeriodSeconds": grace_s, "containers": [container]}
    labels = {"leyden/job": name}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "labels": labels},
        "spec": {"backoffLimit": 0, **spec, "template": {"metadata": {"labels": labels}, "spec": pod}},
    }


async def test_a_job_from_start_to_end(kube: Cluster, api: KubernetesApi, observer: Observer) -> None:
    """Create with a Secret, watch to the verdict, read the log, delete: all three are gone."""
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "plain"}, "data": {}}
    made = job("plain", kube.busybox, "seq 1000; echo last; exit 3")
    await api.create_job(Manifest(made, secret))
    with pytest.raises(ObjectExists):
        await api.create_job(Manifest(made, secret))
    await observer.until(lambda: observer.is_a(Ended, "plain"))
    found = observer.verdict("plain")
    assert (found.exit.exit_code, found.exit.error) == (3, None)
    (pod,) = observer.seen("plain").pods
    assert await api.log(pod["metadata"]["name"], "harness", tail_lines=2, limit_bytes=100) == "1000\nlast\n"
    with pytest.raises(ClusterError):
        await api.log(pod["metadata"]["name"], "other", tail_lines=2, limit_bytes=100)
    await api.delete_job("plain")
    await api.delete_job("plain")
    await observer.until(lambda: all(c.event == "DELETED" for c in observer.last.values()))
    await _until_gone(api, SECRETS, "plain")
    with pytest.raises(ObjectMissing):
        await api.log(pod["metadata"]["name"], "harness", tail_lines=2, limit_bytes=100)


async def _until_gone(api: KubernetesApi, kind: Any, name: str) -> None:
    async with asyncio.timeout(30):
        while True:
            try:
                await api.get(kind, name)
            except ObjectMissing:
                return
            await asyncio.sleep(0.1)


async def test_a_killed_job_says_why_and_starts_no_other_pod(
    kube: Cluster, api: KubernetesApi, observer: Observer
) -> None:
    """One change to the Job ends its pod; the Job stays and tells the next controller."""
    await api.create(JOBS, job("kill", kube.busybox, "sleep 600"))
    await observer.until(lambda: observer.is_a(Running, "kill"))
    asked = time.time()
    await api.kill_job("kill", "timeout", asked)
    await observer.until(lambda: observer.is_a(Ended, "kill"))
    found: Exit = observer.verdict("kill").exit
    assert (found.killed, found.exit_code, found.error) == ("timeout", None, None)
    await asyncio.sleep(2)
    assert len(observer.seen("kill").pods) == 1
    again = Observer(api)
    await again.until(lambda: again.listed() == 2)
    assert again.verdict("kill").exit.killed == "timeout"
    await again.close()


async def test_quota(kube: Cluster, api: KubernetesApi, namespace: str) -> None:
    """The refusal has a type; a Job whose pods are refused says so in an event."""
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "q"}}
    kube.apply({**quota, "spec": {"hard": {"count/jobs.batch": "1", "pods": "0"}}}, namespace=namespace)
    async with asyncio.timeout(30):
        while "hard" not in (await api.get(_QUOTAS, "q")).get("status", {}):  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    await api.create(JOBS, job("one", kube.busybox, "true"))
    with pytest.raises(QuotaExceeded, match=r"exceeded quota: q, requested: count/jobs\.batch=1"):
        await api.create(JOBS, job("two", kube.busybox, "true"))
    async with asyncio.timeout(30):
        while True:
            events, _ = await api.list_all(EVENTS, fields="type=Warning,involvedObject.name=one")
            if events:
                break
            await asyncio.sleep(0.1)
    assert "exceeded quota: q, requested: pods=1" in events[0]["message"]


_QUOTAS = replace(PODS, plural="resourcequotas")


async def test_a_job_on_its_way_out(kube: Cluster, api: KubernetesApi) -> None:
    """Its name is taken, and the refusal says that it is being deleted."""
    held = job("held", kube.busybox, "true")
    held["metadata"]["finalizers"] = ["leyden/test"]
    await api.create(JOBS, held)
    await api.delete_job("held")
    with pytest.raises(ObjectBeingDeleted):
        await api.create(JOBS, job("held", kube.busybox, "true"))
    await api.patch(JOBS, "held", {"metadata": {"finalizers": None}})


async def test_rights(api: KubernetesApi) -> None:
    assert await api.allowed("create", "batch", "jobs")


async def test_the_api_server_stops_for_a_while(kube: Cluster, api: KubernetesApi, observer: Observer) -> None:
    """What happened meanwhile is told afterwards, and nothing twice."""
    if kube.state is None:
        pytest.skip("only the test bed's API server is stopped")
    await api.create(JOBS, job("through", kube.busybox, "sleep 10; exit 5"))
    await observer.until(lambda: observer.is_a(Running, "through"))
    kube.kill("apiserver")
    await asyncio.sleep(6)
    await asyncio.to_thread(kube.up)
    await observer.until(lambda: observer.is_a(Ended, "through"), 90)
    assert observer.verdict("through").exit.exit_code == 5
    versions = [
        (c.object["metadata"]["uid"], c.object["metadata"]["resourceVersion"]) for c in observer.changes if c.object
    ]
    assert len(versions) == len(set(versions))


async def test_a_compacted_version(kube: Cluster, api: KubernetesApi, namespace: str) -> None:
    """410 from the real server, after etcd forgot and the API server started anew."""
    if kube.state is None:
        pytest.skip("only the test bed's etcd is compacted")
    _, version = await api.list_all(JOBS)
    for i in range(3):
        kube.kubectl("create", "configmap", f"c{i}", "-n", namespace)
    await asyncio.to_thread(kube.forget_versions)
    with pytest.raises(VersionGone):
        async for _ in api.watch(JOBS, version, timeout_s=5):
            pass


class Proxy:
    """Passes bytes to the API server until it is told to be silent: connections stay open, nothing comes."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self.silent = False
        self.connections = 0
        self.port = 0
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        upstream, downstream = await asyncio.open_connection(*self._target)
        born_silent = self.silent
        await asyncio.gather(
            self._pass(reader, downstream, lambda: False),
            self._pass(upstream, writer, lambda: self.silent and not born_silent),
            return_exceptions=True,
        )

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, held: Callable[[], bool]) -> None:
        while data := await reader.read(65536):
            if not held():
                writer.write(data)
                await writer.drain()
        writer.close()


async def test_a_silent_watch(kube: Cluster, api: KubernetesApi, namespace: str, tmp_path: Path) -> None:
    """The connections live, nothing arrives; the end of the Job is found all the same."""
    config = yaml.safe_load(kube.kubeconfig.read_text())
    cluster = config["clusters"][0]["cluster"]
    host, port = cluster["server"].removeprefix("https://").split(":")
    proxy = Proxy(host, int(port))
    await proxy.open()
    cluster["server"] = f"https://127.0.0.1:{proxy.port}"
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(config))
    async with await KubernetesApi.connect(namespace, tmp_path / "kubeconfig") as through:
        observer = Observer(through, Timing(watch_s=8, slack_s=2))
        await observer.until(lambda: observer.listed() == 2)
        await api.create(JOBS, job("quiet", kube.busybox, "sleep 15; exit 6"))
        await observer.until(lambda: observer.is_a(Running, "quiet"))
        proxy.silent = True
        before = proxy.connections
        await observer.until(lambda: observer.is_a(Ended, "quiet"))
        assert observer.verdict("quiet").exit.exit_code == 6
        assert proxy.connections > before
        await observer.close()
    await proxy.close()


async def test_watches_that_end_in_time_are_resumed(kube: Cluster, api: KubernetesApi) -> None:
    """The server ends a watch after its seconds; nothing is listed again, nothing is lost."""
    observer = Observer(api, Timing(watch_s=1))
    await observer.until(lambda: observer.listed() == 2)
    await api.create(JOBS, job("short", kube.busybox, "sleep 5; exit 4"))
    await observer.until(lambda: observer.is_a(Ended, "short"))
    assert observer.verdict("short").exit.exit_code == 4
    assert observer.listed() == 2
    await observer.close()
