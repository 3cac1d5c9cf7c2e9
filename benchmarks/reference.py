"""Agent Lightning 1.0.2 as it is installed from PyPI: its server and its local controller, for comparison.

It is installed once, in an environment of its own (REFERENCE, Python 3.12), and never changed. Its agents are Python
classes that its controller starts; `agents.Sdk` is one, and Leyden runs the same class.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common import child, free_port, wait_for

REFERENCE = Path.home() / ".cache" / "leyden" / "agl"
PACKAGES = ["agentlightning==1.0.2", "openai==3.57.0"]
KEY, MODEL = "bench-key", "bench"
AGENTS = Path(__file__).with_name("agents.py")
LIMIT_S = 300.0


def install() -> bool:
    """Whether it is there, or could be installed. Needs a Python 3.12."""
    if (REFERENCE / "installed").exists():
        return True
    python = _python312()
    if python is None:
        return False
    subprocess.run([python, "-m", "venv", "--clear", str(REFERENCE)], check=True)
    subprocess.run([str(REFERENCE / "bin" / "pip"), "install", "--quiet", *PACKAGES], check=True)
    (REFERENCE / "installed").touch()
    return True


def _python312() -> str | None:
    kept = sorted((Path.home() / ".pyenv" / "versions").glob("3.12*/bin/python"))
    for python in [shutil.which("python3.12"), *map(str, kept)]:
        if python and subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode == 0:
            return python
    return None


class AgentLightning:
    """A running server. `failed` counts the rollouts that did not succeed (on a busy machine, some)."""

    def __init__(self, url: str, pid: int) -> None:
        self.url = url
        self.pid = pid
        self.after = 0
        self.failed = 0

    def ask(self, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(self.url + path, data, headers), timeout=120) as reply:
            return json.load(reply)

    def targets(self, count: int) -> list[tuple[str, str]]:
        """The chat URL and the key of each of `count` rollouts."""
        made = self.ask("/api/rollouts", [{"input": {"id": str(i)}, "is_train": True} for i in range(count)])
        path = "/proxy/rollout/{}/attempt/0/mode/train/openai/v1/chat/completions"
        return [(self.url + path.format(rollout["rollout_id"]), KEY) for rollout in made]

    def finish(self, count: int) -> float:
        """Seconds from the creation of `count` rollouts to the last end."""
        agent = {"agent_class": "agents:Sdk", "env_map": {"TASK_ID": "input.id"}}
        config = {"timeout_seconds": 300, "local": agent}
        begin = time.perf_counter()
        made = self.ask(
            "/api/rollouts", [{"input": {"id": str(i)}, "is_train": True, "config": config} for i in range(count)]
        )
        waiting = {rollout["rollout_id"] for rollout in made}
        while waiting:
            if time.perf_counter() > begin + LIMIT_S:
                raise TimeoutError(f"{len(waiting)} of {count} rollouts did not end in {LIMIT_S:.0f} s")
            page = self.ask(f"/api/rollouts/terminal?after={self.after}")
            self.after = page["next_after"]
            for item in page["items"]:
                waiting.discard(item["rollout_id"])
                self.failed += item["state"].lower() != "succeeded"
            time.sleep(0.02)
        return time.perf_counter() - begin


@contextmanager
def serving(folder: Path, engine: str) -> Iterator[AgentLightning]:
    """Its server alone, in front of `engine`."""
    url = f"http://127.0.0.1:{free_port()}"
    command = [
        str(REFERENCE / "bin" / "agl-server"), "host=127.0.0.1", f"port={url.rpartition(':')[2]}", f"key={KEY}",
        f"default_proxy.model_name={MODEL}", f"hydra.run.dir={folder}/server",
    ]  # fmt: skip
    with child(command, folder / "server.log") as process:
        wait_for(f"{url}/healthz")
        running = AgentLightning(url, process.pid)
        running.ask("/api/models", [{"model": MODEL, "endpoint": f"{engine}/v1"}])
        yield running


@contextmanager
def controlling(folder: Path, engine: str, **settings: float) -> Iterator[AgentLightning]:
    """Its server and controller. `settings` are those of its `local_runner`; without any it runs as it comes."""
    folder.mkdir(parents=True)
    shutil.copy(AGENTS, folder)
    with serving(folder, engine) as running:
        command = [
            str(REFERENCE / "bin" / "agl-controller"), "runner_type=local", f"agl_server.url={running.url}",
            f"agl_server.key={KEY}", f"hydra.run.dir={folder}/controller",
            *(f"local_runner.{name}={value}" for name, value in settings.items()),
        ]  # fmt: skip
        with child(command, folder / "controller.log", os.environ | {"PYTHONPATH": str(folder)}):
            time.sleep(3)  # its interpreter, and its first look
            running.finish(1)
            yield running
