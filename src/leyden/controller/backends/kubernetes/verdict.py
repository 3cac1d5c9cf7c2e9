"""What became of a Job, as a pure function of its objects: `verdict(seen, patience, now)`.

The harness container's own end decides, not the Job's counters or conditions, which may come in any order or not at
all. An attempt runs once: its first pod counts, and what the Job controller would start in its place does not.

    exit code, signal, OOMKilled under the container's own limit           the agent's own end
    more in the workspace or on the disk than its own limits allow         killed: limit, the agent's own as well
    killed by Leyden (annotation), the Job's deadline after a start        killed
    image, quota, scheduling, mount, eviction, node, deletion by others    `Exit.error`: infrastructure

What came after the harness's own end changes nothing about it, as long as its workspace was saved: neither what became
of its pod, nor containers of the template that run on. A workspace that was not saved is the agent's own doing where it
is too large, or where the keeper was killed while nobody else was ending the pod, or stopped: it says at once that the
harness is gone, and only the harness can keep it from that.

Jobs and pods are told of apart, so an end that rests on what was not seen is not `certain`: it is told once the API
server was asked and it still holds.

Objects are the API's JSON. Times are Unix seconds.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf

from leyden.controller.backends.kubernetes.keeper_end import (
    KEEPER,
    MAIN,
    disruption,
    is_saved,
    keeper_end,
    keeper_failure,
    shortened,
    unsaved_by_the_agent,
)
from leyden.controller.backends.kubernetes.objects import (
    Object,
    age_of,
    being_deleted,
    condition_of,
    container_of,
    deletion_asked,
    deletion_due,
    event_time,
    is_about,
    scheduled_at,
    statuses,
    uid_of,
    unix_time,
    warnings_about,
)
from leyden.controller.backends.kubernetes.states import (
    Ended,
    Patience,
    Pending,
    Running,
    Saving,
    Seen,
    Verdict,
    noted_end,
)
from leyden.controller.jobs import OVER_LIMIT, OWN_ENDS, TIMEOUT, Exit

# On the Job: why and when Leyden ended it, `timeout 1790000000.25`.
KILLED = "leyden/killed"

_NO_IMAGE = frozenset({"ErrImagePull", "ImagePullBackOff", "ImageInspectError", "RegistryUnavailable"})
_NEVER = frozenset({"InvalidImageName", "ErrImageNeverPull"})
_NO_CONTAINER = frozenset({"CreateContainerConfigError", "CreateContainerError", "RunContainerError"})
_NOT_STARTED = frozenset({"StartError", "ContainerCannotRun"})
# How a kubelet's message begins where a pod broke its own limit of storage, not the node's.
_OWN_STORAGE = (
    "Usage of EmptyDir volume ",
    "Pod ephemeral local storage usage exceeds the total limit of containers ",
    *(f"Container {name} exceeded its local ephemeral storage limit " for name in sorted(MAIN)),
)


def verdict(seen: Seen, patience: Patience, now: float) -> Verdict:
    """How the Job stands at `now`. Asked again later, it may answer otherwise although no object changed."""
    noted = noted_end(seen.job)
    if noted is not None:
        return noted
    pod = min(seen.pods, key=age_of, default=None)
    kill = _kill(seen.job) or seen.killed
    if pod is None:
        return _without_pod(seen, patience, kill, now)
    harness = container_of(pod, MAIN)
    done = harness.get("state", {}).get("terminated")
    if done:
        return _after_harness(seen, pod, done, patience, kill, now)
    started = unix_time(harness.get("state", {}).get("running", {}).get("startedAt"))
    reason = _end_of_pod(seen, pod, patience, kill, now)
    if reason is not None:
        return _cut_off(pod, reason, kill, started, now)
    if started:
        return Running(started)
    return _not_started(seen, pod, patience, now)


def _after_harness(
    seen: Seen, pod: Object, done: Object, patience: Patience, kill: tuple[str, float] | None, now: float
) -> Verdict:
    ended = unix_time(done.get("finishedAt")) or now
    started = unix_time(done.get("startedAt")) or ended
    exit_ = _own_end(pod, done, started, ended)
    reason = None if exit_.error else _cause(seen, pod, kill, ended)
    if reason == TIMEOUT or (kill and reason == kill[0]):
        exit_ = Exit(None, None, started, ended, killed=reason)
    elif reason:
        exit_ = _taken_away(pod, reason, started, ended)
    overdue = now >= ended + patience.save_s
    unsaved = unsaved_by_the_agent(pod, seen.said if overdue else None)
    if exit_.error is None and exit_.killed in OWN_ENDS and unsaved:
        exit_ = replace(exit_, killed=OVER_LIMIT, note=unsaved)
    saved = is_saved(pod) and not (reason is None and unix_time(keeper_end(pod).get("finishedAt")) < started)
    over = uid_of(pod) in seen.gone or pod["status"].get("phase") in ("Succeeded", "Failed")
    kept = keeper_end(pod)
    if kept or over or not container_of(pod, {KEEPER}):
        why = None if saved or exit_.error else keeper_failure(pod) or disruption(pod)
        certain = exit_.error is None and (bool(kept) or not container_of(pod, {KEEPER}))
        return Ended(replace(exit_, note=exit_.note or why), saved, certain)
    if not overdue:
        return Saving(exit_)
    return Ended(replace(exit_, note=exit_.note or f"the workspace was not saved within {patience.save_s:g} s"))


def lingers(pod: Object) -> bool:
    """Whether containers still run although the end of the harness was told: the template's, or a keeper given up."""
    others = [c for c in pod.get("status", {}).get("containerStatuses", ()) if c["name"] not in MAIN]
    return "deletionTimestamp" not in pod["metadata"] and any("running" in c.get("state", {}) for c in others)


def _own_end(pod: Object, done: Object, started: float, ended: float) -> Exit:
    """The harness container's end as its own doing."""
    code, reason = done["exitCode"], done.get("reason")
    if reason in _NOT_STARTED:
        error = f"the harness could not be started: {done.get('message', reason)}"
        return Exit(None, None, started, ended, error=shortened(error))
    if reason == "OOMKilled":
        who = f"OOMKilled({code})" if code else "a child of the harness was OOMKilled"
        return Exit(code, None, started, ended, note=f"{who}: the container's memory limit is {_memory_limit(pod)}")
    number = done.get("signal") or (code - 128 if 128 < code <= 128 + 64 else None)
    return Exit(None if number else code, number, started, ended)


def _cause(seen: Seen, pod: Object, kill: tuple[str, float] | None, ended: float) -> str | None:
    """Who ended a harness that did not end by itself: TIMEOUT, Leyden's own reason, or the cluster's words.

    Ends before a deletion or kill was asked for are the agent's own. Kubernetes writes whole seconds.
    """
    asked = deletion_asked(pod)
    if kill is not None:
        return kill[0] if ended >= float(int(kill[1])) else None
    disrupted = disruption(pod)
    if disrupted is not None:
        return disrupted if ended >= _disrupted_at(seen, pod) else None
    if asked is None or ended < asked:
        return None
    if _deadline_passed(seen.job, asked):
        return TIMEOUT
    return _deleted(seen, pod)


def _end_of_pod(seen: Seen, pod: Object, patience: Patience, kill: tuple[str, float] | None, now: float) -> str | None:
    """Why a pod whose harness did not end will never say how it ended; None while it may."""
    gone = uid_of(pod) in seen.gone or deletion_due(pod) + patience.settle_s < now
    if gone and kill:
        return kill[0]
    failed = pod["status"].get("phase") == "Failed"
    if failed or (gone and disruption(pod)):
        return disruption(pod) or _failed_pod(pod)
    asked = deletion_asked(pod)
    if _deadline_passed(seen.job, asked or now):
        return TIMEOUT if gone else None
    if kill:
        return None
    if gone or asked is not None or seen.deleting:
        return _deleted(seen, pod)
    if _node_silent_since(pod) + patience.node_s < now:
        return f"NodeLost: the node {pod['spec'].get('nodeName')} is not ready for {patience.node_s:g} s"
    return None


def _cut_off(pod: Object, reason: str, kill: tuple[str, float] | None, started: float, now: float) -> Ended:
    """The end of a harness that could not say how it ended. A deadline that came before its start was the queue's."""
    if kill and reason == kill[0]:
        return Ended(Exit(None, None, started or now, now, killed=reason))
    if reason == TIMEOUT and started:
        return Ended(Exit(None, None, started, now, killed=TIMEOUT))
    if reason == TIMEOUT:
        reason = f"DeadlineExceeded before the harness started: {_waits(pod)}"
    return Ended(_taken_away(pod, shortened(reason), started or now, now))


def _taken_away(pod: Object, reason: str, started: float, ended: float) -> Exit:
    """The end of a harness that was ended by others: infrastructure, unless it filled more than it was given."""
    status = pod["status"]
    if status.get("reason") == "Evicted" and status.get("message", "").startswith(_OWN_STORAGE):
        return Exit(None, None, started, ended, killed=OVER_LIMIT, note=reason)
    return Exit(None, None, started, ended, error=reason)


def _not_started(seen: Seen, pod: Object, patience: Patience, now: float) -> Pending | Ended:
    why, refused, limit_s = _waits(pod), unix_time(pod["metadata"].get("creationTimestamp")), patience.queue_s
    warnings = warnings_about(seen.events, pod)
    for status in statuses(pod):
        waiting = status.get("state", {}).get("waiting", {})
        reason = waiting.get("reason")
        if reason in _NO_IMAGE | _NO_CONTAINER | _NEVER:
            first = event_time(warnings[0]) if warnings else scheduled_at(pod)
            refused, limit_s = max(refused, first), 0.0 if reason in _NEVER else patience.image_s
            break
    news = [e for e in warnings if e.get("message", "").removeprefix("Error: ") not in why + " ErrImagePull"]
    if news:
        why += f" ({news[-1].get('reason')}: {news[-1].get('message')})"
    return _overdue(shortened(why), refused, limit_s, now)


def _without_pod(seen: Seen, patience: Patience, kill: tuple[str, float] | None, now: float) -> Verdict:
    """A Job that has no pod yet, or whose pod was never seen and is gone."""
    job = seen.job
    if kill:
        return Ended(Exit(None, None, now, now, killed=kill[0]))
    if job is None:
        return Ended(Exit(None, None, now, now, error="the Job disappeared, and no pod of it was seen"))
    status, created = job.get("status", {}), unix_time(job["metadata"].get("creationTimestamp"))
    started = unix_time(status.get("startTime")) or created
    complete, failed = condition_of(job, "Complete"), condition_of(job, "Failed")
    if complete:
        ended = unix_time(status.get("completionTime")) or unix_time(complete.get("lastTransitionTime")) or now
        note = "the pod was gone before its exit was read; the Job is complete"
        return Ended(Exit(0, None, started, ended, note=note))
    if failed:
        words = f"{failed.get('reason')}: {failed.get('message', '')}".rstrip(": ")
        return Ended(Exit(None, None, started, now, error=shortened(f"{words}; the pod was gone before it was read")))
    if being_deleted(job):
        return Ended(Exit(None, None, started, now, error="the Job was deleted before it had a pod"))
    if status.get("failed") or status.get("succeeded") or condition_of(job, "SuccessCriteriaMet"):
        return _overdue("the pod is gone and the Job has no condition yet", seen.changed, patience.settle_s, now)
    warnings = warnings_about(seen.events, job)
    why = f"{warnings[-1]['reason']}: {warnings[-1].get('message')}" if warnings else "the Job has no pod yet"
    return _overdue(shortened(why), created, patience.queue_s, now)


def _overdue(why: str, since: float, limit_s: float, now: float) -> Pending | Ended:
    if now - since < limit_s:
        return Pending(why)
    return Ended(Exit(None, None, now, now, error=shortened(f"not started after {now - since:.0f} s: {why}")))


def _failed_pod(pod: Object) -> str:
    """A pod that failed before its harness started, or of whose containers its node has nothing left to say."""
    sidecars = {c["name"] for c in pod["spec"].get("initContainers") or () if c.get("restartPolicy") == "Always"}
    for container in pod["status"].get("initContainerStatuses", ()):
        if container["name"] in sidecars:
            continue
        done = container.get("state", {}).get("terminated", {})
        if done.get("exitCode"):
            message = done.get("message", "").strip() or done.get("reason")
            return f"the init container {container['name']} ended with exit {done['exitCode']}: {message}"
    if condition_of(pod, "Initialized"):
        return "the pod failed, and its node does not say how the harness ended"
    return "the pod failed before the harness started"


def _disrupted_at(seen: Seen, pod: Object) -> float:
    """When a disruption of the pod began. 0 where nobody says: what ended then may have ended for it."""
    condition = condition_of(pod, "DisruptionTarget")
    if condition:
        return unix_time(condition.get("lastTransitionTime"))
    told = [event_time(e) for e in seen.events if e.get("reason") == pod["status"].get("reason") and is_about(e, pod)]
    return min(told, default=0.0)


def _deleted(seen: Seen, pod: Object) -> str:
    name = pod["metadata"]["name"]
    if any(e.get("reason") == "TaintManagerEviction" and is_about(e, pod) for e in seen.events):
        return f"NodeLost: the pod {name} was deleted because its node {pod['spec'].get('nodeName')} is not ready"
    if seen.deleting:
        return f"the Job of the pod {name} was deleted while it ran"
    return f"the pod {name} was deleted while it ran"


def _node_silent_since(pod: Object) -> float:
    """The node controller, and nobody else, marks a pod whose containers are ready as not ready."""
    ready = condition_of(pod, "Ready", "False")
    if ready is None or ready.get("reason") or not condition_of(pod, "ContainersReady"):
        return inf
    return unix_time(ready.get("lastTransitionTime"))


def _waits(pod: Object) -> str:
    """What a pod waits for, with Kubernetes' own reason."""
    scheduled = condition_of(pod, "PodScheduled", "False")
    if scheduled:
        return f"{scheduled.get('reason')}: {scheduled.get('message', '')}".rstrip(": ")
    for status in statuses(pod):
        waiting = status.get("state", {}).get("waiting")
        if waiting and waiting.get("reason") != "PodInitializing":
            image = f", image {status.get('image')}" if waiting.get("reason") in _NO_IMAGE | _NEVER else ""
            return f"{waiting.get('reason')}{image}: {waiting.get('message', '')}".rstrip(": ")
        if "running" in status.get("state", {}) and status["name"] not in MAIN | {KEEPER}:
            return f"the init container {status['name']} runs"
    return "the pod was not seen by a node yet"


def _kill(job: Object | None) -> tuple[str, float] | None:
    text = ((job or {}).get("metadata", {}).get("annotations") or {}).get(KILLED)
    if not text:
        return None
    reason, _, when = text.rpartition(" ")
    try:
        return reason, float(when)
    except ValueError:
        return reason, 0.0


def _deadline_passed(job: Object | None, now: float) -> bool:
    if job is None:
        return False
    condition = condition_of(job, "Failed") or condition_of(job, "FailureTarget")
    if condition is not None:
        return condition.get("reason") == "DeadlineExceeded"
    limit, start = (
        job.get("spec", {}).get("activeDeadlineSeconds"),
        unix_time(job.get("status", {}).get("startTime")),
    )
    return limit is not None and start > 0 and now >= start + limit - 1


def _memory_limit(pod: Object) -> str:
    for container in pod["spec"]["containers"]:
        if container["name"] in MAIN:
            return str(container.get("resources", {}).get("limits", {}).get("memory", "the node's"))
    return "the node's"
