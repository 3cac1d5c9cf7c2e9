"""Reading the API's objects: what many places ask of a Job, a pod or an event. Times are Unix seconds."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime
from math import inf
from typing import Any

Object = dict[str, Any]


def unix_time(text: str | None) -> float:
    """Unix seconds; 0 for none, for what is no time and for the zero time that stands for none."""
    try:
        return max(0.0, datetime.fromisoformat(text).timestamp()) if text else 0.0
    except (ValueError, TypeError, OverflowError):
        return 0.0


def deletion_asked(pod: Object) -> float | None:
    """When the pod's deletion was asked for: its timestamp is that time plus the grace period."""
    metadata = pod["metadata"]
    if "deletionTimestamp" not in metadata:
        return None
    return unix_time(metadata["deletionTimestamp"]) - float(metadata.get("deletionGracePeriodSeconds") or 0)


def deletion_due(pod: Object) -> float:
    return unix_time(pod["metadata"].get("deletionTimestamp")) or inf


def condition_of(thing: Object, kind: str, status: str = "True") -> Object | None:
    conditions = thing.get("status", {}).get("conditions") or ()
    return next((c for c in conditions if c["type"] == kind and c["status"] == status), None)


def statuses(pod: Object) -> list[Object]:
    status = pod["status"]
    return [*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())]


def container_of(pod: Object, names: Collection[str]) -> Object:
    return next((c for c in pod.get("status", {}).get("containerStatuses", ()) if c["name"] in names), {})


def scheduled_at(pod: Object) -> float:
    return unix_time((condition_of(pod, "PodScheduled") or {}).get("lastTransitionTime"))


def warnings_about(events: Sequence[Object], thing: Object) -> list[Object]:
    """The warnings about an object, oldest first; `MissingClusterDNS` stops nobody."""
    found = [e for e in events if e.get("type") == "Warning" and is_about(e, thing) and _stops(e)]
    return sorted(found, key=event_time)


def _stops(event: Object) -> bool:
    return event.get("reason") not in ("MissingClusterDNS", "BackOff", "DNSConfigForming")


def is_about(event: Object, thing: Object) -> bool:
    return bool(event.get("involvedObject", {}).get("uid") == thing["metadata"].get("uid"))


def event_time(event: Object) -> float:
    return unix_time(
        event.get("firstTimestamp") or event.get("eventTime") or event["metadata"].get("creationTimestamp")
    )


def age_of(pod: Object) -> tuple[float, str]:
    return unix_time(pod["metadata"].get("creationTimestamp")), pod["metadata"]["name"]


def uid_of(pod: Object) -> str:
    return str(pod["metadata"].get("uid"))


def being_deleted(job: Object | None) -> bool:
    return job is None or "deletionTimestamp" in job["metadata"]
