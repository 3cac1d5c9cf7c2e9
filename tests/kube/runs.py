"""A run whose attempts are Jobs of the test's cluster: a real gateway that pods reach, controllers as processes."""

from __future__ import annotations

import asyncio
import http.server
import json
import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from dataclasses import dataclass, field
from inspect import iscoroutinefunction
from pathlib import Path
from typing import Any

import uvicorn
import yaml
from starlette.applications import Starlette

from leyden import run_file
from leyden.client import ControlClient, control_key
from leyden.controller.backends.kubernetes.manifest import JOB_ID
from leyden.gateway.app import build
from leyden.gateway.render import ModelRenderer
from leyden.records import Rollout
from tests.gateway.conftest import ScriptedEngine
from tests.kube.cluster import Cluster

SECRET = "k" * 40
CALL = (
    "wget -q -O - --header \"Authorization: Bearer $OPENAI_API_KEY\" --header 'Content-Type: application/json' "
    '--post-data \'{"model":"m","messages":[{"role":"user","content":"hi"}]}\' $OPENAI_BASE_URL/chat/completions'
)
GRADE = (
    "wget -q -O - --header \"Authorization: Bearer $LEYDEN_KEY\" --header 'Content-Type: application/json' "
    '--post-data "{\\"value\\": $(cat score)}" $LEYDEN_REWARD_URL'
)
TEMPLATE = """\
apiVersion: batch/v1
kind: Job
spec:
  template:
    spec:
      nodeSelector: {{ task.node | default({}) | structure }}
      containers:
      - name: {{ container }}
        image: {{ task.image | default(image) }}
        command: {{ command | structure }}
        workingDir: {{ workspace }}
        resources:
          limits: {memory: {{ task.memory | default("64Mi") }}}
"""


FOREVER = "sleep 600"


def good(score: float = 1.0, *, first: str = "true", **more: Any) -> dict[str, Any]:
    """A task whose harness runs `first`, calls the model once and earns `score`."""
    return {"script": f"{first} && {CALL} && echo {score} > score", **more}


def once(first: str) -> str:
    """A script that runs `first` in the first attempt only."""
    return f'if [ "$LEYDEN_ATTEMPT" = 1 ]; then {first}; fi'


def brief(found: list[Rollout]) -> list[tuple[Any, ...]]:
    return [(r.state, r.failure, r.reward, r.attempt) for r in found]


class Gates:
    """What programs in pods wait for. `arrived` holds the names of the gates that somebody stands before."""

    def __init__(self, url: str, arrived: set[str], opened: set[str]) -> None:
        self.arrived = arrived
        self._url = url
        self._opened = opened

    def wait(self, name: str) -> str:
        """A script that ends once the gate of that name is open."""
        return f"until wget -q -O /dev/null {self._url}/{name}; do sleep 0.2; done"

    def open(self, *names: str) -> None:
        self._opened |= set(names)


@contextmanager
def gates(host: str) -> Iterator[Gates]:
    arrived: set[str] = set()
    opened: set[str] = set()

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.path.strip("/")
            arrived.add(name)
            self.send_response(200 if name in opened else 503)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer((host, 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield Gates(f"http://{host}:{server.server_port}", arrived, opened)
        server.shutdown()


@dataclass
class Run:
    """Rollouts of one run. Its harness runs the task's `script` in a shell, its grader posts what is in `score`."""

    cluster: Cluster
    namespace: str
    folder: Path
    url: str
    gateway: Starlette
    client: ControlClient
    controllers: list[subprocess.Popen[bytes]] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)

    def start_controller(self, name: str = "one") -> subprocess.Popen[bytes]:
        log = (self.folder / f"controller-{name}.log").open("ab")
        environment = os.environ | {"LEYDEN_SECRET": SECRET}
        command = [
            sys.executable,
            "-m",
            "leyden",
            "controller",
            str(self.folder / "run.yaml"),
            f"controller.name={name}",
        ]
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        self.controllers.append(process)
        return process

    async def add(self, tasks: Iterable[dict[str, Any]]) -> list[str]:
        """A rollout for each task: their ids."""
        specs = []
        for slot, task in enumerate(tasks, start=len(self.ids)):
            specs.append({"kind": "train", "step": 1, "slot": slot, "size": 1, "task": task})
        ids = [group.rollouts[0].rollout_id for group in await self.client.create_groups(specs)]
        self.ids += ids
        return ids

    async def ended(self, ids: list[str], limit_s: float) -> list[Rollout]:
        """The rollouts when all have ended."""
        found: dict[str, Rollout] = {}
        cursor = 0
        async with asyncio.timeout(limit_s):
            while not all(i in found and found[i].state.terminal for i in ids):
                changed, cursor = await self.client.rollouts(after=cursor, wait_s=10)
                found |= {rollout.rollout_id: rollout for rollout in changed}
        return [found[i] for i in ids]

    async def until(self, condition: Callable[[], Any], limit_s: float = 60) -> Any:
        """Ask again and again, what blocks in a thread, until the answer is yes."""
        async with asyncio.timeout(limit_s):
            while True:
                found = await (condition() if iscoroutinefunction(condition) else asyncio.to_thread(condition))
                if found:
                    return found
                await asyncio.sleep(0.2)

    def things(self, kind: str) -> list[dict[str, Any]]:
        """What the run has in the cluster."""
        found: list[dict[str, Any]] = self.cluster.get(kind, "-n", self.namespace, "-l", "leyden/run")["items"]
        return found

    def job(self, job_id: str) -> dict[str, Any] | None:
        found = [j for j in self.things("jobs") if j["metadata"]["annotations"][JOB_ID] == job_id]
        return found[0] if found else None

    def pods(self, job_id: str) -> list[dict[str, Any]]:
        return [p for p in self.things("pods") if p["metadata"]["annotations"][JOB_ID] == job_id]

    def is_over(self, job_id: str) -> bool:
        job = self.job(job_id)
        return job is not None and bool(job["status"].get("conditions"))

    def change_job(self, job_id: str, **spec: Any) -> None:
        job = self.job(job_id)
        assert job is not None, f"there is no Job {job_id}"
        name, change = job["metadata"]["name"], json.dumps({"spec": spec})
        self.cluster.kubectl("patch", "job", name, "-n", self.namespace, "--type=merge", "-p", change)

    def delete(self, kind: str, name: str, *options: str) -> None:
        self.cluster.kubectl("delete", kind, name, "-n", self.namespace, "--wait=false", *options)

    async def running_pod(self, rollout_id: str) -> str:
        """The name of the pod of a rollout whose harness runs."""

        def find() -> str | None:
            for pod in self.things("pods"):
                statuses = pod["status"].get("containerStatuses", [])
                up = any(s["name"] == "harness" and "running" in s["state"] for s in statuses)
                if up and pod["metadata"]["labels"]["leyden/rollout"] == rollout_id:
                    return str(pod["metadata"]["name"])
            return None

        return str(await self.until(find))

    def evict(self, pod: str) -> None:
        """As `kubectl drain` does it."""
        versions = self.cluster.kubectl("api-versions").split()
        version = "policy/v1" if "policy/v1" in versions else "policy/v1beta1"
        body = {"apiVersion": version, "kind": "Eviction", "metadata": {"name": pod, "namespace": self.namespace}}
        path = f"/api/v1/namespaces/{self.namespace}/pods/{pod}/eviction"
        self.cluster.kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(body))

    async def nothing_left(self) -> None:
        """No Job, pod or Secret; and by the controllers' logs, each rollout was ended once."""
        await self.until(lambda: not any(self.things(kind) for kind in ("jobs", "pods", "secrets")), 180)
        ends = Counter(re.findall(r"rollout (\S+) attempt \d+: (?:succeeded|failed),", self.log()))
        assert ends == dict.fromkeys(self.ids, 1)

    def end_of(self, rollout_id: str, attempt: int) -> str:
        """What the log of a controller says about the end of an attempt that was void."""
        (line,) = re.findall(rf"rollout {rollout_id} attempt {attempt}: queued, .*", self.log())
        return str(line)

    async def knows(self, controller: str) -> bool:
        return controller in await self.client.controllers()

    async def rewarded(self, rollout_id: str) -> bool:
        return (await self.client.rollout(rollout_id)).reward is not None

    def end_lease(self, controller: str) -> None:
        """As if nothing had been heard of the controller for longer than its lease."""
        with closing(sqlite3.connect(self.folder / "run" / "store.sqlite", timeout=10)) as store:
            store.execute("UPDATE controllers SET seen = 0 WHERE controller = ?", (controller,))
            store.commit()

    def log(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("controller-*.log")))


@asynccontextmanager
async def run(
    cluster: Cluster,
    namespace: str,
    folder: Path,
    model: Path,
    image: str,
    *,
    controllers: Iterable[str] = ("one",),
    **sections: Any,
) -> AsyncIterator[Run]:
    listener = socket.create_server((cluster.host, 0), backlog=512)
    url = f"http://{cluster.host}:{listener.getsockname()[1]}"
    (folder / "job.yaml").write_text(TEMPLATE)
    (folder / "train.jsonl").write_text("{}\n")
    document: dict[str, Any] = {
        "run_dir": str(folder / "run"),
        "model": {"path": str(model), "renderer": "qwen3", "context_tokens": 2000},
        "data": {"train": "train.jsonl"},
        "harness": {"command": ["sh", "-c", "{{ task.script }}"], "timeout_s": 120, "max_attempts": 1},
        "grader": {"command": ["sh", "-c", GRADE]},
        "gateway": {"url": url},
        "controller": {"backend": "kubernetes", "concurrency": 12, "start_timeout_s": 60},
        "kubernetes": {
            "image": cluster.busybox,
            "keeper_image": image,
            "namespace": namespace,
            "kubeconfig": str(cluster.kubeconfig),
            "template": "job.yaml",
            "image_wait_s": 5,
            "save_s": 20,
        },
    }
    for name, section in sections.items():
        document[name] = document.get(name, {}) | section
    (folder / "run.yaml").write_text(yaml.safe_dump(document))
    config = run_file.load(folder / "run.yaml")
    config.run_dir.mkdir(exist_ok=True)
    renderer = ModelRenderer(str(model), "qwen3", "template")
    app = build(config, SECRET.encode(), renderer=renderer, engine=ScriptedEngine(renderer))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=1))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    async with ControlClient(url, control_key(SECRET.encode())) as client:
        await client.put_model("policy", engines=["http://scripted"], version=0, lineage="l", context_tokens=2000)
        it = Run(cluster, namespace, folder, url, app, client)
        for name in controllers:
            it.start_controller(name)
        try:
            yield it
        finally:
            for process in it.controllers:
                process.send_signal(signal.SIGTERM)
            for process in it.controllers:
                process.wait(60)
            server.should_exit = True
            await serving
