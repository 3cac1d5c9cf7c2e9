"""What happens in a real cluster while no controller looks: it is away, or its watches are held up and expire."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import pytest
import yaml

from leyden.controller.jobs import grader_job, harness_job
from leyden.types import FailureClass, RolloutState
from tests.kube.cluster import Cluster
from tests.kube.proxy import api_proxy, kubectl_proxy
from tests.kube.runs import CALL, FOREVER, GRADE, brief, gates, good, once, run

pytestmark = [pytest.mark.kube, pytest.mark.timeout(900)]
SUCCEEDED, FAILED = RolloutState.SUCCEEDED, RolloutState.FAILED


async def test_watches_that_expired(
    kube: Cluster, namespace: str, tmp_path: Path, tokenizer_path: Path, python_image: str
) -> None:
    """410 from the real API server; one harness has ended meanwhile, another one's pod is gone."""
    if kube.state is None:
        pytest.skip("only the test bed's etcd is compacted")
    with gates(kube.host) as gate, kubectl_proxy(kube) as url:
        async with api_proxy(url, "jobs", "pods", "events") as (proxy, kubeconfig):
            (tmp_path / "kubeconfig").write_text(yaml.safe_dump(kubeconfig))
            async with run(
                *(kube, namespace, tmp_path, tokenizer_path, python_image),
                harness={"max_attempts": 2, "timeout_s": 600},
                kubernetes={"kubeconfig": str(tmp_path / "kubeconfig")},
            ) as it:
                ids = await it.add([good(0.25, first=gate.wait("go")), good(0.75, first=once(FOREVER))])
                pods = [await it.running_pod(rollout_id) for rollout_id in ids]
                await it.until(lambda: "go" in gate.arrived)
                await proxy.hold()
                gate.open("go")
                it.delete("pod", pods[1], "--grace-period=0", "--force")
                await it.until(lambda: it.is_over(harness_job(ids[0], 1)))
                await asyncio.to_thread(kube.forget_versions)
                proxy.release()
                assert brief(await it.ended(ids, 240)) == [(SUCCEEDED, None, 0.25, 1), (SUCCEEDED, None, 0.75, 2)]
                assert proxy.expired
                await it.nothing_left()
                assert f"the pod {pods[1]} was deleted while it ran" in it.end_of(ids[1], 1)


async def test_pods_that_are_seen_before_their_jobs(
    kube: Cluster, namespace: str, tmp_path: Path, tokenizer_path: Path, python_image: str
) -> None:
    """The watch of Jobs lags behind that of pods: nobody has deleted what was not seen yet, or what Leyden killed."""
    with gates(kube.host) as gate, kubectl_proxy(kube) as url:
        async with api_proxy(url, "jobs") as (proxy, kubeconfig):
            (tmp_path / "kubeconfig").write_text(yaml.safe_dump(kubeconfig))
            async with run(
                *(kube, namespace, tmp_path, tokenizer_path, python_image),
                harness={"timeout_s": 30},
                kubernetes={"kubeconfig": str(tmp_path / "kubeconfig")},
            ) as it:
                hangs = {"script": f"{CALL} && echo 0.5 > score && {gate.wait('never')}"}
                ids = await it.add([hangs])
                await it.until(lambda: "never" in gate.arrived)
                await proxy.hold()
                ids += await it.add([good(), good(0.25)])
                await it.until(lambda: all(it.is_over(harness_job(rollout_id, 1)) for rollout_id in ids), 180)
                proxy.release()
                assert brief(await it.ended(ids, 240)) == [
                    (FAILED, FailureClass.AGENT, 0.5, 1),
                    (SUCCEEDED, None, 1.0, 1),
                    (SUCCEEDED, None, 0.25, 1),
                ]
                await it.nothing_left()


async def test_what_ends_while_no_controller_runs(
    kube: Cluster, namespace: str, tmp_path: Path, tokenizer_path: Path, python_image: str
) -> None:
    """Jobs end, pass their deadline, and are removed by their TTL before anybody saw how they ended.

    Where the outcome is lost, the attempt is void; a deadline that a controller sees is the agent's failure.
    """
    with gates(kube.host) as gate:
        tasks = [
            good(first=gate.wait("go")),
            good(0.25, first=gate.wait("gone")),
            good(0.5, first=once(gate.wait("never"))),
            good(0.75, grade=gate.wait("grade")),
            {"script": f"{CALL} && echo 0.875 > score && {gate.wait('late')}"},
        ]
        async with run(
            *(kube, namespace, tmp_path, tokenizer_path, python_image),
            harness={"max_attempts": 2, "timeout_s": 600},
            grader={"command": ["sh", "-c", "{{ task.grade | default('true') }}; " + GRADE]},
        ) as it:
            ids = await it.add(tasks)
            await it.until(lambda: gate.arrived >= {"go", "gone", "never", "grade", "late"}, 120)
            ended, removed, overdue, _, late = (harness_job(rollout_id, 1) for rollout_id in ids)
            grader = grader_job(ids[3], 1, 1)
            it.change_job(late, activeDeadlineSeconds=1)
            (found,) = await it.ended(ids[4:], 120)
            assert brief([found]) == [(FAILED, FailureClass.AGENT, 0.875, 1)] and found.timed_out
            it.controllers[0].kill()
            it.controllers[0].wait()
            for job in (removed, grader):
                it.change_job(job, ttlSecondsAfterFinished=0)
            it.change_job(overdue, activeDeadlineSeconds=1)
            gate.open("go", "gone", "grade")
            await it.until(lambda: it.is_over(ended) and it.is_over(overdue) and not it.pods(overdue), 120)
            await it.until(lambda: it.job(removed) is None and it.job(grader) is None, 120)
            await it.until(partial(it.rewarded, ids[3]))
            it.start_controller()
            assert brief(await it.ended(ids[:4], 240)) == [
                (SUCCEEDED, None, 1.0, 1),
                (SUCCEEDED, None, 0.25, 2),
                (SUCCEEDED, None, 0.5, 2),
                (SUCCEEDED, None, 0.75, 1),
            ]
            await it.nothing_left()
            assert "its Job disappeared" in it.end_of(ids[1], 1)
            assert "DeadlineExceeded: " in it.end_of(ids[2], 1)
