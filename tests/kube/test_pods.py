"""Manifests in a real cluster: the keeper sees every kind of end, variables are what they were given as."""

from __future__ import annotations

import asyncio
import base64
import http.server
import io
import json
import tarfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from leyden.controller.backends.kubernetes import keeper
from leyden.controller.backends.kubernetes.api import JOBS, PODS, SECRETS, KubernetesApi
from leyden.controller.backends.kubernetes.cluster_errors import ObjectMissing
from leyden.controller.backends.kubernetes.manifest import TEMPLATE, Manifest, Pods, Program, manifest
from leyden.controller.backends.kubernetes.states import Ended, Running, note_of
from leyden.controller.backends.kubernetes.verdict import lingers
from tests.kube.cluster import Cluster
from tests.kube.observer import Observer

pytestmark = [pytest.mark.kube, pytest.mark.timeout(300)]


class Gateway(http.server.BaseHTTPRequestHandler):
    """Keeps the workspaces that keepers hand in, by key."""

    kept: dict[str, bytes]

    def do_PUT(self) -> None:
        self.kept[self.headers["Authorization"]] = self.rfile.read(int(self.headers["Content-Length"]))
        self._reply(b"{}")

    def do_GET(self) -> None:
        self._reply(self.kept["Bearer workspace-" + self.headers["Authorization"].removeprefix("Bearer grader-")])

    def _reply(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def gateway(kube: Cluster) -> Iterator[tuple[str, dict[str, bytes]]]:
    class Its(Gateway):
        pass

    Its.kept = {}
    with http.server.ThreadingHTTPServer((kube.host, 0), Its) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://{kube.host}:{server.server_port}", Its.kept
        server.shutdown()


class Maker:
    """Manifests of programs that run a shell script in the Python image."""

    def __init__(self, namespace: str, image: str, url: str) -> None:
        self._url = url
        self._image = image
        self._pods = Pods(namespace, image, Path(keeper.__file__).read_text(), grace_s=8, workspace_bytes=8_000_000)

    def __call__(self, name: str, script: str, *, grade: int = 0, template: str = TEMPLATE, **more: Any) -> Manifest:
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz") as tar:
            entry = tarfile.TarInfo("given.txt")
            entry.size = 6
            tar.addfile(entry, io.BytesIO(b"given\n"))
        program = Program(
            **{
                "job_id": f"{name}.1" + (f".grade{grade}" if grade else ""),
                "run": "tests",
                "rollout_id": name,
                "attempt": 1,
                "url": self._url,
                "workspace_key": f"grader-{name}" if grade else f"workspace-{name}",
                "deadline_s": 300,
                "known": {
                    "image": self._image,
                    "command": ["sh", "-c", script],
                    "workspace": "/workspace",
                    "resources": {},
                },
                "env": {},
                "keys": {"LEYDEN_KEY": f"grader-{name}" if grade else f"agent-{name}"},
                "grade": grade,
                "archive": None if grade else packed.getvalue(),
                "files": {"task.json": b'{"x": 1}'},
            }
            | more
        )
        made = manifest(replace(self._pods, template=template), program)
        for holder in (made.job["metadata"], made.job["spec"]["template"]["metadata"]):
            holder["labels"]["leyden/job"] = made.job["metadata"]["name"]
        return made


@pytest.fixture
def make(namespace: str, python_image: str, gateway: tuple[str, dict[str, bytes]]) -> Maker:
    return Maker(namespace, python_image, gateway[0])


async def run(api: KubernetesApi, observer: Observer, made: Manifest) -> Ended:
    name = made.job["metadata"]["name"]
    await api.create_job(made)
    await observer.until(lambda: observer.is_a(Ended, name), 120)
    found: Ended = observer.verdict(name)
    return found


async def printed(api: KubernetesApi, observer: Observer, made: Manifest, container: str = "harness") -> str:
    (pod,) = observer.seen(made.job["metadata"]["name"]).pods
    return await api.log(pod["metadata"]["name"], container, tail_lines=1000, limit_bytes=100_000)


def unpacked(archive: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        return {e.name: file.read() for e in tar if (file := tar.extractfile(e))}


@pytest.mark.parametrize(
    ("name", "script", "code"),
    [
        ("plain", "cat given.txt; echo done > result; exit 3", 3),
        ("quick", "exit 0", 0),
        ("children", "(trap '' HUP TERM; setsid sleep 600) & echo left > result; exit 4", 4),
    ],
)
async def test_the_workspace_is_saved_after_the_harness(
    api: KubernetesApi,
    observer: Observer,
    make: Maker,
    gateway: tuple[str, dict[str, bytes]],
    name: str,
    script: str,
    code: int,
) -> None:
    ended = await run(api, observer, make(name, script))
    assert (ended.exit.exit_code, ended.exit.error, ended.saved) == (code, None, True)
    assert unpacked(gateway[1][f"Bearer workspace-{name}"])["given.txt"] == b"given\n"


SIDECARS = TEMPLATE.replace(
    "      - name:", "      - {name: first, image: '{{ image }}', command: [sleep, '600']}\n      - name:"
) + ("      - {name: last, image: '{{ image }}', command: [sleep, '600']}\n")


@pytest.mark.parametrize(("name", "script"), [("beside", "sleep 2; echo done > result"), ("besidequick", "exit 0")])
async def test_containers_beside_the_harness_may_live_on(
    api: KubernetesApi, observer: Observer, make: Maker, gateway: tuple[str, dict[str, bytes]], name: str, script: str
) -> None:
    """One that starts before it, one that starts after it; neither ends by itself."""
    made = make(name, script, template=SIDECARS)
    ended = await run(api, observer, made)
    assert (ended.exit.exit_code, ended.exit.error, ended.exit.killed, ended.saved) == (0, None, None, True)
    assert unpacked(gateway[1][f"Bearer workspace-{name}"])["given.txt"] == b"given\n"
    (pod,) = observer.seen(made.job["metadata"]["name"]).pods
    assert lingers(pod)
    await api.end_job(made.job["metadata"]["name"], note_of(ended))
    async with asyncio.timeout(60):
        while (await api.list_all(PODS))[0]:  # noqa: ASYNC110
            await asyncio.sleep(0.2)
    assert observer.verdict(made.job["metadata"]["name"]) == ended


async def test_a_harness_that_kills_the_keeper_voids_nothing(
    api: KubernetesApi, observer: Observer, make: Maker
) -> None:
    script = 'for p in /proc/[0-9]*; do grep -q "keeper[.]py" $p/cmdline && kill -9 ${p#/proc/}; done; exit 3'
    ended = await run(api, observer, make("killer", script))
    assert (ended.exit.exit_code, ended.exit.error, ended.exit.killed, ended.saved) == (3, None, "limit", False)
    assert ended.exit.note is not None and "what saves it was killed" in ended.exit.note


async def test_what_a_harness_left_is_taken_as_it_is(
    api: KubernetesApi, observer: Observer, make: Maker, gateway: tuple[str, dict[str, bytes]]
) -> None:
    """A deep path, closed folders and files."""
    code = "import os\nfor i in range(1500):\n os.mkdir('d')\n os.chdir('d')\n"
    script = f'mkdir c; echo x > c/f; chmod 0 c/f c given.txt; python3 -c "{code}"; chmod 0 .'
    ended = await run(api, observer, make("deep", script))
    assert (ended.exit.exit_code, ended.exit.error, ended.saved) == (0, None, True)
    assert unpacked(gateway[1]["Bearer workspace-deep"]) == {"given.txt": b"given\n", "c/f": b"x\n"}
    graded = make("deep", "cat given.txt c/f; ls | wc -l", grade=1)
    assert (await run(api, observer, graded)).exit.clean
    assert await printed(api, observer, graded, "grader") == "given\nx\n3\n"


async def test_the_workspace_is_saved_after_a_timeout(
    api: KubernetesApi, observer: Observer, make: Maker, gateway: tuple[str, dict[str, bytes]]
) -> None:
    """The harness ignores the end of its pod; the keeper ends it while there is time to save what it wrote."""
    made = make("deaf", "trap '' TERM; echo half > result; echo ready; while :; do sleep 1; done")
    name = made.job["metadata"]["name"]
    await api.create_job(made)
    await observer.until(lambda: observer.is_a(Running, name), 120)
    async with asyncio.timeout(60):
        while await printed(api, observer, made) != "ready\n":  # noqa: ASYNC110
            await asyncio.sleep(0.2)
    await api.kill_job(name, "timeout", time.time())
    await observer.until(lambda: observer.is_a(Ended, name), 60)
    found = observer.verdict(name)
    assert (found.exit.killed, found.exit.error, found.saved) == ("timeout", None, True)
    assert unpacked(gateway[1]["Bearer workspace-deaf"])["result"] == b"half\n"


async def test_a_workspace_that_is_too_large(api: KubernetesApi, observer: Observer, make: Maker) -> None:
    ended = await run(api, observer, make("full", "head -c 9000000 /dev/zero > big"))
    assert (ended.exit.exit_code, ended.saved) == (0, False)
    assert ended.exit.note == (
        "the workspace was not saved: keep: the workspace is larger than 8000000 bytes; see gateway.max_workspace_bytes"
    )


async def test_the_grader_works_on_a_copy(api: KubernetesApi, observer: Observer, make: Maker) -> None:
    """What the harness left, without what would lead out of it; the harness's key is not there."""
    await run(api, observer, make("graded", "echo 42 > answer; ln -s /leyden/files/task.json cheat; mkdir d"))
    made = make("graded", "cat answer; ls; env | grep -c agent-", grade=1)
    ended = await run(api, observer, made)
    assert ended.exit.exit_code == 1
    assert await printed(api, observer, made, "grader") == "42\nanswer\nd\ngiven.txt\n0\n"


async def test_variables_arrive_as_they_are(api: KubernetesApi, observer: Observer, make: Maker) -> None:
    """Through a real API server and kubelet; nothing is expanded, and keys come from the Secret."""
    values = ["True", "8080", "1e3", "null", "yes", "08", "", "$(LEYDEN_KEY)", "$$", "a\n- b: c", "é\U0001f600"]
    env = {f"V{i}": value for i, value in enumerate(values)}
    code = "import json, os, sys; print(json.dumps([dict(os.environ), sys.argv[1:]]))"
    command = ["python3", "-c", code, "$(LEYDEN_KEY)", "$$x", "${HOME}"]
    known = {"image": make._image, "command": command, "workspace": "/workspace", "resources": {}}
    made = make("values", "", env=env, known=known)
    ended = await run(api, observer, made)
    assert ended.exit.exit_code == 0
    seen, arguments = json.loads(await printed(api, observer, made))
    assert {n: v for n, v in seen.items() if n in env} == env
    assert arguments == ["$(LEYDEN_KEY)", "$$x", "${HOME}"]
    assert seen["LEYDEN_KEY"] == "agent-values"


async def test_no_secret_in_what_people_see(
    kube: Cluster, api: KubernetesApi, observer: Observer, make: Maker, namespace: str
) -> None:
    """Jobs, pods, events and logs hold no key; the harness finds the keeper's key in no file of its own."""
    made = make(
        "secret", "grep -rs workspace-s.cret /leyden /workspace /proc/self/environ; cat /leyden/files/task.json"
    )
    await run(api, observer, made)
    assert await printed(api, observer, made) == '{"x": 1}'
    for kind in ("jobs", "pods", "events"):
        shown = kube.kubectl("get", kind, "-n", namespace, "-o", "yaml").replace("workspace-s.cret", "")
        assert "workspace-secret" not in shown
        assert "agent-secret" not in shown
        assert base64.b64encode(b"agent-secret").decode() not in shown


async def test_everything_goes_with_the_job(api: KubernetesApi, observer: Observer, make: Maker) -> None:
    made = make("gone", "true")
    await run(api, observer, made)
    name = made.job["metadata"]["name"]
    await api.delete_job(name)
    async with asyncio.timeout(60):
        while True:
            jobs, _ = await api.list_all(JOBS)
            pods, _ = await api.list_all(PODS)
            try:
                await api.get(SECRETS, name)
            except ObjectMissing:
                if not jobs and not pods:
                    break
            await asyncio.sleep(0.2)


async def test_a_pod_deleted_before_its_harness_starts(api: KubernetesApi, observer: Observer, make: Maker) -> None:
    """The keeper does not wait for what will not come."""
    made = make(
        "early", "true", known={"image": "testbed.local/none:1", "command": ["true"], "workspace": "/", "resources": {}}
    )
    name = made.job["metadata"]["name"]
    await api.create_job(made)
    await observer.until(lambda: _keeper_runs(observer, name), 60)
    await api.delete_job(name)
    async with asyncio.timeout(30):
        while (await api.list_all(PODS))[0]:  # noqa: ASYNC110
            await asyncio.sleep(0.2)


def _keeper_runs(observer: Observer, name: str) -> bool:
    pods = observer.seen(name).pods
    statuses = pods[0]["status"].get("containerStatuses", []) if pods else []
    return any(s["name"] == "keep" and "running" in s["state"] for s in statuses)
