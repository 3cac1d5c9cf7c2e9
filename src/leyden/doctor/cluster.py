"""A Kubernetes cluster: who answers, what may be done there, which images it gets, what its pods reach."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from leyden.client import mint
from leyden.config import KubernetesConfig
from leyden.doctor.access import NOBODY
from leyden.doctor.findings import Finding, ok, problem, skipped, warning
from leyden.errors import ConfigError
from leyden.types import Claims, Json, Scope

if TYPE_CHECKING:
    from leyden.controller.backends.kubernetes.api import KubernetesApi
    from leyden.controller.backends.kubernetes.objects import Object
    from leyden.doctor.probing import Probed

KEY_S = 3600.0
RIGHTS = (
    *((verb, "batch", "jobs") for verb in ("create", "get", "list", "watch", "patch", "delete")),
    *((verb, "", "pods") for verb in ("list", "watch")),
    ("get", "", "pods/log"),
    *((verb, "", "secrets") for verb in ("create", "list", "patch", "delete")),
    *((verb, "", "events") for verb in ("list", "watch")),
)
"""(verb, API group, resource): all that the Kubernetes backend does; `deploy/` grants these and no others."""


async def connect(settings: KubernetesConfig) -> KubernetesApi:
    """Raises ConfigError where no cluster is named or the library is missing."""
    try:
        from leyden.controller.backends.kubernetes.api import KubernetesApi
    except ImportError as error:
        raise ConfigError("controller.backend", f"{error}; pip install 'leyden[kubernetes]'") from None
    return await KubernetesApi.connect(settings.namespace, settings.kubeconfig, settings.context)


async def check_server(api: KubernetesApi) -> Finding:
    from leyden.controller.backends.kubernetes.cluster_errors import ClusterError, ClusterForbidden

    try:
        return ok("cluster", f"Kubernetes {await api.version()}, namespace {api.namespace}")
    except ClusterForbidden as error:
        return problem("cluster", str(error), "the credentials are refused: renew them, or set kubernetes.kubeconfig")
    except ClusterError as error:
        advice = "is the cluster up, and does kubernetes.kubeconfig (or KUBECONFIG) name it?"
        return problem("cluster", str(error), advice)


async def check_rights(namespace: str, allowed: Callable[[str, str, str], Awaitable[bool]]) -> Finding:
    """`allowed(verb, group, resource)` asks the cluster."""
    missing = [right for right in RIGHTS if not await allowed(*right)]
    if not missing:
        return ok("rights", f"all {len(RIGHTS)} that the controller uses in namespace {namespace}")
    by_resource: dict[str, list[str]] = {}
    for verb, group, resource in missing:
        by_resource.setdefault(f"{resource}.{group}".rstrip("."), []).append(verb)
    said = "; ".join(f"{resource}: {', '.join(verbs)}" for resource, verbs in by_resource.items())
    advice = "deploy/base/rbac.yaml has the Role that the controller needs"
    return problem("rights", f"missing in namespace {namespace}: {said}", advice)


async def policies(api: KubernetesApi) -> list[Object] | None:
    """The namespace's NetworkPolicies; None if they may not be read."""
    from leyden.controller.backends.kubernetes.api import ResourceKind
    from leyden.controller.backends.kubernetes.cluster_errors import ClusterForbidden

    try:
        found, _ = await api.list_all(ResourceKind("/apis/networking.k8s.io/v1", "networkpolicies"))
    except ClusterForbidden:
        return None
    return found


def judge_images(probed: Probed) -> Finding:
    """Whether the cluster got every image, and whether a pod could be made of them."""
    refused = [f"{image}: {why}" for image, why in probed.images.items() if why]
    if refused:
        advice = "push it, correct kubernetes.image, or give the pods an imagePullSecret in kubernetes.template"
        return problem("image", "; ".join(refused), advice)
    if probed.blocked:
        advice = "kubernetes.template and the namespace's quota and policies say what a pod may be"
        return problem("image", f"no pod of this run starts: {probed.blocked}", advice)
    return ok("image", f"the cluster starts {', '.join(probed.images)}")


def judge_reach(probed: Probed, url: str, *, ours: bool) -> list[Finding]:
    """Whether pods reach the gateway at `url`, and it takes the key. `ours` is a gateway of the doctor's own,
    beside the run's."""
    answer = _answer(probed, url)
    if answer is None:
        why = f"the probe did not run: {probed.error or 'its pod did not start'}"
        if probed.result is None and probed.error:
            return [problem("reach", why, "kubernetes.keeper_image must hold python3"), skipped("pod key", why)]
        return [skipped("reach", why), skipped("pod key", why)]
    if answer["status"] is None:
        what = f"pods do not reach {url}: {answer['text']}"
        return [_unreached(what, ours=ours), skipped("pod key", "the gateway was not reached")]
    reached = ok("reach", f"pods reach {url}")
    # A gateway reads the key before it looks for the rollout.
    if answer["status"] == 404 and f"there is no rollout {NOBODY!r}" in answer["text"]:
        return [reached, ok("pod key", f"{url} takes an agent's key from a pod")]
    what = f"{url} answers a pod's key with {answer['status']}: {answer['text']}"
    return [reached, problem("pod key", what, "is that this run's gateway, with this run's LEYDEN_SECRET?")]


def judge_egress(probed: Probed, policies: Sequence[Object] | None, labels: Json) -> Finding:
    """Whether pods reach only the gateway. `policies` are the namespace's NetworkPolicies, None if they may not be
    read; `labels` those of a pod of the run.
    """
    if probed.result is None:
        return skipped("egress", "the probe did not run")
    opened = [str(address) for address in probed.result["open"]]
    if not opened:
        return ok("egress", "pods reach no other address that was tried")
    what = f"pods also reach {', '.join(sorted(opened))}"
    if policies is None:
        return problem("egress", f"{what}, and the NetworkPolicies may not be read", "apply deploy/base/network.yaml")
    names = [p["metadata"]["name"] for p in policies if restricts(p, labels)]
    if names:
        advice = "either it allows that, or the cluster's network plug-in does not enforce policies (Calico, Cilium do)"
        return warning("egress", f"{what} under NetworkPolicy {', '.join(names)}", advice)
    return problem("egress", f"{what}: no NetworkPolicy is for them", "apply deploy/base/network.yaml")


def restricts(policy: Object, labels: Json) -> bool:
    """Whether a NetworkPolicy is about what pods with `labels` may reach."""
    spec = policy["spec"]
    if "Egress" not in spec.get("policyTypes", ["Ingress", *(["Egress"] if "egress" in spec else [])]):
        return False
    selector = spec.get("podSelector") or {}
    if not (selector.get("matchLabels") or {}).items() <= labels.items():
        return False
    return all(_matches(expression, labels) for expression in selector.get("matchExpressions") or ())


def agent_key(secret: bytes) -> str:
    """An agent's key of no attempt: good for nothing but to be recognised."""
    return mint(secret, Claims(Scope.AGENT, NOBODY, 1, time.time() + KEY_S))


def _unreached(what: str, *, ours: bool) -> Finding:
    if ours:
        return warning("reach", what, "to try the harness run `leyden doctor` in the cluster, see docs/kubernetes.md")
    advice = (
        "let gateway.host be an address of this machine that pods reach, set kubernetes.gateway_url where they see it "
        "as another, and let the NetworkPolicy allow its port"
    )
    return problem("reach", what, advice)


def _answer(probed: Probed, url: str) -> Json | None:
    answers: dict[str, Json] = (probed.result or {}).get("gateways", {})
    return answers.get(url)


def _matches(expression: Json, labels: Json) -> bool:
    value, values = labels.get(expression["key"]), expression.get("values") or ()
    match expression["operator"]:
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case _:
            return value is None
