"""The Kubernetes backend against an API server that remembers: what it makes, adopts, waits for and tells."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import tarfile
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from leyden.config import RunConfig
from leyden.controller.backends.interface import Events
from leyden.controller.backends.kubernetes import backend as backends
from leyden.controller.backends.kubernetes.backend import KubernetesBackend
from leyden.controller.backends.kubernetes.manifest import Program, job_name
from leyden.controller.backends.kubernetes.programs import Programs
from leyden.controller.jobs import TIMEOUT, Exit
from leyden.controller.plan import Phase
from leyden.errors import LaunchError
from leyden.records import Claim
from tests.controller.kubernetes.fake_cluster import FakeCluster, Json
from tests.controller.test_plan import rollout

Config = Callable[..., RunConfig]
URL = "http://gateway:8000"
QUOTA = 'jobs.batch "x" is forbidden: exceeded quota: q, requested: count/jobs.batch=1, used: 2, limited: 2'
RUNNING = {"phase": "Running", "containerStatuses": [
    {"name": "harness", "state": {"running": {"startedAt": "2026-11-30T10:00:00Z"}}}, {"name": "keep", "state": {}},
]}  # fmt: skip


@dataclass
class Told:
    """What the backend told, and the moments at which something was."""

    started: dict[str, float] = field(default_factory=dict)
    waiting: list[tuple[str, str]] = field(default_factory=list)
    ended: dict[str, Exit] = field(default_factory=dict)
    news: asyncio.Condition = field(default_factory=asyncio.Condition)

    def events(self) -> Events:
        return Events(
            lambda job, at: self._note(lambda when: self.started.update({job: when}), at),
            lambda job, why: self._note(self.waiting.append, (job, why)),
            lambda job, exit_: self._note(lambda end: self.ended.update({job: end}), exit_),
        )

    def _note(self, take: Callable[[Any], None], what: Any) -> None:
        take(what)
        self._last = asyncio.ensure_future(self._notify())

    async def _notify(self) -> None:
        async with self.news:
            self.news.notify_all()

    async def wait(self, why: str) -> None:
        async with asyncio.timeout(60), self.news:
            await self.news.wait_for(lambda: ("r.1", why) in self.waiting)

    async def end(self, job_id: str = "r.1") -> Exit:
        async with asyncio.timeout(60), self.news:
            await self.news.wait_for(lambda: job_id in self.ended)
        return self.ended[job_id]

    async def start(self, job_id: str = "r.1") -> float:
        async with asyncio.timeout(60), self.news:
            await self.news.wait_for(lambda: job_id in self.started)
        return self.started[job_id]


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[FakeCluster]:
    async with FakeCluster(tmp_path) as it:
        yield it


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(backends, "LOOK_S", 0.05)


def settings(config: Config, cluster: FakeCluster, **sections: Any) -> RunConfig:
    kubernetes = {"image": "agent:1", "kubeconfig": str(cluster.kubeconfig)} | sections.pop("kubernetes", {})
    return config(
        controller={"backend": "kubernetes"} | sections.pop("controller", {}), kubernetes=kubernetes, **sections
    )


@contextlib.asynccontextmanager
async def opened(made: RunConfig, controller: str = "me") -> AsyncIterator[tuple[KubernetesBackend, Told]]:
    told = Told()
    backend = KubernetesBackend(made, URL, "run", controller, told.events())
    await backend.open()
    supervising = asyncio.create_task(backend.supervise())
    try:
        yield backend, told
    finally:
        supervising.cancel()
        await asyncio.gather(supervising, return_exceptions=True)
        await backend.close()


def claim(rollout_id: str = "r", **fields: Any) -> Claim:
    return Claim(rollout(rollout_id, task={"files": {}}, **fields), "lk-a-" + "x" * 30, "lk-w-" + "x" * 30)


def program(made: RunConfig) -> Program:
    return Programs(made, "run", URL).harness(claim())


def names(cluster: FakeCluster) -> list[str]:
    return [job["metadata"]["name"] for job in cluster.all("jobs")]


async def test_a_quota_is_waited_for(config: Config, cluster: FakeCluster) -> None:
    """Refused twice, then made; meanwhile the quota's words are what the attempt waits for."""
    cluster.faults.extend([(403, QUOTA), (403, QUOTA)])
    async with opened(settings(config, cluster)) as (backend, told):
        await backend.start_harness(claim())
        assert [(job, "exceeded quota: q" in why) for job, why in told.waiting[:2]] == [("r.1", True)] * 2
        assert len(names(cluster)) == len(cluster.all("secrets")) == 1
        assert told.ended == {}


async def test_a_quota_that_stays_full_ends_the_wait(config: Config, cluster: FakeCluster) -> None:
    """With the quota's words, when the queue's budget is used up; nothing is left."""
    cluster.faults.extend([(403, QUOTA)] * 1000)
    async with opened(settings(config, cluster, controller={"start_timeout_s": 0.05})) as (backend, _):
        with pytest.raises(LaunchError, match=r"the cluster took no Job for r\.1: .*exceeded quota: q"):
            await backend.start_harness(claim())
    assert cluster.things == {}


async def test_a_refusal_that_will_not_pass_is_not_tried_again(config: Config, cluster: FakeCluster) -> None:
    cluster.faults.append((403, 'jobs.batch is forbidden: User "u" cannot create resource "jobs"'))
    async with opened(settings(config, cluster)) as (backend, _):
        with pytest.raises(LaunchError, match=r"the cluster refuses the Job of r\.1: .*cannot create resource"):
            await backend.start_harness(claim())
    assert [(verb, what.split("/")[0]) for verb, what in cluster.asked if verb != "LIST"] == [
        ("POST", "secrets"), ("POST", "jobs"), ("DELETE", "secrets"),
    ]  # fmt: skip


async def test_a_job_whose_creation_was_not_answered_is_ours(config: Config, cluster: FakeCluster) -> None:
    """Made, the answer lost; the next try meets 409 and adopts it: one Job, its Secret goes with it."""
    cluster.faults.append("lost")
    async with opened(settings(config, cluster)) as (backend, told):
        await backend.start_harness(claim())
        (job,) = cluster.all("jobs")
        (secret,) = cluster.all("secrets")
        assert secret["metadata"]["ownerReferences"][0]["uid"] == job["metadata"]["uid"]
        await cluster.pod(job, RUNNING)
        await told.start()
        assert [what for what in cluster.asked if what[0] == "POST" and what[1].startswith("jobs")] == [
            ("POST", f"jobs/{job['metadata']['name']}")
        ] * 2


async def test_a_name_that_is_being_deleted_is_not_waited_for(config: Config, cluster: FakeCluster) -> None:
    """The attempt gets a Job of another name."""
    made = settings(config, cluster)
    cluster.faults.append((409, 'object is being deleted: jobs.batch "x" already exists'))
    async with opened(made) as (backend, _):
        await backend.start_harness(claim())
    assert names(cluster) == [job_name(replace(program(made), again=1))]
    assert names(cluster) != [job_name(program(made))]


async def test_names_that_stay_being_deleted_end_the_wait(config: Config, cluster: FakeCluster) -> None:
    cluster.faults.extend([(409, 'object is being deleted: jobs.batch "x" already exists')] * 1000)
    async with opened(settings(config, cluster, controller={"start_timeout_s": 0.05})) as (backend, _):
        with pytest.raises(LaunchError, match=r"the cluster took no Job for r\.1: .*object is being deleted"):
            await backend.start_harness(claim())
    assert cluster.things == {}


async def test_a_stranger_s_job_of_that_name_is_left_alone(config: Config, cluster: FakeCluster) -> None:
    made = settings(config, cluster)
    name = job_name(program(made))
    await cluster.put("jobs", {"metadata": {"name": name, "labels": {"app": "theirs"}}})
    async with opened(made) as (backend, _):
        with pytest.raises(LaunchError, match=rf"a Job {name} exists that is not of this attempt"):
            await backend.start_harness(claim())
    assert [job["metadata"]["labels"] for job in cluster.all("jobs")] == [{"app": "theirs"}]


async def test_the_rate_holds_for_the_next_controller(config: Config, cluster: FakeCluster) -> None:
    """Although the Job of the first one is gone."""
    made = settings(config, cluster, kubernetes={"creates_per_minute": 1})

    class Waited(Exception):
        pass

    async def sleep(seconds: float) -> None:
        assert 0 < seconds <= 60
        raise Waited

    async with opened(made) as (backend, _):
        await backend.start_harness(claim())
    for name in names(cluster):
        await cluster.remove("jobs", name)
    async with opened(made) as (backend, _):
        backend._rate._sleep = sleep
        with pytest.raises(Waited):
            await backend.start_harness(claim("other"))


async def test_an_image_that_cannot_be_pulled_frees_its_slot(config: Config, cluster: FakeCluster) -> None:
    """Infrastructure with reason and image, and nothing of it is left."""
    made = settings(config, cluster, kubernetes={"image_wait_s": 0.2})
    async with opened(made) as (backend, told):
        await backend.start_harness(claim())
        (job,) = cluster.all("jobs")
        waiting = {"reason": "ImagePullBackOff", "message": 'Back-off pulling image "agent:1"'}
        await cluster.pod(
            job, {"containerStatuses": [{"name": "harness", "image": "agent:1", "state": {"waiting": waiting}}]}
        )
        ended = await told.end()
        assert ended.error is not None and ended.error.startswith("not started after ")
        assert 'ImagePullBackOff, image agent:1: Back-off pulling image "agent:1"' in ended.error
        await backend.forget(replace(backend.find(claim().rollout), exit=ended), keep=False)
        assert backend.running == set()
        await cluster.until(lambda: not cluster.things)


@pytest.mark.parametrize(
    ("fields", "phase", "exit_"),
    [
        ({"reward": 0.5}, Phase.EXITED, Exit(0, None, 7.0, 7.0)),
        ({"reward": 0.5, "exit_code": 3}, Phase.EXITED, Exit(3, None, 7.0, 7.0)),
        ({"reward": 0.5, "timed_out": True}, Phase.EXITED, Exit(None, None, 7.0, 7.0, killed=TIMEOUT)),
        ({}, Phase.STARTING, None),
    ],
)
async def test_a_job_that_went_while_nobody_looked(
    config: Config, cluster: FakeCluster, fields: Json, phase: Phase, exit_: Exit | None
) -> None:
    """A reward that was accepted says that it ended; without one it is void."""
    async with opened(settings(config, cluster)) as (backend, told):
        found = backend.find(rollout("r", started=7.0, **fields))
        assert (found.phase, found.exit) == (phase, exit_)
        if exit_ is None:
            assert (await told.end()).error == "its Job disappeared"


@pytest.mark.parametrize("ahead_s", [-3600, 3600])
async def test_a_node_s_clock_moves_no_deadline(
    config: Config, cluster: FakeCluster, caplog: pytest.LogCaptureFixture, ahead_s: float
) -> None:
    """A start that cannot be is told as now, with a warning; no duration is negative."""
    async with opened(settings(config, cluster)) as (backend, told):
        before = time.time()
        await backend.start_harness(claim())
        (job,) = cluster.all("jobs")
        await cluster.pod(job, {})
        await told.wait("the pod was not seen by a node yet")
        started = datetime.fromtimestamp(before + ahead_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        running = {"name": "harness", "state": {"running": {"startedAt": started}}}
        await cluster.pod(job, {"phase": "Running", "containerStatuses": [running]})
        assert before <= await told.start() <= time.time()
        (warning,) = [r.message for r in caplog.records if "clock" in r.message]
        assert ("started -" in warning) == (ahead_s > 0)
        await cluster.remove("jobs", job["metadata"]["name"])
        ended = await told.end()
        assert ended.started <= ended.ended


async def test_a_start_is_the_node_s_where_the_clocks_agree(config: Config, cluster: FakeCluster) -> None:
    """What a watch that was behind learns late counts from when it was."""
    async with opened(settings(config, cluster)) as (backend, told):
        await backend.start_harness(claim())
        (job,) = cluster.all("jobs")
        at = datetime.now(UTC).replace(microsecond=0)
        running = {"name": "harness", "state": {"running": {"startedAt": at.strftime("%Y-%m-%dT%H:%M:%SZ")}}}
        await cluster.pod(job, {"phase": "Running", "containerStatuses": [running]})
        assert await told.start() == at.timestamp()


async def test_a_job_that_is_deleted_while_it_runs_ends_at_once(config: Config, cluster: FakeCluster) -> None:
    """By the watch, without waiting for a deadline."""
    async with opened(settings(config, cluster)) as (backend, told):
        await backend.start_harness(claim())
        (job,) = cluster.all("jobs")
        await cluster.pod(job, RUNNING)
        await told.start()
        name = job["metadata"]["name"]
        await cluster.remove("jobs", name)
        assert (await told.end()).error == f"the Job of the pod {name}-pod was deleted while it ran"


async def test_last_words_are_kept_before_a_kill(config: Config, cluster: FakeCluster) -> None:
    """Three lines, then the deadline; keys are taken out. The log is read before the pod is ended."""
    made = settings(config, cluster)
    async with opened(made) as (backend, told):
        await backend.start_harness(claim())
        (job,) = cluster.all("jobs")
        await cluster.pod(job, RUNNING)
        await told.start()
        name = job["metadata"]["name"]
        cluster.logs[f"{name}-pod"] = f"one\ntwo {claim().agent_key}\nthree\n"
        backend.kill("r.1", TIMEOUT)
        log = made.run_dir / "attempts" / "r" / "1" / "harness.log"
        await cluster.until(lambda: "leyden/killed" in str(cluster.things["jobs", name]["metadata"]))
        assert log.read_text() == "one\ntwo lk-[redacted]\nthree\n"
        await cluster.remove("pods", f"{name}-pod")
        assert (await told.end()).timed_out
        assert log.read_text() == "one\ntwo lk-[redacted]\nthree\n"


async def test_a_full_folder_is_the_agent_s_own_end_and_graded_on_its_first_workspace(
    config: Config, cluster: FakeCluster
) -> None:
    """Its workspace went with the pod; the grader gets the one that the harness began with."""
    message = 'Usage of EmptyDir volume "leyden" exceeds the limit "2". '
    made = settings(config, cluster, workspace={"files": "files"})
    it = claim()
    it = replace(it, rollout=replace(it.rollout, task={"files": {"a.txt": "first"}}))
    async with opened(made) as (backend, told):
        await backend.start_harness(it)
        (job,) = cluster.all("jobs")
        await cluster.pod(job, RUNNING)
        await told.start()
        await cluster.pod(job, {"phase": "Failed", "reason": "Evicted", "message": message})
        ended = await told.end()
        assert (ended.killed, ended.error, ended.note) == ("limit", None, f"Evicted: {message}".strip())
        await backend.start_grader(it.rollout, "lk-g-" + "x" * 30, 1)
        (grader,) = [job for job in cluster.all("jobs") if job["metadata"]["name"].endswith("-g1")]
        pod = grader["spec"]["template"]["spec"]
        assert [c["name"] for c in pod["initContainers"]] == ["unpack"]
        data = cluster.things["secrets", grader["metadata"]["name"]]["data"]
        with tarfile.open(fileobj=io.BytesIO(base64.b64decode(data["workspace.tar.gz"]))) as archive:
            content = archive.extractfile("./a.txt")
            assert content is not None and content.read() == b"first"
        assert json.loads(base64.b64decode(data[key_of(pod, "exit.json")]))["killed"] == "limit"


def key_of(pod: Json, file: str) -> str:
    """A file's key in the Secret."""
    (items,) = [v["secret"]["items"] for v in pod["volumes"] if v["name"] == "leyden-files"]
    (key,) = [item["key"] for item in items if item["path"] == file]
    return str(key)


async def test_a_workspace_that_was_lost_otherwise_voids_the_attempt(config: Config, cluster: FakeCluster) -> None:
    async with opened(settings(config, cluster)) as (backend, told):
        await backend.start_harness(claim())
        (job,) = cluster.all("jobs")
        state = {"exitCode": 0, "startedAt": "2026-11-30T10:00:00Z", "finishedAt": "2026-11-30T10:00:01Z"}
        done = [
            {"name": "harness", "state": {"terminated": state}},
            {"name": "keep", "state": {"terminated": state | {"exitCode": 1, "message": "keep: no answer"}}},
        ]
        await cluster.pod(job, {"phase": "Failed", "containerStatuses": done})
        ended = await told.end()
    assert ended.error == "the workspace was lost: the workspace was not saved: keep: no answer"


DONE = {"exitCode": 0, "startedAt": "2026-11-30T10:00:00Z", "finishedAt": "2026-11-30T10:00:01Z"}
SAVED = {"phase": "Succeeded", "containerStatuses": [
    {"name": "harness", "state": {"terminated": DONE}}, {"name": "keep", "state": {"terminated": DONE}},
]}  # fmt: skip


async def test_no_end_is_told_before_job_and_pods_were_read(config: Config, cluster: FakeCluster) -> None:
    """Pods' events do not come; the Job is complete. The pod, read, says how its harness ended."""
    async with opened(settings(config, cluster)) as (backend, told):
        await backend.start_harness(claim())
        (job,) = cluster.all("jobs")
        pod = await cluster.pod(job, RUNNING)
        await told.start()
        cluster.mute.add("pods")
        await cluster.pod(job, SAVED | {"conditions": pod["status"]["conditions"]})
        await cluster.remove("jobs", job["metadata"]["name"])
        ended = await told.end()
    assert (ended.exit_code, ended.error, ended.killed) == (0, None, None)


async def test_a_container_that_lives_on_is_ended_once_the_workspace_is_saved(
    config: Config, cluster: FakeCluster
) -> None:
    """And the end stays known to the next controller, although its pod is gone then."""
    made = settings(config, cluster)
    proxy = {"name": "proxy", "state": {"running": {}}}
    async with opened(made) as (backend, told):
        await backend.start_harness(claim())
        (job,) = cluster.all("jobs")
        name = job["metadata"]["name"]
        await cluster.pod(job, SAVED | {"phase": "Running", "containerStatuses": [*SAVED["containerStatuses"], proxy]})
        assert (await told.end()).clean
        await cluster.until(lambda: cluster.things["jobs", name]["spec"]["activeDeadlineSeconds"] == 1)
    await cluster.remove("pods", f"{name}-pod")
    async with opened(made) as (backend, _):
        found = backend.find(claim().rollout)
        assert found.phase is Phase.EXITED and found.exit is not None and found.exit.clean


@pytest.mark.parametrize(("said", "killed"), [("", "limit"), ("the harness is gone\n", None)])
async def test_what_a_keeper_that_hangs_has_printed_says_whose_fault_it_is(
    config: Config, cluster: FakeCluster, said: str, killed: str | None
) -> None:
    """Its pod is ended once the end is told, and the next controller reads the same from the Job."""
    made = settings(config, cluster)
    async with opened(made) as (backend, told):
        await backend.start_harness(claim())
        (job,) = cluster.all("jobs")
        name = job["metadata"]["name"]
        cluster.logs[f"{name}-pod"] = said
        harness, keeper = SAVED["containerStatuses"]
        hangs = keeper | {"state": {"running": {"startedAt": "2026-11-30T10:00:00Z"}}}
        await cluster.pod(job, {"phase": "Running", "containerStatuses": [harness, hangs]})
        ended = await told.end()
        assert (ended.killed, ended.error is None) == (killed, killed is not None)
        await cluster.until(lambda: cluster.things["jobs", name]["spec"]["activeDeadlineSeconds"] == 1)
    await cluster.remove("pods", f"{name}-pod")
    async with opened(made) as (backend, _):
        found = backend.find(claim().rollout)
        assert found.exit is not None and (found.exit.killed, found.exit.error) == (killed, ended.error)


def test_the_cluster_ends_no_harness_for_time_that_it_was_held(config: Config, cluster: FakeCluster) -> None:
    """A weekend, or what the run file says. The controller's clock, which counts held time, ends attempts."""
    made = settings(config, cluster, harness={"timeout_s": 1800})
    weekend_s = 3 * 24 * 3600
    assert program(made).deadline_s > made.controller.start_timeout_s + 1800 + weekend_s
    short = settings(config, cluster, harness={"timeout_s": 1800}, kubernetes={"pause_allowance_s": 60})
    assert program(short).deadline_s == 600 + 1800 + 60 + 60 + 1


async def test_a_log_that_cannot_be_kept_holds_no_end_back(config: Config, cluster: FakeCluster) -> None:
    made = settings(config, cluster)
    async with opened(made) as (backend, told):
        await backend.start_harness(claim())
        (job,) = cluster.all("jobs")
        folder = made.run_dir / "attempts" / "r"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "1").write_text("a file where the attempt's folder should be")
        await cluster.pod(job, SAVED)
        assert (await told.end()).clean
        backend.kill("r.1", TIMEOUT)
        await backend.forget(backend.find(claim().rollout), keep=False)


async def test_a_log_that_cannot_be_read_is_an_empty_one_for_the_grader(config: Config, cluster: FakeCluster) -> None:
    made = settings(config, cluster)
    (made.run_dir / "attempts" / "r" / "1" / "harness.log").mkdir(parents=True)
    async with opened(made) as (backend, _):
        await backend.start_grader(claim().rollout, "lk-g-" + "x" * 30, 1)
        (job,) = cluster.all("jobs")
        secret = cluster.things["secrets", job["metadata"]["name"]]
        assert secret["data"][key_of(job["spec"]["template"]["spec"], "harness.log")] == ""
