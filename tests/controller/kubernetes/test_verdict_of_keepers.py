"""What a Job whose harness has ended comes to: its workspace, its keeper, what else runs in its pod."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from leyden.controller.backends.kubernetes.states import (
    Ended,
    Saving,
    note_of,
)
from leyden.controller.backends.kubernetes.verdict import lingers
from tests.controller.kubernetes.judging import failed, judge, keeper_of, own, replace_gone, seen


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


def test_a_keeper_s_container_over_its_limit_is_not_the_agent_s() -> None:
    what, message = seen("evicted"), 'Container keep exceeded its local ephemeral storage limit "5Mi".'
    what.pods[0]["status"]["message"] = message
    assert judge(what, "08:17:00") == Ended(failed(f"Evicted: {message}", "08:17:00", "08:17:00"))


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
