"""The verdict on Jobs. The objects in `shapes/` are what Kubernetes 1.20.2 said, shortened; conditions that came later
are made by hand, and the tests' names say so."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from leyden.controller.backends.kubernetes.states import (
    Ended,
    Patience,
    Pending,
    Running,
    Saving,
    Seen,
    Verdict,
    note_of,
)
from leyden.controller.backends.kubernetes.verdict import lingers, verdict
from leyden.controller.jobs import Exit

SHAPES = Path(__file__).parent / "shapes"
PATIENCE = Patience(queue_s=600, image_s=60, save_s=120)


def at(clock: str) -> float:
    return datetime.fromisoformat(f"2026-11-30T{clock}Z").timestamp()


def seen(shape: str, **changes: Any) -> Seen:
    recorded = json.loads((SHAPES / f"{shape}.json").read_text())
    return Seen(**{"job": recorded["job"], "pods": recorded["pods"], "events": recorded["events"]} | changes)


def judge(what: Seen, clock: str) -> Verdict:
    return verdict(what, PATIENCE, at(clock))


def own(code: int | None, started: str, ended: str, signal: int | None = None, note: str | None = None) -> Exit:
    return Exit(code, signal, at(started), at(ended), note=note)


def failed(error: str, started: str, ended: str) -> Exit:
    return Exit(None, None, at(started), at(ended), error=error)


def gone(what: Seen) -> frozenset[str]:
    return frozenset(p["metadata"]["uid"] for p in what.pods)


@pytest.mark.parametrize(
    ("shape", "clock", "expected"),
    [
        ("succeeded", "08:12:00", Ended(own(0, "08:11:28", "08:11:28"))),
        ("exit_3", "08:12:00", Ended(own(3, "08:11:28", "08:11:28"))),
        ("running", "08:12:00", Running(at("08:11:29"))),
        ("starting", "08:12:00", Pending("ContainerCreating")),
        ("saving", "08:11:31", Saving(own(5, "08:11:29", "08:11:29"))),
        ("saved", "08:12:00", Ended(own(5, "08:11:29", "08:11:29"), saved=True)),
        ("killed", "08:16:07", Ended(Exit(None, None, at("08:15:59"), at("08:16:06"), killed="timeout"))),
        ("killed_ending", "08:16:04", Running(at("08:15:59"))),
        ("deadline_ending", "08:16:02", Running(at("08:15:59"))),
    ],
)
def test_plain_ends(shape: str, clock: str, expected: Verdict) -> None:
    """The harness container's own words, not the Job's counters. A pod that is being ended by Leyden or by the Job's
    deadline still runs."""
    assert judge(seen(shape), clock) == expected


def test_a_keeper_that_hangs_is_given_up() -> None:
    ended = Ended(own(5, "08:11:29", "08:11:29", note="the workspace was not saved within 120 s"))
    assert judge(seen("saving"), "08:13:29") == ended
    assert judge(seen("saving"), "08:13:28") == Saving(own(5, "08:11:29", "08:11:29"))


@pytest.mark.parametrize(("code", "killed"), [(1, None), (3, "limit")])
def test_a_keeper_that_fails_says_why(code: int, killed: str | None) -> None:
    """If the harness left more than may be handed in, that is its own end."""
    what = seen("saved")
    done = what.pods[0]["status"]["containerStatuses"][1]["state"]["terminated"]
    done |= {"exitCode": code, "message": "x\nkeep: the workspace is larger than 5 bytes\n"}
    note = "the workspace was not saved: keep: the workspace is larger than 5 bytes"
    assert judge(what, "08:12:00") == Ended(replace(own(5, "08:11:29", "08:11:29", note=note), killed=killed))


def test_what_ended_before_it_was_killed_ended_by_itself() -> None:
    """A kill that came too late changes nothing; Kubernetes' clock has whole seconds."""
    what = seen("killed")
    assert what.job is not None
    what.job["metadata"]["annotations"]["leyden/killed"] = f"timeout {at('08:16:07') + 0.5}"
    assert judge(what, "08:16:08") == Ended(own(7, "08:15:59", "08:16:06"))


def test_a_signal_is_told_from_an_exit_code() -> None:
    what = seen("exit_3")
    what.pods[0]["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"] = 139
    assert judge(what, "08:12:00") == Ended(own(None, "08:11:28", "08:11:28", signal=11))


def test_oom() -> None:
    """OOMKilled under its own limit is the agent's end with the reason named; a killed child of a harness
    that ended well is a warning."""
    assert judge(seen("oom"), "08:12:00") == Ended(
        own(137, "08:11:28", "08:11:29", note="OOMKilled(137): the container's memory limit is 20Mi")
    )
    assert judge(seen("oom_of_a_child"), "08:12:00") == Ended(
        own(
            0,
            "08:11:28",
            "08:11:30",
            note="a child of the harness was OOMKilled: the container's memory limit is 20Mi",
        )
    )


def test_evicted() -> None:
    """Infrastructure, with the cluster's words."""
    what, message = seen("evicted"), "The node was low on resource: ephemeral-storage. Container harness used 9Ki."
    what.pods[0]["status"]["message"] = message
    assert judge(what, "08:17:00") == Ended(failed(f"Evicted: {message}", "08:17:00", "08:17:00"))


@pytest.mark.parametrize(
    "message",
    [
        'Usage of EmptyDir volume "w" exceeds the limit "5Mi".',
        'Container harness exceeded its local ephemeral storage limit "5Mi".',
        "Pod ephemeral local storage usage exceeds the total limit of containers 5Mi.",
    ],
)
def test_a_harness_that_fills_more_than_it_was_given(message: str) -> None:
    """The agent's own end, whether its container's end was seen before the pod went, or not."""
    ended = Exit(None, None, at("08:17:00"), at("08:17:00"), killed="limit", note=f"Evicted: {message}")
    what = seen("evicted")
    what.pods[0]["status"]["message"] = message
    assert judge(what, "08:17:00") == Ended(ended)
    what = seen("exit_3")
    what.pods[0]["status"] |= {"phase": "Failed", "reason": "Evicted", "message": message}
    assert judge(what, "08:12:00") == Ended(replace(ended, started=at("08:11:28"), ended=at("08:11:28")))


def test_a_keeper_s_container_over_its_limit_is_not_the_agent_s() -> None:
    what, message = seen("evicted"), 'Container keep exceeded its local ephemeral storage limit "5Mi".'
    what.pods[0]["status"]["message"] = message
    assert judge(what, "08:17:00") == Ended(failed(f"Evicted: {message}", "08:17:00", "08:17:00"))


def test_disruption_target_made_by_hand() -> None:
    """Kubernetes 1.26 and later: the pod says what disrupted it."""
    what = seen("exit_3")
    status = what.pods[0]["status"]
    status["containerStatuses"][0]["state"]["terminated"]["exitCode"] = 143
    message = "Eviction API: evicting"
    status["conditions"].append(
        {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI", "message": message}
    )
    error = "EvictionByEvictionAPI: Eviction API: evicting"
    assert judge(what, "08:12:00") == Ended(failed(error, "08:11:28", "08:11:28"))


def keeper_of(what: Seen) -> dict[str, Any]:
    (found,) = [c for c in what.pods[0]["status"]["containerStatuses"] if c["name"] == "keep"]
    done: dict[str, Any] = found["state"]["terminated"]
    return done


@pytest.mark.parametrize("second", [28, 29, 30])
@pytest.mark.parametrize("how", ["DisruptionTarget", "deleted", "Evicted, by its event", "Evicted, by nothing"])
def test_what_happens_to_a_pod_after_its_harness_ended_changes_nothing(how: str, second: int) -> None:
    """It ended at :29, and its workspace is saved. In the same second, or earlier, it may have ended for it."""
    what = seen("saved")
    pod, clock = what.pods[0], f"2026-11-30T08:11:{second}Z"
    if how == "DisruptionTarget":
        condition = {"type": how, "status": "True", "reason": "PreemptionByScheduler", "lastTransitionTime": clock}
        pod["status"].setdefault("conditions", []).append(condition)
    elif how == "deleted":
        pod["metadata"] |= {"deletionTimestamp": f"2026-11-30T08:11:{second + 5}Z", "deletionGracePeriodSeconds": 5}
    else:
        pod["status"] |= {"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: memory."}
        about = {"uid": pod["metadata"]["uid"]}
        events = [{"type": "Warning", "reason": "Evicted", "involvedObject": about, "firstTimestamp": clock}]
        what = replace(what, events=events if "event" in how else [])
    found = judge(replace_gone(what), "08:12:00")
    assert isinstance(found, Ended)
    if second == 30 and "nothing" not in how:
        assert (found.exit.exit_code, found.exit.error, found.exit.note, found.saved) == (5, None, None, True)
    else:
        assert found.exit.error is not None and found.exit.note is None


def test_a_workspace_that_a_disruption_took_names_it() -> None:
    what = seen("saving")
    condition = {"type": "DisruptionTarget", "status": "True", "reason": "Preempted", "message": "for another"}
    what.pods[0]["status"]["conditions"].append(condition | {"lastTransitionTime": "2026-11-30T08:11:32Z"})
    found = judge(replace_gone(what), "08:12:00")
    assert found == Ended(own(5, "08:11:29", "08:11:29", note="Preempted: for another"))
    assert isinstance(found, Ended) and not found.certain


@pytest.mark.parametrize("state", [{"running": {}}, {"waiting": {"reason": "ImagePullBackOff"}}, {}])
def test_containers_of_the_template_that_live_on_are_not_waited_for(state: dict[str, Any]) -> None:
    """Nor do they void anything by how they end."""
    what = seen("saved")
    what.pods[0]["status"]["containerStatuses"].append({"name": "proxy", "state": state})
    found = judge(what, "08:11:30")
    assert found == Ended(own(5, "08:11:29", "08:11:29"), saved=True)
    assert isinstance(found, Ended) and found.certain
    assert lingers(what.pods[0]) == ("running" in state)
    grader = seen("running")
    statuses = grader.pods[0]["status"]["containerStatuses"]
    statuses[:] = [
        {"name": "grader", "state": {"terminated": {"exitCode": 0, "finishedAt": "2026-11-30T08:11:31Z"}}},
        {"name": "proxy", "state": state},
    ]
    found = judge(grader, "08:11:32")
    assert found == Ended(own(0, "08:11:31", "08:11:31"))
    assert isinstance(found, Ended) and found.certain


def test_an_end_that_was_noted_on_the_job_stays() -> None:
    """Its pod was ended afterwards, for the containers that lived on, and is gone."""
    what = seen("killed", pods=[])
    assert what.job is not None
    ended = Ended(own(5, "08:11:29", "08:11:29", note="x"), saved=True)
    what.job["metadata"]["annotations"]["leyden/ended"] = note_of(ended)
    assert judge(what, "08:17:00") == ended
    for damaged in ("{", "[]", "null", '{"exit": 3, "saved": true}'):
        what.job["metadata"]["annotations"]["leyden/ended"] = damaged
        found = judge(what, "08:17:00")
        assert isinstance(found, Ended) and found.exit.killed == "timeout"


@pytest.mark.parametrize(
    ("done", "deleted", "agents"),
    [
        ({"exitCode": 137, "reason": "Error"}, None, True),
        ({"exitCode": 137, "reason": "OOMKilled"}, None, True),
        ({"exitCode": 0, "signal": 9}, None, True),
        ({"exitCode": 143, "reason": "Error"}, "08:12:00", True),
        ({"exitCode": 137, "reason": "Error", "message": "the harness is gone\n"}, "08:11:31", False),
        ({"exitCode": 137, "reason": "ContainerStatusUnknown"}, None, False),
        ({"exitCode": 1, "reason": "Error", "message": "keep: no answer"}, None, False),
    ],
)
def test_an_agent_that_kills_the_keeper_is_graded(done: dict[str, Any], deleted: str | None, agents: bool) -> None:
    """It voids nothing: its grader gets the workspace that it began with. A node kills the keeper only when the time
    that a deleted pod has is over."""
    what = seen("saved")
    keeper = keeper_of(what)
    keeper.pop("message", None)
    keeper |= {"finishedAt": "2026-11-30T08:11:30Z", **done}
    if deleted:
        what.pods[0]["metadata"] |= {"deletionTimestamp": f"2026-11-30T{deleted}Z", "deletionGracePeriodSeconds": 1}
    found = judge(what, "08:12:00")
    assert isinstance(found, Ended)
    assert ((found.exit.killed, found.exit.error) == ("limit", None)) == agents
    assert ("was killed" in str(found.exit.note)) == agents


STOPPED = "the workspace was not saved: what saves it was stopped"


@pytest.mark.parametrize(
    ("said", "note", "killed"),
    [
        ("", STOPPED, "limit"),
        ("the harness is gone\npacked 3 entries", "the workspace was not saved within 120 s", None),
        (None, "the workspace was not saved within 120 s", None),
    ],
)
def test_an_agent_that_stops_the_keeper_is_graded(said: str | None, note: str, killed: str | None) -> None:
    """A keeper that runs says at once that the harness is gone, however long it hands in what it left. Of one that
    could not be asked nothing is said, and the agent is not blamed."""
    what = seen("saving", said=said)
    assert judge(what, "08:13:28") == Saving(own(5, "08:11:29", "08:11:29"))
    assert judge(what, "08:13:29") == Ended(replace(own(5, "08:11:29", "08:11:29", note=note), killed=killed))


def test_a_keeper_that_hangs_in_a_pod_that_is_evicted_is_not_the_agent_s() -> None:
    what = seen("saving", said="")
    what.pods[0]["status"] |= {"reason": "Evicted", "message": "The node was low on resource: memory"}
    found = judge(what, "08:13:29")
    assert isinstance(found, Ended) and found.exit.killed is None


@pytest.mark.parametrize(
    ("message", "grace_s", "note"),
    [
        ("", 60, STOPPED),
        ("the harness is gone\npacked 3 entries\n", 60, None),
        ("", 1, None),
    ],
    ids=["stopped", "slow", "less time than the pod was made with"],
)
def test_a_keeper_that_its_pod_s_end_did_not_wake_was_stopped(message: str, grace_s: int, note: str | None) -> None:
    """As that of a harness which stops it and runs into its time-out."""
    what = seen("saved")
    keeper_of(what).update(exitCode=137, reason="Error", finishedAt="2026-11-30T08:12:30Z", message=message)
    what.pods[0]["metadata"] |= {"deletionTimestamp": "2026-11-30T08:12:30Z", "deletionGracePeriodSeconds": grace_s}
    what.pods[0]["spec"]["terminationGracePeriodSeconds"] = 60
    found = judge(what, "08:12:31")
    assert isinstance(found, Ended) and not found.saved
    assert (found.exit.killed, found.exit.note) == (("limit", note) if note else (None, found.exit.note))


def test_a_workspace_that_was_saved_before_the_harness_started_is_none() -> None:
    """The keeper took a harness for gone that had not come."""
    what = seen("saved")
    keeper_of(what)["finishedAt"] = "2026-11-30T08:11:28Z"
    note = "the workspace was saved before the harness started"
    assert judge(what, "08:12:00") == Ended(own(5, "08:11:29", "08:11:29", note=note), saved=False)
    keeper_of(what)["finishedAt"] = "2026-11-30T08:11:29Z"
    assert judge(what, "08:12:00") == Ended(own(5, "08:11:29", "08:11:29"), saved=True)


def test_a_native_sidecar_that_is_ended_is_no_init_container_that_failed_made_by_hand() -> None:
    what = seen("init_failed")
    pod = what.pods[0]
    pod["spec"]["initContainers"] = [
        {"name": pod["status"]["initContainerStatuses"][0]["name"], "restartPolicy": "Always"}
    ]
    found = judge(what, "08:12:00")
    assert isinstance(found, Ended) and found.exit.error == "the pod failed before the harness started"


IMAGE = (
    'ImagePullBackOff, image testbed.local/none:1: Back-off pulling image "testbed.local/none:1" (Failed: Failed to '
    'pull image "testbed.local/none:1": rpc error: code = Unknown desc = failed to pull and unpack image '
    '"testbed.local/none:1": failed to resolve reference "testbed.local/none:1": failed to do request: Head '
    '"https://testbed.local/v2/none/manifests/1": proxyconnect tcp: dial tcp 127.0.0.1:1: connect: connection refused)'
)


def test_an_image_that_cannot_be_pulled() -> None:
    """Pending for the patience since the first refusal, then infrastructure with the image's name."""
    assert judge(seen("image_missing"), "08:12:27") == Pending(IMAGE)
    assert judge(seen("image_missing"), "08:12:28") == Ended(
        failed(f"not started after 60 s: {IMAGE}", "08:12:28", "08:12:28")
    )


def test_a_slow_pull_has_the_patience_of_the_queue() -> None:
    """ContainerCreating for minutes is no refusal."""
    assert judge(seen("starting"), "08:21:25") == Pending("ContainerCreating")
    error = "not started after 600 s: ContainerCreating"
    assert judge(seen("starting"), "08:21:26") == Ended(failed(error, "08:21:26", "08:21:26"))


def test_an_image_name_that_is_none_fails_at_once() -> None:
    found = judge(seen("image_name_invalid"), "08:11:40")
    assert isinstance(found, Ended)
    assert found.exit.error is not None
    assert found.exit.error.startswith(
        'not started after 13 s: InvalidImageName, image Bad Name::: Failed to apply default image tag "Bad Name::"'
    )


def test_unschedulable() -> None:
    """The scheduler's own message, the queue's patience, never the agent's fault."""
    why = "Unschedulable: 0/1 nodes are available: 1 Insufficient cpu."
    assert judge(seen("unschedulable"), "08:21:25") == Pending(why)
    error = f"not started after 600 s: {why}"
    assert judge(seen("unschedulable"), "08:21:26") == Ended(failed(error, "08:21:26", "08:21:26"))


def test_the_jobs_deadline() -> None:
    """After a start it is the harness's time-out, before one it was the queue's."""
    ending = seen("deadline_ending")
    over = seen("deadline_ending", gone=gone(ending))
    killed = Exit(None, None, at("08:15:59"), at("08:16:09"), killed="timeout")
    assert judge(over, "08:16:09") == Ended(killed)
    waiting = seen("unschedulable", gone=gone(seen("unschedulable")))
    waiting.job["status"]["conditions"] = ending.job["status"]["conditions"]  # type: ignore[index]
    assert judge(waiting, "08:12:00") == Ended(
        failed(
            "DeadlineExceeded before the harness started: Unschedulable: 0/1 nodes are available: 1 Insufficient cpu.",
            "08:12:00",
            "08:12:00",
        )
    )


def test_a_failed_pod_whose_containers_are_gone_made_by_hand() -> None:
    """As kubelets leave a deleted pod for a moment. It was not seen how the harness ended."""
    what = seen("deadline_ending")
    status = what.pods[0]["status"]
    status["phase"] = "Failed"
    status["containerStatuses"] = [
        {"name": name, "state": {"waiting": {"reason": "ContainerCreating"}}} for name in ("keep", "harness")
    ]
    status["conditions"] = [{"type": "Initialized", "status": "True"}]
    error = "the pod failed, and its node does not say how the harness ended"
    assert judge(what, "08:16:09") == Ended(failed(error, "08:16:09", "08:16:09"))
    status["conditions"] = [{"type": "Initialized", "status": "False"}]
    assert judge(what, "08:16:09") == Ended(failed("the pod failed before the harness started", *["08:16:09"] * 2))


def test_a_deadline_is_seen_in_the_pod_before_it_is_in_the_job() -> None:
    """The Job controller deletes the pod first and writes the condition afterwards."""
    what = seen("deadline_ending")
    assert what.job is not None
    del what.job["status"]["conditions"]
    assert judge(what, "08:16:02") == Running(at("08:15:59"))
    del what.job["spec"]["activeDeadlineSeconds"]
    name = "deadline2-jp68r"
    assert judge(what, "08:16:02") == Ended(failed(f"the pod {name} was deleted while it ran", "08:15:59", "08:16:02"))


def test_a_deleted_pod_that_never_goes_is_given_up() -> None:
    """A node that is lost never confirms."""
    assert judge(seen("deadline_ending"), "08:16:36") == Running(at("08:15:59"))
    killed = Exit(None, None, at("08:15:59"), at("08:16:37"), killed="timeout")
    assert judge(seen("deadline_ending"), "08:16:37") == Ended(killed)
    assert judge(seen("killed_ending"), "08:16:40") == Ended(
        Exit(None, None, at("08:15:59"), at("08:16:40"), killed="timeout")
    )


def test_a_pod_deleted_by_somebody_else() -> None:
    """At once, before the pod that the Job controller starts in its place does any harm. That pod counts for nothing,
    also where the first one is gone."""
    error = "the pod poddel-d97vh was deleted while it ran"
    assert judge(seen("pod_deleted"), "08:11:34") == Ended(failed(error, "08:11:28", "08:11:34"))
    assert judge(seen("pod_deleted_replaced"), "08:11:40") == Ended(failed(error, "08:11:28", "08:11:35"))


def test_a_deleted_job() -> None:
    """While its harness ran, infrastructure at once; after its end, that end counts."""
    name = seen("job_deleted").pods[0]["metadata"]["name"]
    error = f"the Job of the pod {name} was deleted while it ran"
    assert judge(seen("job_deleted"), "08:11:37") == Ended(failed(error, "08:11:29", "08:11:37"))
    error = f"the Job of the pod {seen('job_deleted_foreground').pods[0]['metadata']['name']} was deleted while it ran"
    assert judge(seen("job_deleted_foreground"), "08:16:05") == Ended(failed(error, "08:15:59", "08:16:05"))
    after = seen("succeeded", job=None)
    assert judge(replace_gone(after), "08:12:00") == Ended(own(0, "08:11:28", "08:11:28"))


def replace_gone(what: Seen) -> Seen:
    return Seen(what.job, what.pods, what.events, gone(what))


def test_job_and_pods_gone_without_a_trace() -> None:
    """Nothing was seen, so nothing is known."""
    error = "the Job disappeared, and no pod of it was seen"
    assert judge(Seen(None), "08:12:00") == Ended(failed(error, "08:12:00", "08:12:00"))


def test_pods_gone_before_they_were_read() -> None:
    """A complete Job says that all ended with exit 0; a failed one does not say who failed."""
    assert judge(seen("succeeded", pods=[]), "08:12:00") == Ended(
        own(0, "08:11:26", "08:11:29", note="the pod was gone before its exit was read; the Job is complete")
    )
    error = "BackoffLimitExceeded: Job has reached the specified backoff limit; the pod was gone before it was read"
    assert judge(seen("exit_3", pods=[]), "08:12:00") == Ended(failed(error, "08:11:26", "08:12:00"))
    killed = Exit(None, None, at("08:17:00"), at("08:17:00"), killed="timeout")
    assert judge(seen("killed", pods=[]), "08:17:00") == Ended(killed)


def conditions(*types: str, reason: str = "", **status: Any) -> Seen:
    """A Job without pods whose conditions are `types`, in that order: by hand, for what 1.20 does not say."""
    what = seen("succeeded", pods=[], changed=at("08:11:30"))
    assert what.job is not None
    made = [
        {"type": t, "status": "True", "reason": reason, "lastTransitionTime": "2026-11-30T08:11:29Z"} for t in types
    ]
    job = copy.deepcopy(what.job)
    job["status"] = {"conditions": made, "startTime": "2026-11-30T08:11:26Z", **status}
    return Seen(job, (), (), frozenset(), what.changed)


@pytest.mark.parametrize("order", [("SuccessCriteriaMet", "Complete"), ("Complete", "SuccessCriteriaMet")])
def test_success_conditions_in_any_order_made_by_hand(order: tuple[str, str]) -> None:
    """Kubernetes 1.30 and later."""
    assert judge(conditions(*order), "08:12:00") == Ended(
        own(0, "08:11:26", "08:11:29", note="the pod was gone before its exit was read; the Job is complete")
    )


@pytest.mark.parametrize("order", [("FailureTarget", "Failed"), ("Failed", "FailureTarget")])
def test_failure_conditions_in_any_order_made_by_hand(order: tuple[str, str]) -> None:
    """Kubernetes 1.31 and later."""
    error = "DeadlineExceeded; the pod was gone before it was read"
    assert judge(conditions(*order, reason="DeadlineExceeded"), "08:12:00") == Ended(
        failed(error, "08:11:26", "08:12:00")
    )


@pytest.mark.parametrize(
    "what",
    [conditions("SuccessCriteriaMet"), conditions(failed=1), conditions("FailureTarget", failed=1)],
    ids=["SuccessCriteriaMet", "counter", "FailureTarget"],
)
def test_no_verdict_before_a_final_condition_made_by_hand(what: Seen) -> None:
    """Still running; the wait for the condition is bounded."""
    waits = "the pod is gone and the Job has no condition yet"
    assert judge(what, "08:11:59") == Pending(waits)
    assert judge(what, "08:12:00") == Ended(failed(f"not started after 30 s: {waits}", "08:12:00", "08:12:00"))


def test_a_running_harness_runs_whatever_the_job_says_made_by_hand() -> None:
    """SuccessCriteriaMet and counters are no verdict while the pod runs."""
    what = seen("running")
    assert what.job is not None
    what.job["status"] |= {"conditions": [{"type": "SuccessCriteriaMet", "status": "True"}], "failed": 1}
    assert judge(what, "08:12:00") == Running(at("08:11:29"))


def test_pod_failure_policy_made_by_hand() -> None:
    """Kubernetes 1.26 and later: the container's exit is still the agent's own."""
    what = seen("exit_3")
    assert what.job is not None
    what.job["status"]["conditions"] = [
        {"type": "FailureTarget", "status": "True", "reason": "PodFailurePolicy"},
        {"type": "Failed", "status": "True", "reason": "PodFailurePolicy", "message": "Container harness failed"},
    ]
    assert judge(what, "08:12:00") == Ended(own(3, "08:11:28", "08:11:28"))


@pytest.mark.parametrize(
    ("shape", "why"),
    [
        (
            "pods_over_quota",
            'FailedCreate: Error creating: pods "quotapods-lqmqx" is forbidden: exceeded quota: q, requested: pods=1, '
            "used: pods=0, limited: pods=0",
        ),
        (
            "pods_refused",
            'FailedCreate: Error creating: pods "nosa-" is forbidden: error looking up service account rec/none: '
            'serviceaccount "none" not found',
        ),
    ],
)
def test_a_job_whose_pods_are_refused(shape: str, why: str) -> None:
    """The event's text while it waits, and in the failure after the queue's budget."""
    what = seen(shape)
    assert what.job is not None
    created = datetime.fromisoformat(what.job["metadata"]["creationTimestamp"]).timestamp()
    assert verdict(what, PATIENCE, created + 599) == Pending(why)
    end = created + 600
    error = f"not started after 600 s: {why}"
    assert verdict(what, PATIENCE, end) == Ended(Exit(None, None, end, end, error=error))


def test_a_container_that_cannot_be_made() -> None:
    """A missing Secret is refused and given up like an image, a missing volume like a full queue."""
    why = 'CreateContainerConfigError: secret "none" not found'
    assert judge(seen("secret_missing"), "08:11:45") == Pending(why)
    assert isinstance(judge(seen("secret_missing"), "08:12:45"), Ended)
    why = 'ContainerCreating (FailedMount: MountVolume.SetUp failed for volume "w" : secret "none" not found)'
    assert judge(seen("volume_missing"), "08:12:45") == Pending(why)


def test_a_command_that_does_not_exist() -> None:
    """The harness never ran: infrastructure, with the runtime's words; 1970 is no start."""
    found = judge(seen("command_missing"), "08:12:00")
    assert found == Ended(
        failed(
            "the harness could not be started: failed to create containerd task: failed to create shim task: OCI "
            'runtime create failed: runc create failed: unable to start container process: exec: "/nothing": stat '
            "/nothing: no such file or directory: unknown",
            "08:11:29",
            "08:11:29",
        )
    )


def test_an_init_container_that_fails() -> None:
    error = "the init container unpack ended with exit 4: Error"
    assert judge(seen("init_failed"), "08:12:00") == Ended(failed(error, "08:12:00", "08:12:00"))


def test_a_lost_node() -> None:
    """The kubelet is silent; where no taint evicts (the whole zone is down), the pod would run for ever."""
    assert judge(seen("node_lost"), "08:18:15") == Running(at("08:12:26"))
    error = "NodeLost: the node node1 is not ready for 300 s"
    assert judge(seen("node_lost"), "08:18:16") == Ended(failed(error, "08:12:26", "08:18:16"))


def test_a_taint_eviction_made_by_hand() -> None:
    """Where only some nodes are down, the taint manager deletes the pod."""
    what = seen("pod_deleted")
    pod = what.pods[0]
    event = {
        "type": "Normal",
        "reason": "TaintManagerEviction",
        "involvedObject": {"uid": pod["metadata"]["uid"]},
        "metadata": {},
    }
    error = "NodeLost: the pod poddel-d97vh was deleted because its node node1 is not ready"
    assert judge(Seen(what.job, what.pods, [event]), "08:11:40") == Ended(failed(error, "08:11:28", "08:11:40"))


def test_long_messages_are_cut() -> None:
    what = seen("init_failed")
    done = what.pods[0]["status"]["initContainerStatuses"][0]["state"]["terminated"]
    done["message"] = "x" * 5000
    found = judge(what, "08:12:00")
    assert isinstance(found, Ended)
    assert found.exit.error == ("the init container unpack ended with exit 4: " + "x" * 5000)[:997] + "..."
