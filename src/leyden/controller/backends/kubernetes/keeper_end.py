"""How the keeper of a pod ended, and whether the agent had a hand in it. Pure."""

from __future__ import annotations

from leyden.controller.backends.kubernetes.keeper import GONE, TOO_LARGE
from leyden.controller.backends.kubernetes.objects import (
    Object,
    condition_of,
    container_of,
    deletion_due,
    unix_time,
)

MAIN = frozenset({"harness", "grader"})
KEEPER = "keep"
LONGEST_MESSAGE = 1000
_STOPPED = "the workspace was not saved: what saves it was stopped"


def keeper_hangs(pod: Object) -> bool:
    """Whether the keeper still runs although the harness has ended."""
    return "running" in container_of(pod, {KEEPER}).get("state", {}) and bool(
        container_of(pod, MAIN).get("state", {}).get("terminated")
    )


def unsaved_by_the_agent(pod: Object, said: str | None) -> str | None:
    """Why the workspace was not saved, where that is the agent's doing: it left too much, or it killed or stopped the
    keeper, which ends by itself when asked to, and which a node kills only once the pod's time to end is over. `said`
    is what a keeper has printed that should have ended by now."""
    if said is not None and GONE not in said and keeper_hangs(pod) and not disruption(pod):
        return _STOPPED
    done = keeper_end(pod)
    code = done.get("exitCode")
    if code == TOO_LARGE:
        return keeper_failure(pod)
    killed = done.get("signal") or done.get("reason") == "OOMKilled" or (code or 0) > 128
    if not killed or done.get("reason") == "ContainerStatusUnknown" or disruption(pod):
        return None
    if unix_time(done.get("finishedAt")) >= deletion_due(pod) - 1:
        return _STOPPED if GONE not in (done.get("message") or "") and _had_its_time(pod) else None
    return f"the workspace was not saved: what saves it was killed ({done.get('reason')}, exit {code})"


def _had_its_time(pod: Object) -> bool:
    """Whether a deleted pod had the whole time to end that it was made with; who deletes it may give less."""
    given = pod["metadata"].get("deletionGracePeriodSeconds") or 0
    return bool(given >= pod["spec"].get("terminationGracePeriodSeconds", 30))


def keeper_end(pod: Object) -> Object:
    """How the keeper ended; empty while it has not."""
    done: Object = container_of(pod, {KEEPER}).get("state", {}).get("terminated", {})
    return done


def is_saved(pod: Object) -> bool:
    return bool(keeper_end(pod).get("exitCode") == 0)


def keeper_failure(pod: Object) -> str | None:
    done = keeper_end(pod)
    if done.get("exitCode") == 0:
        return "the workspace was saved before the harness started"
    if not done:
        return None
    message = done.get("message", "").strip().splitlines()
    return shortened(f"the workspace was not saved: {message[-1] if message else done.get('reason')}")


def disruption(pod: Object) -> str | None:
    """What the cluster did to the pod, in its own words: `Evicted: The node was low on resource`."""
    status = pod["status"]
    if status.get("reason"):
        return f"{status['reason']}: {status.get('message', '')}".rstrip(": ")
    condition = condition_of(pod, "DisruptionTarget")
    if condition:
        return f"{condition.get('reason')}: {condition.get('message', '')}".rstrip(": ")
    return None


def shortened(text: str) -> str:
    return text if len(text) <= LONGEST_MESSAGE else text[: LONGEST_MESSAGE - 3] + "..."
