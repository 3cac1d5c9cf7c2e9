"""One Job that shows what the run's pods can do: the run's own pod template with other programs in it.

Each image of the template and of the run file is started once, with a command that does nothing; beside them runs
`probe.py` in the image of Leyden's helper.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from leyden.config import RunConfig
from leyden.controller.backends.kubernetes.api import EVENTS, PODS, KubernetesApi
from leyden.controller.backends.kubernetes.cluster_errors import ClusterError
from leyden.controller.backends.kubernetes.manifest import Manifest, Program, manifest
from leyden.controller.backends.kubernetes.objects import Object
from leyden.controller.backends.kubernetes.programs import Programs, pods
from leyden.doctor.manifests import claim_of
from leyden.types import Json

PROBE = Path(__file__).with_name("probe.py")
PROBE_NAME = "probe"
OTHERS = ("1.1.1.1:443", "169.254.169.254:80")
"""Addresses that no agent needs: one of the Internet, the metadata service of clouds. The pod adds the API server."""
POLL_S = 0.5
LOG_BYTES = 16_384
NO_IMAGE = frozenset({"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError"})
STARTING = frozenset({"ContainerCreating", "PodInitializing"})


@dataclass(frozen=True, slots=True)
class Probed:
    """What came of the Job. `blocked` says why no pod got anywhere; `images` maps each image to why it could not be
    had, None if it could; `result` is what the probe printed, `error` why it printed nothing.
    """

    images: Mapping[str, str | None]
    blocked: str | None = None
    result: Json | None = None
    error: str | None = None


def prepare(config: RunConfig, namespace: str, task: Json, targets: Mapping[str, str]) -> Manifest:
    """The Job and its Secret. `targets` are gateways as pods reach them, each with an agent's key.

    Raises LaunchError for a template that gives no Job, ConfigError for one that cannot be read.
    """
    settings = pods(config.kubernetes, config.gateway.max_workspace_bytes, namespace)
    variables = {url: f"LEYDEN_PROBE_KEY_{i}" for i, url in enumerate(targets)}
    made = manifest(settings, _program(config, task, {variables[url]: key for url, key in targets.items()}))
    pod = made.job["spec"]["template"]["spec"]
    (main,) = [c for c in pod["containers"] if c["name"] == "harness"]
    probe = _container(PROBE_NAME, settings.keeper_image, ["python3", "-c", PROBE.read_text(encoding="utf-8")], main)
    told = json.dumps({"gateways": variables, "others": OTHERS})
    keys = [entry for entry in main["env"] if entry["name"] in variables.values()]
    probe["env"] = [{"name": "LEYDEN_PROBE", "value": told}, *keys]
    grader = config.kubernetes.grader_image
    images = dict.fromkeys([*_images(pod), *([grader] if grader else [])])
    idle = [_container(f"image-{i}", image, ["true"], main) for i, image in enumerate(images)]
    kept = {k: v for k, v in pod.items() if k not in ("initContainers", "volumes", "shareProcessNamespace")}
    made.job["spec"]["template"]["spec"] = {**kept, "containers": [probe, *idle], "terminationGracePeriodSeconds": 1}
    return made


def _program(config: RunConfig, task: Json, keys: Mapping[str, str]) -> Program:
    """The first task's harness with the probe's keys and none of its files."""
    rollout_id = f"doctor-{secrets.token_hex(4)}"
    program = Programs(config, "doctor", "").harness(claim_of(rollout_id, task))
    deadline_s = int(config.controller.start_timeout_s) + 60
    return replace(program, env={}, keys=keys, archive=b"", files={}, deadline_s=deadline_s)


async def run_probe(
    api: KubernetesApi, made: Manifest, image_wait_s: float, patience_s: float, limit_s: float
) -> Probed:
    """Make the Job, follow its pod to the end, delete it. An image may be refused for `image_wait_s`, and anything else
    hold the pod up for `patience_s`. Raises ClusterError.
    """
    job = await api.create_job(made)
    name, uid = job["metadata"]["name"], job["metadata"]["uid"]
    try:
        began = well = time.monotonic()
        while True:
            pod = await _pod(api, name)
            seen = read_pod(pod, await _warnings(api, [uid, *([pod["metadata"]["uid"]] if pod else [])]))
            now = time.monotonic()
            refused = any(seen.images.values())
            if not refused and seen.blocked is None:
                well = now
                if pod is not None and finished(pod):
                    return replace(seen, **await _printed(api, pod))
            wait_s = image_wait_s if refused else patience_s
            if now > well + wait_s or now > began + limit_s:
                return seen if refused or seen.blocked else replace(seen, blocked=f"not over after {limit_s:g} s")
            await asyncio.sleep(POLL_S)
    finally:
        await asyncio.shield(api.delete_job(name, uid, grace_s=0))


def read_pod(pod: Object | None, warnings: Sequence[str]) -> Probed:
    """What is known of the images by now, and what holds the pod up. `warnings` are the cluster's, oldest first."""
    said = warnings[-1] if warnings else ""
    if pod is None:
        return Probed({}, blocked=said or None)
    status = pod.get("status", {})
    for condition in status.get("conditions") or ():
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return Probed({}, blocked=f"{condition.get('reason')}: {condition.get('message')}")
    images: dict[str, str | None] = {}
    blocked = None
    for container in status.get("containerStatuses") or ():
        waiting = container.get("state", {}).get("waiting") or {}
        reason = waiting.get("reason")
        text = f"{reason}: {waiting.get('message', '')}".rstrip(": ")
        image = _image(pod, container["name"])
        if reason in NO_IMAGE:
            images[image] = text
        elif reason is None or images.get(image) is None:
            images[image] = None
        if reason and reason not in NO_IMAGE | STARTING and "executable file not found" not in text:
            blocked = text
    return Probed(images, blocked=blocked)


def finished(pod: Object) -> bool:
    """Whether every container has ended, or will never run for want of its program."""
    statuses = pod.get("status", {}).get("containerStatuses") or ()
    return bool(statuses) and all(_ended(container["state"]) for container in statuses)


def _ended(state: Object) -> bool:
    return "terminated" in state or "executable file not found" in (state.get("waiting") or {}).get("message", "")


async def _printed(api: KubernetesApi, pod: Object) -> dict[str, Any]:
    """`result` or `error` of the probe."""
    try:
        log = await api.log(pod["metadata"]["name"], PROBE_NAME, tail_lines=20, limit_bytes=LOG_BYTES)
        return {"result": json.loads(log.splitlines()[-1])}
    except (ClusterError, IndexError, ValueError) as error:
        statuses = pod.get("status", {}).get("containerStatuses") or ()
        states = [c.get("state", {}) for c in statuses if c["name"] == PROBE_NAME]
        facts = next((s.get("waiting") or s.get("terminated") for s in states), None) or {}
        message = facts.get("message") or facts.get("reason")
        return {"error": str(message or f"it printed no result ({error})")}


async def _pod(api: KubernetesApi, job: str) -> Object | None:
    found, _ = await api.list_all(PODS, labels=f"job-name={job}")
    return found[0] if found else None


async def _warnings(api: KubernetesApi, uids: Sequence[str]) -> list[str]:
    """The cluster's warnings about the Job and its pod, oldest first."""
    texts: list[tuple[str, str]] = []
    for uid in uids:
        found, _ = await api.list_all(EVENTS, fields=f"type=Warning,involvedObject.uid={uid}")
        texts += [(e["metadata"]["creationTimestamp"], f"{e.get('reason')}: {e.get('message')}") for e in found]
    return [text for _, text in sorted(texts) if not text.startswith("MissingClusterDNS")]


def _image(pod: Object, container: str) -> str:
    return next(str(c["image"]) for c in pod["spec"]["containers"] if c["name"] == container)


def _images(pod: Object) -> list[str]:
    return [str(c["image"]) for kind in ("containers", "initContainers") for c in pod.get(kind) or ()]


def _container(name: str, image: str, command: list[str], like: Object) -> Object:
    """A small container under the security settings of `like`."""
    kept: Object = {k: like[k] for k in ("securityContext", "imagePullPolicy") if k in like}
    resources = {"requests": {"cpu": "10m", "memory": "32Mi"}, "limits": {"memory": "128Mi"}}
    return {**kept, "name": name, "image": image, "command": command, "resources": resources}
