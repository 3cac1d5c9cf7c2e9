"""kill -9 of the controller, of the launcher, of both: no run is lost or doubled, nothing is left behind."""

from __future__ import annotations

import asyncio
import json
import random

import pytest

from tests.controller.conftest import controlling
from tests.controller.live_gateway import LiveGateway
from tests.controller.programs import (
    Config,
    Left,
    appears,
    grader_after,
    kill9,
    launchers,
    start_controller,
    starts,
    wait_until,
)


async def test_restarted_controller_adopts_what_runs_and_what_ended(config: Config, gone: Left) -> None:
    """Kill -9 with 3 live agents: each ends once, none runs a second time."""
    made = config("echo x >> ../starts; while ! test -e ../go; do sleep 0.02; done")
    async with LiveGateway() as gateway:
        for i in range(3):
            gateway.add(f"r{i}")
        first = start_controller(made, gateway)
        for i in range(3):
            await appears(made.run_dir / f"attempts/r{i}/1/starts")
        kill9(first)
        (made.run_dir / "attempts/r0/1/go").touch()  # ends while no controller is there
        await appears(made.run_dir / "attempts/r0/1/exit.json")
        second = start_controller(made, gateway)
        (first_ended,) = await gateway.ended("r0")
        for i in (1, 2):
            (made.run_dir / f"attempts/r{i}/1/go").touch()
        rollouts = await gateway.ended()
        kill9(second)
        async with controlling(made, gateway):
            pass
    assert first_ended.state == "succeeded"
    assert [(r.state, r.attempt, r.reward) for r in rollouts] == [("succeeded", 1, 1.0)] * 3
    assert starts(made) == {"r0/1": 1, "r1/1": 1, "r2/1": 1}


async def test_deadline_holds_over_a_restart(config: Config, gone: Left) -> None:
    made = config("echo x >> ../starts; sleep 300", harness={"timeout_s": 2})
    async with LiveGateway() as gateway:
        gateway.add("r1")
        first = start_controller(made, gateway)
        await appears(made.run_dir / "attempts/r1/1/starts")
        kill9(first)
        async with controlling(made, gateway):
            (rollout,) = await gateway.ended()
    assert (rollout.timed_out, rollout.attempt) == (True, 1)
    facts = json.loads((made.run_dir / "attempts/r1/1/exit.json").read_text())
    assert facts["killed"] == "timeout" and facts["ended"] - facts["started"] >= 1.9


async def test_claim_without_a_start_is_given_back(config: Config, gone: Left) -> None:
    made = config("echo x >> ../starts")
    async with LiveGateway() as gateway:
        gateway.add("r1")
        gateway.claimed("r1")
        gateway.add("theirs")
        gateway.claimed("theirs", "another")
        async with controlling(made, gateway):
            (rollout,) = await gateway.ended("r1")
            assert gateway["theirs"].state == "running"
    assert (rollout.state, rollout.attempt) == ("succeeded", 2)
    assert starts(made) == {"r1/2": 1}


@pytest.mark.slow
async def test_kills_at_any_moment_neither_lose_nor_double_a_run(config: Config, gone: Left) -> None:
    made = config(
        "echo x >> ../starts; sleep 0.1",
        harness={"max_attempts": 50},
        controller={"concurrency": 4},
        grader={"command": ["sh", "-c", grader_after("echo x >> ../graded")]},
    )
    rng = random.Random(3)
    async with LiveGateway(max_attempts=50) as gateway:
        for i in range(16):
            gateway.add(f"r{i}")
        ended = asyncio.create_task(gateway.ended(limit_s=500))
        while not ended.done():
            process = start_controller(made, gateway)
            calls = len(gateway.calls) + rng.randrange(1, 12)
            await wait_until(lambda calls=calls: len(gateway.calls) >= calls or ended.done())  # type: ignore[misc]
            await asyncio.sleep(rng.random() * 0.05)
            if rng.random() < 0.3:
                for launcher in launchers(made):
                    launcher.kill()
            kill9(process)
        rollouts = await ended
        async with controlling(made, gateway):
            pass
    assert [r.state for r in rollouts] == ["succeeded"] * 16
    assert set(starts(made).values()) == {1}
    assert {f"{r.rollout_id}/{r.attempt}" for r in rollouts} <= set(starts(made))


# The launcher without a controller


# Preload and fork


@pytest.mark.parametrize(("keep", "kept"), [("none", [False, False]), ("failed", [False, True]), ("all", [True, True])])
async def test_what_a_killed_controller_left_is_cleaned_up_by_the_policy(
    config: Config, gone: Left, keep: str, kept: list[bool]
) -> None:
    """Ended, but the controller was killed before it removed the workspaces; a live attempt's stays."""
    made = config("while ! test -e ../go; do sleep 0.02; done", workspace={"keep": keep})
    async with LiveGateway() as gateway:
        for name, exit_code in (("good", 0), ("bad", 1)):
            gateway.add(name)
            gateway.over(name, exit_code)
            (made.run_dir / "attempts" / name / "1" / "workspace").mkdir(parents=True)
            (made.run_dir / "attempts" / name / "1" / "settled").touch()  # an agent can say so as well
        gateway.add("live")
        folder = made.run_dir / "attempts"
        async with controlling(made, gateway):
            for name in ("good", "bad"):
                await appears(made.run_dir / "settled" / f"{name}.1")
            await appears(folder / "live" / "1" / "workspace")
            assert [(folder / name / "1" / "workspace").exists() for name in ("good", "bad")] == kept
            (folder / "live" / "1" / "go").touch()
            await gateway.ended("live")
            await appears(made.run_dir / "settled/live.1")
