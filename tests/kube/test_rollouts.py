"""Rollouts as Jobs of a real cluster: every ending, and every part that may go away meanwhile."""

from __future__ import annotations

import asyncio
import os
import re
from functools import partial
from pathlib import Path

import pytest

from leyden.controller.jobs import harness_job
from leyden.types import FailureClass, RolloutState
from tests.kube.cluster import Cluster
from tests.kube.runs import CALL, FOREVER, GRADE, brief, gates, good, once, run

pytestmark = [pytest.mark.kube, pytest.mark.timeout(2400)]
FILL = "x=$(head -c 200m /dev/zero | tr '\\0' x); echo $x"
MANY = int(os.environ.get("LEYDEN_KUBE_ROLLOUTS", "200"))
SUCCEEDED, FAILED = RolloutState.SUCCEEDED, RolloutState.FAILED
AGENT, INFRASTRUCTURE = FailureClass.AGENT, FailureClass.INFRASTRUCTURE
Place = tuple[Cluster, str, Path, Path, str]


@pytest.fixture
def place(kube: Cluster, namespace: str, tmp_path: Path, tokenizer_path: Path, python_image: str) -> Place:
    return kube, namespace, tmp_path, tokenizer_path, python_image


async def test_many_rollouts_with_rewards_leave_nothing(place: Place) -> None:
    async with run(*place) as it:
        ids = await it.add(good(n / MANY) for n in range(MANY))
        found = await it.ended(ids, 60 + 10 * MANY)
        assert [(r.state, r.reward, r.turns, r.attempt) for r in found] == [
            (SUCCEEDED, n / MANY, 1, 1) for n in range(MANY)
        ]
        await it.nothing_left()


async def test_every_ending_has_its_class_and_reason(place: Place) -> None:
    """The last words are kept as well."""
    tasks = {
        "fails": {"script": f"{CALL}; echo last words; echo 0.5 > score; exit 3"},
        "hangs": {"script": f"{CALL}; echo 0.25 > score; echo waiting; sleep 300"},
        "oom": {
            "script": f"{CALL}; echo 0 > score; x=$(head -c 200m /dev/zero | tr '\\0' x); echo $x",
            "memory": "24Mi",
        },
        "no image": good() | {"image": "testbed.local/missing:1"},
        "no node": good() | {"node": {"there-is": "none"}},
    }
    async with run(*place, harness={"timeout_s": 30}, controller={"start_timeout_s": 60}) as it:
        ids = await it.add(tasks.values())
        found = dict(zip(tasks, await it.ended(ids, 240), strict=True))
        assert brief(list(found.values())) == [
            (FAILED, AGENT, 0.5, 1),
            (FAILED, AGENT, 0.25, 1),
            (FAILED, AGENT, 0.0, 1),
            (FAILED, INFRASTRUCTURE, None, 1),
            (FAILED, INFRASTRUCTURE, None, 1),
        ]
        assert found["fails"].exit_code == 3 and found["hangs"].timed_out
        reasons = {name: rollout.reason or "" for name, rollout in found.items()}
        assert "OOMKilled(137)" in reasons["oom"] and "24Mi" in reasons["oom"]
        assert "ImagePull" in reasons["no image"] and "testbed.local/missing:1" in reasons["no image"]
        assert "Unschedulable" in reasons["no node"]
        attempts = it.folder / "run" / "attempts"
        assert "last words" in (attempts / found["fails"].rollout_id / "1" / "harness.log").read_text()
        assert "waiting" in (attempts / found["hangs"].rollout_id / "1" / "harness.log").read_text()
        await it.nothing_left()


async def test_a_harness_posts_its_own_reward(place: Place) -> None:
    """With its own key. One that failed before it did so has earned nothing."""
    tasks = [{"script": f"{CALL} && echo 0.5 > score && {GRADE}"}, {"script": f"{CALL}; exit 3"}]
    async with run(*place, grader={"command": None, "harness": True}) as it:
        found = await it.ended(await it.add(tasks), 120)
        assert brief(found) == [(SUCCEEDED, None, 0.5, 1), (FAILED, AGENT, 0.0, 1)]
        await it.nothing_left()


async def test_what_others_take_away_is_run_again(place: Place) -> None:
    """A deleted pod, a deleted Job, an eviction that was asked for; each void at once."""
    tasks = [good(score, first=once(FOREVER)) for score in (0.2, 0.4, 0.6)]
    async with run(*place, harness={"max_attempts": 2, "timeout_s": 600}) as it:
        ids = await it.add(tasks)
        it.delete("pod", await it.running_pod(ids[0]), "--grace-period=0", "--force")
        await it.running_pod(ids[1])
        job = it.job(harness_job(ids[1], 1))
        assert job is not None
        it.delete("job", job["metadata"]["name"])
        it.evict(await it.running_pod(ids[2]))
        found = await it.ended(ids, 300)
        assert brief(found) == [(SUCCEEDED, None, score, 2) for score in (0.2, 0.4, 0.6)]
        await it.nothing_left()
        for rollout_id in (ids[0], ids[2]):
            assert re.search(r"the pod \S+ was deleted while it ran", it.end_of(rollout_id, 1))
        assert re.search(r"the Job of the pod \S+ was deleted while it ran", it.end_of(ids[1], 1))


async def test_a_harness_that_fills_its_folder_has_failed_by_itself(place: Place) -> None:
    """Evicted for its own limit, or with more than may be handed in; graded on what it began with."""
    sections = {
        "harness": {"timeout_s": 600},
        "grader": {"command": ["sh", "-c", f"test -e big; echo 0.$? > score; {GRADE}"]},
        "gateway": {"max_workspace_bytes": 1_000_000},
    }
    async with run(*place, **sections) as it:
        ids = await it.add(
            [
                good(first=f"dd if=/dev/zero of=big bs=1M count=8; {FOREVER}"),
                good(first="head -c 1500000 /dev/zero > big"),
            ]
        )
        found = await it.ended(ids, 300)
        assert brief(found) == [(FAILED, AGENT, 0.1, 1)] * 2
        assert re.search('Evicted: Usage of EmptyDir volume "leyden" exceeds the limit', found[0].reason or "")
        assert re.search("the workspace is larger than 1000000 bytes", found[1].reason or "")
        await it.nothing_left()


async def test_a_controller_that_is_killed_is_followed_by_one_that_adopts(place: Place) -> None:
    """Each rollout runs once, whether its harness ends while no controller runs or later."""
    with gates(place[0].host) as gate:
        async with run(*place, harness={"timeout_s": 600}) as it:
            ids = await it.add(good(first=gate.wait(("early", "late")[n % 2])) for n in range(6))
            for rollout_id in ids:
                await it.running_pod(rollout_id)
            it.controllers[0].kill()
            it.controllers[0].wait()
            gate.open("early")
            await it.until(lambda: all(it.is_over(harness_job(rollout_id, 1)) for rollout_id in ids[::2]), 120)
            it.start_controller()
            gate.open("late")
            assert brief(await it.ended(ids, 240)) == [(SUCCEEDED, None, 1.0, 1)] * 6
            await it.nothing_left()


async def test_an_api_server_that_is_away_for_half_a_minute(place: Place) -> None:
    """Harnesses end meanwhile, others are to start. The watch is taken up again; nothing is run twice."""
    with gates(place[0].host) as gate:
        async with run(*place, harness={"timeout_s": 600}, controller={"start_timeout_s": 300}) as it:
            if it.cluster.state is None:
                pytest.skip("the API server of a cluster that was given is not stopped")
            ids = await it.add(good(first=gate.wait("go")) for _ in range(6))
            for rollout_id in ids:
                await it.running_pod(rollout_id)
            it.cluster.kill("apiserver")
            gate.open("go")
            ids += await it.add(good() for _ in range(2))
            await asyncio.sleep(30)
            await asyncio.to_thread(it.cluster.up)
            assert brief(await it.ended(ids, 300)) == [(SUCCEEDED, None, 1.0, 1)] * 8
            await it.nothing_left()
            await asyncio.to_thread(it.cluster.up)  # what gave up meanwhile


async def test_a_controller_that_is_gone_is_followed_by_another_one(place: Place) -> None:
    """Its running Jobs are taken over with its lease, and end once."""
    with gates(place[0].host) as gate:
        async with run(*place, controllers=("one",), harness={"timeout_s": 600}) as it:
            ids = await it.add(good(first=gate.wait("go")) for _ in range(4))
            for rollout_id in ids:
                await it.running_pod(rollout_id)
            it.start_controller("two")
            await it.until(partial(it.knows, "two"))
            it.controllers[0].kill()
            it.controllers[0].wait()
            it.end_lease("one")
            gate.open("go")
            found = await it.ended(ids, 240)
            assert brief(found) == [(SUCCEEDED, None, 1.0, 1)] * 4
            assert {r.controller for r in found} == {"two"}
            await it.nothing_left()


async def test_two_controllers_share_a_run(place: Place) -> None:
    """Each is full before the first harness goes on."""
    with gates(place[0].host) as gate:
        async with run(
            *place, controllers=("one", "two"), harness={"timeout_s": 600}, controller={"concurrency": 4}
        ) as it:
            ids = await it.add(good(n / 16, first=gate.wait(f"g{n}")) for n in range(16))
            await it.until(lambda: len(gate.arrived) == 8, 180)
            gate.open(*(f"g{n}" for n in range(16)))
            found = await it.ended(ids, 300)
            assert brief(found) == [(SUCCEEDED, None, n / 16, 1) for n in range(16)]
            assert {r.controller for r in found} == {"one", "two"}
            await it.nothing_left()
