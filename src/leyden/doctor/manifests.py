"""The Jobs of nobody's rollout: whether a cluster would be given something that makes sense."""

from __future__ import annotations

from leyden.config import RunConfig
from leyden.records import Claim, Rollout
from leyden.types import Json

ROLLOUT = "doctor"
URL = "http://127.0.0.1:1"


def render_manifests(config: RunConfig, task: Json) -> None:
    from leyden.controller.backends.kubernetes.manifest import manifest
    from leyden.controller.backends.kubernetes.programs import Programs, pods

    claim, programs = claim_of(ROLLOUT, task), Programs(config, ROLLOUT, URL)
    settings = pods(config.kubernetes, config.gateway.max_workspace_bytes, "default")
    manifest(settings, programs.harness(claim))
    if not config.grader.harness:
        manifest(settings, programs.grader(claim.rollout, "", 1, b"", {}))


def claim_of(rollout_id: str, task: Json) -> Claim:
    """A claim of nobody's rollout, with no keys."""
    known = {
        "rollout_id": rollout_id, "group_id": "doctor", "kind": "eval", "step": 0, "slot": 0, "member": 0, "task": task,
        "state": "running", "attempt": 1, "change": 1,
    }  # fmt: skip
    return Claim(Rollout.from_json(known), "", "")
