"""Calls of the API: typed errors, owners, pages, logs."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from aiohttp import web

from leyden.controller.backends.kubernetes.api import JOBS, PODS, KubernetesApi
from leyden.controller.backends.kubernetes.cluster_errors import (
    ClusterError,
    ClusterForbidden,
    ClusterUnavailable,
    ObjectBeingDeleted,
    ObjectExists,
    ObjectMissing,
    QuotaExceeded,
    VersionGone,
)
from leyden.controller.backends.kubernetes.manifest import Manifest
from leyden.errors import ConfigError
from tests.controller.kubernetes.conftest import FakeApiServer, items, refusal, reply, thing

QUOTA = (
    'jobs.batch "quota3" is forbidden: exceeded quota: q, requested: count/jobs.batch=1, used: count/jobs.batch=2, '
    "limited: count/jobs.batch=2"
)
MADE = Manifest({"kind": "Job"}, {"kind": "Secret", "metadata": {"name": "j"}})


@pytest.mark.parametrize(
    ("status", "message", "error"),
    [
        (403, QUOTA, QuotaExceeded),
        (403, 'jobs.batch is forbidden: User "u" cannot create resource', ClusterForbidden),
        (404, 'jobs.batch "x" not found', ObjectMissing),
        (409, 'jobs.batch "x" already exists', ObjectExists),
        (409, 'object is being deleted: jobs.batch "x" already exists', ObjectBeingDeleted),
        (410, "too old resource version", VersionGone),
        (422, 'Job.batch "x" is invalid: spec', ClusterError),
        (429, "too many requests", ClusterUnavailable),
        (500, "etcdserver: request timed out", ClusterUnavailable),
    ],
)
async def test_errors_have_types(
    server: FakeApiServer, api: KubernetesApi, status: int, message: str, error: type[ClusterError]
) -> None:
    """The message is the server's own."""
    server.calls = [refusal(status, message)]
    with pytest.raises(error) as raised:
        await api.create(JOBS, {})
    assert type(raised.value) is error
    assert raised.value.status == status
    assert str(raised.value) == f"POST /apis/batch/v1/namespaces/runs/jobs: {message}"


async def test_no_answer(server: FakeApiServer, api: KubernetesApi) -> None:
    async def cut(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    server.calls = [cut]
    with pytest.raises(ClusterUnavailable) as raised:
        await api.create(JOBS, {})
    assert raised.value.status is None


async def test_the_secret_is_there_before_the_job_and_belongs_to_it(server: FakeApiServer, api: KubernetesApi) -> None:
    server.calls = [reply(201, thing("j", 1)), reply(201, thing("j", 2)), reply(200, thing("j", 3))]
    assert await api.create_job(MADE) == thing("j", 2)
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": "j", "uid": "uid-j"}
    assert server.bodies == [
        ("POST", "/api/v1/namespaces/runs/secrets", {"kind": "Secret", "metadata": {"name": "j"}}),
        ("POST", "/apis/batch/v1/namespaces/runs/jobs", {"kind": "Job"}),
        ("PATCH", "/api/v1/namespaces/runs/secrets/j", {"metadata": {"ownerReferences": [owner]}}),
    ]


async def test_the_secret_of_a_job_that_is_refused_goes_again(server: FakeApiServer, api: KubernetesApi) -> None:
    server.calls = [reply(201, thing("j", 1)), refusal(403, "exceeded quota: q"), reply(200, {})]
    with pytest.raises(QuotaExceeded):
        await api.create_job(MADE)
    assert server.bodies[-1][:2] == ("DELETE", "/api/v1/namespaces/runs/secrets/j")


async def test_killing_is_one_change(server: FakeApiServer, api: KubernetesApi) -> None:
    server.calls = [reply(200, thing("j", 2))]
    await api.kill_job("j", "timeout", 1790000000.25)
    assert server.bodies == [
        (
            "PATCH",
            "/apis/batch/v1/namespaces/runs/jobs/j",
            {
                "metadata": {"annotations": {"leyden/killed": "timeout 1790000000.250"}},
                "spec": {"activeDeadlineSeconds": 1},
            },
        )
    ]


async def test_deleting_what_is_gone(server: FakeApiServer, api: KubernetesApi) -> None:
    """Also where another Job has the name by now (the uid differs: 409)."""
    server.calls = [refusal(404, "not found"), refusal(409, "the UID in the precondition does not match")]
    await api.delete_job("j", "uid-j")
    await api.delete_job("j", "uid-j")


async def test_lists_come_in_pages(server: FakeApiServer, api: KubernetesApi) -> None:
    a = thing("a", 1)
    a["metadata"]["managedFields"] = ["x"]
    server.lists = [items(5, a, token="next"), items(6, thing("b", 2))]
    assert await api.list_all(PODS, labels="l=1", fields="f=2") == (
        [thing("a", 1, spec={}, status={}), thing("b", 2, spec={}, status={})],
        "6",
    )
    assert server.asked == [
        {"labelSelector": "l=1", "fieldSelector": "f=2", "limit": "500"},
        {"labelSelector": "l=1", "fieldSelector": "f=2", "limit": "500", "continue": "next"},
    ]


async def test_a_log_keeps_its_end(server: FakeApiServer, api: KubernetesApi) -> None:
    """The last bytes count, and a cut character is no error."""

    async def text(_: web.Request) -> web.StreamResponse:
        return web.Response(body=b"x" * 100_000 + "é last line\n".encode())

    server.lists = [text]
    assert await api.log("p", "harness", tail_lines=50, limit_bytes=12) == "\ufffd last line\n"
    assert server.asked == [{"container": "harness", "tailLines": "50"}]


async def test_a_token_that_ran_out_is_read_again(server: FakeApiServer, api: KubernetesApi, tmp_path: Path) -> None:
    seen: list[str] = []

    async def check(request: web.Request) -> web.StreamResponse:
        seen.append(request.headers["authorization"])
        known = seen[-1] == "Bearer fresh"
        return web.json_response({"metadata": {"resourceVersion": "1"}, "items": []}, status=200 if known else 401)

    server.lists = [check]
    config = json.loads((tmp_path / "kubeconfig").read_text())
    config["users"][0]["user"]["token"] = "fresh"
    (tmp_path / "kubeconfig").write_text(json.dumps(config))
    assert await api.list_all(JOBS) == ([], "1")
    assert seen == ["Bearer CANARY-token", "Bearer fresh"]


async def test_nothing_secret_is_logged(
    server: FakeApiServer, api: KubernetesApi, caplog: pytest.LogCaptureFixture
) -> None:
    """At the lowest level, bodies and tokens are in no log line and in no error."""
    caplog.set_level(logging.DEBUG)
    server.calls = [refusal(422, "invalid")]
    with pytest.raises(ClusterError) as raised:
        await api.create_job(Manifest({"a": "CANARY-1"}, {"metadata": {"name": "x"}}))
    assert "CANARY" not in caplog.text + str(raised.value)


async def test_no_cluster_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"kubernetes.kubeconfig: .*none: Invalid kube-config"):
        await KubernetesApi.connect(kubeconfig=tmp_path / "none")


async def test_the_namespace(api: KubernetesApi) -> None:
    """The context's own, if none is asked for."""
    assert api.namespace == "runs"


async def test_certificates_without_key_identifiers_are_taken(api: KubernetesApi) -> None:
    """Python 3.13 refuses them by default, and the authorities of many clusters have none."""
    assert api._client.configuration.disable_strict_ssl_verification
