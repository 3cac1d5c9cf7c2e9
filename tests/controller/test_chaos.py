"""Rollouts of mixed kinds while the controller is killed: each ends once, as it should, and nothing is left.

`make chaos` runs 1,000 of them, 50 at a time, with ten kills; `make test` a small version.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import random
import sqlite3
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from leyden.client import Rollout, control_key
from leyden.config import RunConfig
from leyden.errors import GatewayError
from leyden.gateway.render import ModelRenderer
from leyden.types import RolloutState
from tests.controller.conftest import controlling
from tests.controller.programs import kill9, start_controller, starts, wait_until
from tests.controller.test_limits import groups_of, groups_possible
from tests.gateway.conftest import SECRET, Gateway, make_config, serving

Left = Callable[[], list[str]]
AGENT = """
import json, os, urllib.request as u
body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "hi"}]}).encode()
headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
u.urlopen(u.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)).read()
"""
LOG_BYTES, WORKSPACE_BYTES, PIDS = 100_000, 4_000_000, 60
CALL = f"{sys.executable} {{{{ config_dir }}}}/agent.py; "
KINDS = {
    "clean": CALL + "echo done",
    "crash": CALL + "exit 3",
    "signal": "kill -SEGV $$",
    "hang": "trap '' TERM; setsid sleep 300 & sleep 300; sleep 300",
    "children": "for i in $(seq 300); do sleep 300 & done",
    "setsid": "(setsid sh -c 'trap \"\" TERM; sleep 300 & sleep 300' &); exit 0",
    "flood": "yes flood | head -c 5000000",
    "fill": "i=0; while :; do i=$((i + 1)); head -c 500000 /dev/zero > $i; sleep 0.05; done",
}
OWN = {"clean": 0, "crash": 3, "signal": -11, "setsid": 0, "flood": 0}  # exit codes of those that nothing ends


@dataclass(frozen=True)
class Size:
    rollouts: int
    concurrency: int
    kills: int
    limit_s: float


SMALL = Size(40, 10, 2, 500.0)
LARGE = Size(1000, 50, 10, 1500.0)


@dataclass(frozen=True)
class Address:
    """What a controller of `start_controller` needs to know of a gateway."""

    url: str
    key: str


def make(tmp_path: Path, model: Path, size: Size) -> RunConfig:
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "grading.py").write_text("def grade(task, workspace):\n    return 1.0\n")
    limits = {"workspace_bytes": WORKSPACE_BYTES} | ({"pids": PIDS} if groups_possible() else {})
    return make_config(
        tmp_path,
        model,
        harness={
            "command": ["sh", "-c", "echo x >> ../starts; {{ task.script }}"],
            "timeout_s": 2.0,
            "max_attempts": 50,
            "retry_backoff_s": 0.1,
            "log_bytes": LOG_BYTES,
            "limits": limits,
        },
        grader={"command": None, "function": "grading:grade"},
        workspace={"keep": "none"},
        controller={"concurrency": size.concurrency},
    )


class Ends:
    """The feed: every rollout's final state, and how often it was told as another change."""

    def __init__(self) -> None:
        self.final: dict[str, Rollout] = {}
        self.changes: dict[str, set[int]] = collections.defaultdict(set)

    async def follow(self, gateway: Gateway, count: int) -> None:
        cursor = 0
        while len(self.final) < count:
            rollouts, cursor = await gateway.client.rollouts(after=cursor, states=RolloutState, wait_s=1)
            for rollout in rollouts:
                if rollout.state.terminal:
                    self.final[rollout.rollout_id] = rollout
                    self.changes[rollout.rollout_id].add(rollout.change)


def hold_all_but(config: RunConfig, hanging: Sequence[str]) -> None:
    """Time is held for every other rollout: what ends by itself has all the time that it needs."""
    trigger = (
        "CREATE TRIGGER hold AFTER INSERT ON attempts WHEN NEW.rollout_id NOT IN (SELECT value FROM json_each('{}')) "
        "BEGIN UPDATE attempts SET held_s = 1e6 WHERE rollout_id = NEW.rollout_id AND attempt = NEW.attempt; END"
    )
    with contextlib.closing(sqlite3.connect(config.run_dir / "store.sqlite")) as store:
        store.execute(trigger.format(json.dumps(hanging)))


@contextlib.asynccontextmanager
async def killed_again_and_again(
    config: RunConfig, gateway: Gateway, size: Size, ends: Ends, rng: random.Random
) -> AsyncIterator[None]:
    """Controllers one after the other; each but the last is killed after a random number of ends."""
    address = Address(gateway.url, control_key(SECRET))
    process = start_controller(config, address)  # type: ignore[arg-type]

    async def kill() -> None:
        nonlocal process
        marks = sorted(rng.sample(range(1, size.rollouts * 3 // 4), size.kills))
        for mark in marks:
            while len(ends.final) < mark:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await asyncio.sleep(rng.random() * 0.5)
            kill9(process)
            process = start_controller(config, address)  # type: ignore[arg-type]

    killer = asyncio.create_task(kill())
    try:
        yield
        await killer
    finally:
        killer.cancel()
        kill9(process)


async def chaos(tmp_path: Path, model: Path, renderer: ModelRenderer, size: Size, gone: Left) -> None:
    config, rng, ends = make(tmp_path, model, size), random.Random(size.rollouts), Ends()
    kinds = [list(KINDS)[i % len(KINDS)] for i in range(size.rollouts)]
    rng.shuffle(kinds)
    async with serving(config, renderer) as gateway:
        scripts = {kind: script.replace("{{ config_dir }}", str(tmp_path)) for kind, script in KINDS.items()}
        specs = [
            {"kind": "train", "step": 0, "slot": i, "size": 1, "task": {"script": scripts[kind]}}
            for i, kind in enumerate(kinds)
        ]
        groups = await gateway.client.create_groups(specs)
        kind_of = {group.rollouts[0].rollout_id: kind for group, kind in zip(groups, kinds, strict=True)}
        hold_all_but(config, [i for i, kind in kind_of.items() if kind == "hang"])
        begin = time.monotonic()
        async with asyncio.timeout(size.limit_s), killed_again_and_again(config, gateway, size, ends, rng):
            await ends.follow(gateway, size.rollouts)
        seconds = time.monotonic() - begin
        async with controlling(config, Address(gateway.url, control_key(SECRET))):
            await wait_until(lambda: workspaces(config) == [])
        with pytest.raises(GatewayError):
            await gateway.client.claim(next(iter(kind_of)), "c")
    check_ends(config, ends, kind_of)
    check_nothing_is_left(config, gone)
    attempts = sum(rollout.attempt for rollout in ends.final.values())
    print(f"\n{size.rollouts} rollouts, {attempts} attempts, {size.kills} kills, {seconds:.0f} s")


def check_ends(config: RunConfig, ends: Ends, kind_of: dict[str, str]) -> None:
    assert {i: len(changes) for i, changes in ends.changes.items() if len(changes) != 1} == {}
    assert set(starts(config).values()) == {1}
    wrong = [
        f"{kind_of[i]}: {r.state} {r.exit_code} {r.reason} {r.reward} {r.turns}"
        for i, r in ends.final.items()
        if not as_it_should(config, kind_of[i], r)
    ]
    assert wrong == []


def as_it_should(config: RunConfig, kind: str, rollout: Rollout) -> bool:
    """Class, exit code, reward and, where a limit ended it, the reason."""
    reason, code = rollout.reason or "", rollout.exit_code
    good = rollout.state is RolloutState.SUCCEEDED and rollout.failure is None
    agent = rollout.state is RolloutState.FAILED and rollout.failure == "agent"
    match kind:
        case "hang":
            right = agent and rollout.timed_out
        case "fill":
            right = agent and reason.startswith(f"over harness.limits.workspace_bytes {WORKSPACE_BYTES} (")
        case "children":
            right = agent and "harness.limits.pids" in reason if config.harness.limits.pids else good
        case _:
            right = (good if OWN[kind] == 0 else agent) and code == OWN[kind]
    return right and rollout.reward == 1.0 and rollout.turns == (1 if kind in ("clean", "crash") else 0)


def workspaces(config: RunConfig) -> list[Path]:
    return [p for p in config.run_dir.glob("attempts/*/*/*") if p.name in ("workspace", "tmp")]


def check_nothing_is_left(config: RunConfig, gone: Left) -> None:
    assert gone() == []
    assert groups_of(config) == []
    assert workspaces(config) == [] and list((config.run_dir / "launcher" / "jobs").iterdir()) == []
    assert not (config.run_dir / "launcher" / "socket").exists()
    sizes = [path.stat().st_size for path in config.run_dir.glob("attempts/*/*/harness.log")]
    assert max(sizes) < LOG_BYTES + 1000


@pytest.fixture
def renderer(tokenizer_path: Path) -> ModelRenderer:
    return ModelRenderer(str(tokenizer_path), "qwen3", "template")


@pytest.mark.slow
async def test_a_little_chaos(tmp_path: Path, tokenizer_path: Path, renderer: ModelRenderer, gone: Left) -> None:
    await chaos(tmp_path, tokenizer_path, renderer, SMALL, gone)


@pytest.mark.chaos
@pytest.mark.timeout(1800)
async def test_chaos(tmp_path: Path, tokenizer_path: Path, renderer: ModelRenderer, gone: Left) -> None:
    await chaos(tmp_path, tokenizer_path, renderer, LARGE, gone)
