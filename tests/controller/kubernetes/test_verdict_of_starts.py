"""What a Job that does not start comes to."""

from __future__ import annotations

from datetime import datetime

import pytest

from leyden.controller.backends.kubernetes.states import (
    Ended,
    Pending,
)
from leyden.controller.backends.kubernetes.verdict import verdict
from leyden.controller.jobs import Exit
from tests.controller.kubernetes.judging import PATIENCE, failed, judge, seen

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
