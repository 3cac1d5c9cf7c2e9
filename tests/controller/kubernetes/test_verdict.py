"""The verdict on Jobs. The objects in `shapes/` are what Kubernetes 1.20.2 said, shortened; conditions that came later
are made by hand, and the tests' names say so."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest

from leyden.controller.backends.kubernetes.states import (
    Ended,
    Pending,
    Running,
    Saving,
    Seen,
    Verdict,
)
from leyden.controller.jobs import Exit
from tests.controller.kubernetes.judging import at, failed, gone, judge, own, replace_gone, seen


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
