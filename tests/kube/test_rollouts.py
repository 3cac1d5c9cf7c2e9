"""Rollouts as Jobs of a real cluster: every ending, and every part that may go away meanwhile."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from leyden.client.records import Rollout
from leyden.types import FailureClass, RolloutState
from tests.kube.cluster import Cluster
from tests.kube.runs import CALL, Run, run

pytestmark = [pytest.mark.kube, pytest.mark.timeout(900)]
FILL = "x=$(head -c 200m /dev/zero | tr '\\0' x); echo $x"
MANY = int(os.environ.get("LEYDEN_KUBE_ROLLOUTS", "200"))
SUCCEEDED, FAILED = RolloutState.SUCCEEDED, RolloutState.FAILED
AGENT, INFRASTRUCTURE = FailureClass.AGENT, FailureClass.INFRASTRUCTURE
Place = tuple[Cluster, str, Path, Path, str]


@pytest.fixture
def place(kube: Cluster, namespace: str, tmp_path: Path, tokenizer_path: Path, python_image: str) -> Place:
    return kube, namespace, tmp_path, tokenizer_path, python_image


def good(score: float = 1.0, *, first: str = "true") -> dict[str, Any]:
    """A task whose harness runs `first`, calls the model once and earns `score`."""
    return {"script": f"{first} && {CALL} && echo {score} > score"}


def waits_once(score: float = 1.0) -> dict[str, Any]:
    """In its first attempt the harness waits for a long time."""
    return good(score, first='if [ "$LEYDEN_ATTEMPT" = 1 ]; then sleep 300; fi')


def brief(found: list[Rollout]) -> list[tuple[Any, ...]]:
    return [(r.state, r.failure, r.reward, r.attempt) for r in found]


async def running_pod(it: Run, rollout_id: str) -> str:
    """The name of the pod of a rollout whose harness runs."""

    def find() -> str | None:
        for pod in it.things("pods"):
            statuses = pod["status"].get("containerStatuses", [])
            up = any(s["name"] == "harness" and "running" in s["state"] for s in statuses)
            if up and pod["metadata"]["labels"]["leyden/rollout"] == rollout_id:
                return str(pod["metadata"]["name"])
        return None

    return str(await it.until(find))


async def test_many_rollouts_with_rewards_leave_nothing(place: Place) -> None:
    async with run(*place) as it:
        ids = await it.add(good(n / MANY) for n in range(MANY))
        found = await it.ended(ids, 60 + 5 * MANY)
        assert [(r.state, r.reward, r.turns, r.attempt) for r in found] == [
            (SUCCEEDED, n / MANY, 1, 1) for n in range(MANY)
        ]
        await it.nothing_left()


async def test_every_ending_has_its_class_and_reason(place: Place) -> None:
    """Cases K05, K06, K07, U03: and the last words are kept."""
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
    async with run(*place, harness={"timeout_s": 10}, controller={"start_timeout_s": 20}) as it:
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


async def test_a_pod_or_a_job_that_others_delete_is_run_again(place: Place) -> None:
    """Case K03: deleted while it runs, it is void at once."""
    async with run(*place, harness={"max_attempts": 2}) as it:
        ids = await it.add([waits_once(0.5), waits_once(0.75)])
        pod = await running_pod(it, ids[0])
        it.cluster.kubectl("delete", "pod", pod, "-n", it.namespace, "--wait=false", "--grace-period=0", "--force")
        await running_pod(it, ids[1])
        job = next(j for j in it.things("jobs") if j["metadata"]["labels"]["leyden/rollout"] == ids[1])
        it.cluster.kubectl("delete", "job", job["metadata"]["name"], "-n", it.namespace, "--wait=false")
        assert brief(await it.ended(ids, 120)) == [(SUCCEEDED, None, 0.5, 2), (SUCCEEDED, None, 0.75, 2)]
        await it.nothing_left()


async def test_a_controller_that_is_killed_is_followed_by_one_that_adopts(place: Place) -> None:
    """Cases R05, K10: each rollout runs once."""
    async with run(*place) as it:
        ids = await it.add(good(first="sleep 8") for _ in range(6))
        await running_pod(it, ids[0])
        it.controllers[0].kill()
        it.controllers[0].wait()
        await asyncio.sleep(5)
        it.start_controller()
        assert brief(await it.ended(ids, 180)) == [(SUCCEEDED, None, 1.0, 1)] * 6
        await it.nothing_left()


async def test_an_api_server_that_is_away_for_half_a_minute(place: Place) -> None:
    """Case K02: the watch is taken up again; nothing is run twice."""
    async with run(*place) as it:
        if it.cluster.state is None:
            pytest.skip("the API server of a cluster that was given is not stopped")
        ids = await it.add(good(first="sleep 10") for _ in range(6))
        await running_pod(it, ids[0])
        it.cluster.kill("apiserver")
        await asyncio.sleep(30)
        await asyncio.to_thread(it.cluster.up)
        assert brief(await it.ended(ids, 240)) == [(SUCCEEDED, None, 1.0, 1)] * 6
        await it.nothing_left()
        await asyncio.to_thread(it.cluster.up)  # what gave up meanwhile


async def test_two_controllers_share_a_run(place: Place) -> None:
    async with run(*place, controllers=("one", "two"), controller={"concurrency": 4}) as it:
        ids = await it.add(good(n / 16, first="sleep 2") for n in range(16))
        found = await it.ended(ids, 240)
        assert brief(found) == [(SUCCEEDED, None, n / 16, 1) for n in range(16)]
        assert {r.controller for r in found} == {"one", "two"}
        await it.nothing_left()


async def test_no_secret_is_shown_and_a_key_opens_only_its_own_routes(place: Place) -> None:
    """Case S02."""
    async with run(*place) as it:
        ids = await it.add([good(first="env > env && sleep 15")])
        await running_pod(it, ids[0])
        shown = str([it.things(kind) for kind in ("jobs", "pods")])
        assert "lk-" not in shown
        (secret, *_) = it.things("secrets")
        assert "LEYDEN_KEY" in secret["data"]
        await it.ended(ids, 120)
        assert "lk-" not in it.log()
