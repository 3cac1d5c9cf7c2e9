"""A run whose attempts are Jobs of the test's cluster: a real gateway that pods reach, controllers as processes."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import uvicorn
import yaml

from leyden import config as run_file
from leyden.client import ControlClient, control_key
from leyden.client.records import Rollout
from leyden.gateway.app import build
from leyden.gateway.render import ModelRenderer
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


class Run:
    """Rollouts of one run. Its harness runs the task's `script` in a shell, its grader posts what is in `score`."""

    def __init__(self, cluster: Cluster, namespace: str, folder: Path, client: ControlClient) -> None:
        self.cluster = cluster
        self.namespace = namespace
        self.folder = folder
        self.client = client
        self.controllers: list[subprocess.Popen[bytes]] = []
        self._slot = 0

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
        for task in tasks:
            self._slot += 1
            specs.append({"kind": "train", "step": 1, "slot": self._slot, "size": 1, "task": task})
        return [group.rollouts[0].rollout_id for group in await self.client.create_groups(specs)]

    async def ended(self, ids: list[str], limit_s: float) -> list[Rollout]:
        """The rollouts when all have ended."""
        async with asyncio.timeout(limit_s):
            while True:
                found = [await self.client.rollout(rollout_id) for rollout_id in ids]
                if all(r.state.terminal for r in found):
                    return found
                await asyncio.sleep(0.3)

    async def until(self, condition: Any, limit_s: float = 60) -> Any:
        async with asyncio.timeout(limit_s):
            while not (found := await asyncio.to_thread(condition)):  # noqa: ASYNC110  (asks the cluster)
                await asyncio.sleep(0.2)
        return found

    def things(self, kind: str) -> list[dict[str, Any]]:
        """What the run has in the cluster."""
        found: list[dict[str, Any]] = self.cluster.get(kind, "-n", self.namespace, "-l", "leyden/run")["items"]
        return found

    async def nothing_left(self) -> None:
        await self.until(lambda: not any(self.things(kind) for kind in ("jobs", "pods", "secrets")), 120)

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
        it = Run(cluster, namespace, folder, client)
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
