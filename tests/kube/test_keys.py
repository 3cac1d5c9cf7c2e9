"""What a harness finds in its pod, and what its key opens."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest
from starlette.routing import Route

from leyden.controller.jobs import harness_job
from leyden.protocols import COUNT_ROUTES, LIST_ROUTES, ROUTES
from tests.kube.cluster import Cluster
from tests.kube.runs import SECRET, Run, gates, good, run

pytestmark = [pytest.mark.kube, pytest.mark.timeout(600)]

# Prints one line of JSON: the status of every route with the pod's key and without one, and all keys that the pod's
# files, variables and processes show (their scopes' letters).
LOOK = r"""
import json, os, pathlib, re, urllib.error, urllib.request

own, key = os.environ["LEYDEN_ROLLOUT_ID"], os.environ["LEYDEN_KEY"]
task = json.loads(pathlib.Path(os.environ["LEYDEN_TASK"]).read_text())

def status(method, path, headers):
    headers = headers | {"Content-Type": "application/json"}
    body = None if method == "GET" else b"{}"
    call = urllib.request.Request(os.environ["LEYDEN_URL"] + path, body, headers, method=method)
    try:
        return urllib.request.urlopen(call, timeout=60).status
    except urllib.error.HTTPError as error:
        return error.code

def statuses(rollout_id):
    routes = [(method, path, path.replace("{rollout_id}", rollout_id)) for method, path in task["routes"]]
    return {f"{m} {p}": [status(m, q, {"Authorization": "Bearer " + key}), status(m, q, {})] for m, p, q in routes}

def contents(*paths):
    for path in paths:
        try:
            yield path.read_bytes().decode("latin-1") if path.stat().st_size < 100_000 else ""
        except OSError:
            pass

def files(folder):
    return [pathlib.Path(place, name) for place, _, names in os.walk(folder) for name in names]

processes = [p for p in pathlib.Path("/proc").iterdir() if p.name.isdigit()]
places = [*files("/leyden"), *files("/workspace"), *(p / "environ" for p in processes)]
places += [f for p in processes for f in files(p / "root/leyden")]
print(json.dumps({
    "own": statuses(own),
    "another": statuses(task["another"]),
    "keys": sorted({k for c in contents(*places) for k in re.findall(r"\x6ck-([a-z])-[A-Za-z0-9_-]{20,}", c)}),
    "token": os.path.exists("/var/run/secrets/kubernetes.io"),
}))
"""


def opens(route: str, *, own: bool) -> bool:
    """Whether an agent's key is good for a route: model calls in its own name, and diagnostic events."""
    return route == "POST /api/events" or ("/v1" in route and (own or "{rollout_id}" not in route))


def seen_in_pod(it: Run, rollout_id: str) -> Any:
    log = it.folder / "run" / "attempts" / rollout_id / "1" / "harness.log"
    (line,) = [line for line in log.read_text().splitlines() if line.startswith("{")]
    return json.loads(line)


async def test_a_key_from_a_pod_opens_only_its_own_routes(
    kube: Cluster, namespace: str, tmp_path: Path, tokenizer_path: Path, python_image: str
) -> None:
    """Every route from within a pod; and afterwards the key is worth nothing."""
    with gates(kube.host) as gate:
        async with run(kube, namespace, tmp_path, tokenizer_path, python_image, harness={"timeout_s": 600}) as it:
            (another,) = await it.add([good(first=gate.wait("end"))])
            await it.running_pod(another)
            served = [(m, r.path) for r in cast(list[Route], it.gateway.routes) for m in r.methods - {"HEAD"}]
            routes = [(m, p) for m, p in served if p not in ("/health", "/", "/rollouts/{rollout_id}")]
            assert {p for p, _ in (*ROUTES, *COUNT_ROUTES, *LIST_ROUTES)} < {p for _, p in routes}
            script = f"python3 -c '{LOOK}' && {gate.wait('look')} && echo 1 > score"
            (rollout_id,) = await it.add(
                [{"script": script, "image": python_image, "memory": "256Mi", "routes": routes, "another": another}]
            )
            await it.until(lambda: "look" in gate.arrived, 120)
            shown = kube.kubectl("get", "jobs,pods,events", "-n", namespace, "-o", "yaml")
            job = it.job(harness_job(rollout_id, 1))
            assert job is not None
            secret = kube.get("secret", job["metadata"]["name"], "-n", namespace)
            gate.open("look", "end")
            await it.ended([rollout_id, another], 240)
            seen = seen_in_pod(it, rollout_id)
            await it.nothing_left()
            assert len(seen["own"]) == len(routes)
            for own, name in ((True, "own"), (False, "another")):
                for route, (with_key, without) in seen[name].items():
                    assert without == 401, (name, route, without)
                    assert (with_key not in (401, 403)) == opens(route, own=own), (name, route, with_key)
            assert seen["keys"] == ["a"] and not seen["token"]
            keys = [base64.b64decode(value) for value in secret["data"].values()]
            keys = [value for value in keys if value.startswith(b"lk-")] + [SECRET.encode()]
            assert len(keys) > 2
            for key in keys:
                assert key.decode() not in shown and base64.b64encode(key).decode() not in shown
            assert "lk-" not in shown and "lk-" not in it.log()
            assert {await status(it, key) for key in keys} == {401, 403}


async def status(it: Run, key: bytes) -> int:
    """Of a model call after the end of everything."""
    headers = {"Authorization": f"Bearer {key.decode()}"}
    body = {"model": "m", "messages": [{"role": "user", "content": "late"}]}
    url = f"{it.url}/v1/chat/completions"
    async with aiohttp.ClientSession() as session, session.post(url, json=body, headers=headers) as answer:
        return answer.status
