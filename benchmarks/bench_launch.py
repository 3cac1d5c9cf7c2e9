"""How fast the controller runs short rollouts, through a real gateway and an engine that answers at once.

    make bench-launch         or: python benchmarks/bench_launch.py [--rollouts 100] [--only mini] [--rounds 2]

Agents: one of the standard library started afresh; one on the OpenAI SDK and mini-swe-agent, both preloaded and forked;
mini-swe-agent started afresh, for comparison. Each rollout makes one model call and is graded by a function.
`start` is the time from the creation of a rollout to the start of its harness, one rollout at a time.

Then, if it can be installed, Agent Lightning 1.0.2 runs the class of the OpenAI agent, as it comes and with its poll
interval at 0.1 s. Leyden and it take turns, so that both see the same machine; the ratio is that of each round.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from aiohttp import web

import reference
from common import MODEL, ROOT, child, free_port, gateway_url, leyden, report, wait_for, write_run_file
from leyden.client import ControlClient, Rollout, control_key, read_or_create_secret
from leyden.types import RolloutState

REPLY = "```bash\necho COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\n```"
ENDED = [RolloutState.SUCCEEDED, RolloutState.FAILED, RolloutState.CANCELLED]
PLAIN = """
import json, os, urllib.request as u
body = json.dumps({"model": "bench", "messages": [{"role": "user", "content": "hi"}]}).encode()
headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
print(u.urlopen(u.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)).read())
"""
GRADER = "def grade(task, workspace):\n    return 1.0\n"
MINI = {
    "command": [
        "mini",
        f"--config={ROOT / 'examples' / 'micro_swe' / 'mini.yaml'}",
        "--model=openai/bench",
        "--task=hi",
        "--yolo",
        "--exit-immediately",
        "--output={{ workspace }}/trajectory.json",
    ],
    "env": {
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "MSWEA_CONFIGURED": "true",
        "MSWEA_GLOBAL_CONFIG_DIR": "{{ run_dir }}/mini",
        "MSWEA_SILENT_STARTUP": "1",
    },
}
MINI_MODULES = [
    "minisweagent.run.mini",
    "minisweagent.agents.interactive",
    "minisweagent.environments.local",
    "minisweagent.models.litellm_textbased_model",
    "litellm.main",
    "openai.resources.chat.completions",
]
AGENTS_FILE = Path(__file__).with_name("agents.py")
AGENTS: dict[str, dict[str, Any]] = {
    "plain": {"command": ["python", "{{ config_dir }}/plain.py"]},
    "openai": {
        "command": ["python", "{{ config_dir }}/agents.py"],
        "preload": ["openai", "openai.resources.chat.completions"],
    },
    "mini": MINI | {"preload": MINI_MODULES},
    "mini-fresh": MINI,
}
FRESH_ROLLOUTS = 6
WARM_UP = 3
LOW_LOAD = 20
LIMIT_S = 120.0


def serve_engine(port: int) -> None:
    """The engine contract with one fixed reply."""
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(str(MODEL / "tokenizer.json")).encode(REPLY).ids

    async def generate(request: web.Request) -> web.Response:
        tokens = [*ids, (await request.json())["stop_token_ids"][0]]
        return web.json_response(
            {
                "token_ids": tokens,
                "logprobs": [-0.5] * len(tokens),
                "finish_reason": "stop",
                "spans": [[0, len(tokens)]],
                "stop_string": None,
            }
        )

    async def chat(_: web.Request) -> web.Response:
        """As vLLM answers with `return_token_ids` and `logprobs`."""
        logprobs: list[Any] = [
            {"token": f"token_id:{i}", "logprob": -0.5, "bytes": None, "top_logprobs": []} for i in ids
        ]
        message = {"role": "assistant", "content": REPLY}
        choice = {"index": 0, "finish_reason": "stop", "message": message, "token_ids": ids}
        return web.json_response(
            {
                "id": "chatcmpl-1",
                "object": "chat.completion",
                "created": 1790000000,
                "model": "bench",
                "choices": [choice | {"logprobs": {"content": logprobs}}],
                "usage": {"prompt_tokens": 9, "completion_tokens": len(ids), "total_tokens": 9 + len(ids)},
                "prompt_token_ids": list(range(9)),
            }
        )

    async def health(_: web.Request) -> web.Response:
        return web.json_response({"version": 0, "lineage": "bench"})

    app = web.Application()
    app.router.add_post("/generate", generate)
    app.router.add_post("/v1/chat/completions", chat)
    app.router.add_get("/health", health)
    web.run_app(app, host="127.0.0.1", port=port, print=None, handle_signals=True)


class Runs:
    """Creates rollouts in one gateway and waits for their ends."""

    def __init__(self, client: ControlClient, run_dir: Path) -> None:
        self._client = client
        self._run_dir = run_dir
        self._slot = 0

    async def finish(self, count: int) -> tuple[float, list[Rollout]]:
        """(seconds from creation to the last end, the rollouts)."""
        self._slot += 1
        spec = {"kind": "train", "step": 0, "slot": self._slot, "size": count, "task": {"n": self._slot}}
        begin = time.perf_counter()
        (group,) = await self._client.create_groups([spec])
        cursor = min(r.change for r in group.rollouts) - 1
        ended: dict[str, Rollout] = {}
        while len(ended) < count:
            if time.perf_counter() > begin + LIMIT_S:
                raise TimeoutError(f"{count - len(ended)} of {count} rollouts did not end in {LIMIT_S:.0f} s")
            rollouts, cursor = await self._client.rollouts(after=cursor, states=ENDED, wait_s=10, tasks=False)
            ended |= {r.rollout_id: r for r in rollouts if r.group_id == group.group_id}
        seconds = time.perf_counter() - begin
        bad = [r for r in ended.values() if r.state != "succeeded" or r.turns != 1]
        if bad:
            raise RuntimeError(f"{len(bad)} of {count} rollouts went wrong: {bad[0].state} {bad[0].reason}")
        return seconds, list(ended.values())

    def facts(self, rollout: Rollout) -> dict[str, Any]:
        path = self._run_dir / "attempts" / rollout.rollout_id / str(rollout.attempt) / "exit.json"
        facts: dict[str, Any] = json.loads(path.read_text())
        return facts


async def measure(name: str, run_dir: Path, engine: str, count: int) -> list[Any]:
    url = await asyncio.to_thread(gateway_url, run_dir)
    async with ControlClient(url, control_key(read_or_create_secret(run_dir))) as client:
        await client.put_model("bench", engines=[engine], version=0, lineage="bench", context_tokens=65536)
        runs = Runs(client, run_dir)
        for _ in range(WARM_UP):
            await runs.finish(1)
            await asyncio.sleep(1)
        seconds, rollouts = await runs.finish(count)
        cpu_s = statistics.mean(runs.facts(r)["cpu_s"] for r in rollouts)
        late = []
        for _ in range(min(count, LOW_LOAD)):
            (alone,) = (await runs.finish(1))[1]
            late.append(runs.facts(alone)["started"] - alone.created)
    return [name, count, count / seconds, cpu_s, 1e3 * statistics.median(late), 1e3 * max(late)]


def scenario(name: str, engine: str, count: int) -> list[Any]:
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        run_file = write_run_file(
            folder,
            harness=AGENTS[name],
            grader={"command": None, "function": "grading:grade"},
            controller={"concurrency": 2 * (psutil.cpu_count() or 1)},
            workspace={"keep": "none"},
        )
        for file, content in (("plain.py", PLAIN), ("agents.py", AGENTS_FILE.read_text()), ("grading.py", GRADER)):
            (folder / file).write_text(content)
        with child(leyden("gateway", str(run_file)), folder / "gateway.log"):
            gateway_url(folder / "run")
            with child(leyden("controller", str(run_file)), folder / "controller.log"):
                try:
                    return asyncio.run(measure(name, folder / "run", engine, count))
                except Exception:
                    print((folder / "controller.log").read_text()[-3000:], file=sys.stderr)
                    raise


def compare(engine: str, count: int, rounds: int) -> list[list[Any]]:
    """Rates of the same agent class under Leyden and under Agent Lightning, in turns, and their ratios."""
    rows = []
    for number in range(rounds):
        as_it_comes, failed = reference_rate(engine, count)
        ours = scenario("openai", engine, count)[2]
        faster, failed_too = reference_rate(engine, count, poll_interval=0.1)
        rows.append([number + 1, as_it_comes, ours, faster, ours / as_it_comes, ours / faster, failed + failed_too])
    return rows


def reference_rate(engine: str, count: int, **settings: float) -> tuple[float, int]:
    """Rollouts per second, and how many failed."""
    with (
        tempfile.TemporaryDirectory() as folder,
        reference.controlling(Path(folder) / "agl", engine, **settings) as running,
    ):
        return count / running.finish(count), running.failed


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rollouts", type=int, default=100)
    parser.add_argument("--only", choices=AGENTS, action="append")
    parser.add_argument("--rounds", type=int, default=2, help="of the comparison with Agent Lightning; 0: none")
    parser.add_argument("--engine", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.engine:
        serve_engine(arguments.engine)
        return
    port = free_port()
    engine = f"http://127.0.0.1:{port}"
    with (
        tempfile.TemporaryDirectory() as folder,
        child([sys.executable, __file__, "--engine", str(port)], Path(folder) / "engine.log"),
    ):
        wait_for(f"{engine}/health")
        rows = []
        for name in arguments.only or AGENTS:
            count = min(FRESH_ROLLOUTS, arguments.rollouts) if name == "mini-fresh" else arguments.rollouts
            rows.append(scenario(name, engine, count))
        columns = ["agent", "rollouts", "per second", "CPU s per run", "start ms p50", "start ms max"]
        report("launch", columns, rows)
        if arguments.rounds and not arguments.only:
            if reference.install():
                compared = compare(engine, arguments.rollouts, arguments.rounds)
                columns = [
                    "round",
                    "Agent Lightning per s",
                    "Leyden",
                    "the former, 0.1 s polls",
                    "ratio",
                    "ratio",
                    "its failures",
                ]
                report("launch-reference", columns, compared)
            else:
                print("no Python 3.12 here: Agent Lightning is not measured")


if __name__ == "__main__":
    main()
