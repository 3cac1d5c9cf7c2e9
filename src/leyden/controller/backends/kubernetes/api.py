"""The few calls of the Kubernetes API that Leyden makes, with objects as plain JSON.

kubernetes_asyncio reads kubeconfigs, gets tokens (also by exec plugins and in a pod) and signs requests. Its
generated models are not used: they know fewer fields than the server sends, and cost as much time as the call.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import aiohttp
import orjson
from kubernetes_asyncio import client as kubernetes
from kubernetes_asyncio import config as kubernetes_config

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
from leyden.controller.backends.kubernetes.objects import Object
from leyden.controller.backends.kubernetes.states import ENDED
from leyden.controller.backends.kubernetes.verdict import KILLED
from leyden.errors import ConfigError

REQUEST_S = 30.0
PAGE = 500
_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


@dataclass(frozen=True, slots=True)
class ResourceKind:
    """A kind of object: where the API has it."""

    prefix: str
    plural: str


JOBS = ResourceKind("/apis/batch/v1", "jobs")
PODS = ResourceKind("/api/v1", "pods")
SECRETS = ResourceKind("/api/v1", "secrets")
EVENTS = ResourceKind("/api/v1", "events")


class KubernetesApi:
    """Calls in one namespace. Made by `connect`, to be closed."""

    def __init__(self, client: kubernetes.ApiClient, namespace: str, kubeconfig: Path | None, context: str | None):
        self.namespace = namespace
        self._client = client
        self._kubeconfig = kubeconfig
        self._context = context

    @classmethod
    async def connect(
        cls, namespace: str | None = None, kubeconfig: Path | None = None, context: str | None = None
    ) -> Self:
        """With a kubeconfig (given, KUBECONFIG, ~/.kube/config), or as a pod's service account. Raises ConfigError.

        Without `namespace`, the context's own or the pod's.
        """
        configuration, own = await _configuration(kubeconfig, context)
        return cls(kubernetes.ApiClient(configuration), namespace or own, kubeconfig, context)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._client.close()

    async def create(self, kind: ResourceKind, thing: Object) -> Object:
        made: Object = await self._json("POST", self._path(kind), body=thing)
        return made

    async def create_job(self, manifest: Manifest) -> Object:
        """The Secret, the Job, then the Job as the Secret's owner: it goes with it. Raises ObjectExists.

        In this order, since a pod that finds no Secret waits a minute and more before it looks again. A Secret that is
        there already is this attempt's own: names are never used twice.
        """
        name, is_new = manifest.secret["metadata"]["name"], True
        try:
            await self.create(SECRETS, manifest.secret)
        except ObjectExists:
            is_new = False
        try:
            job = await self.create(JOBS, manifest.job)
        except ObjectBeingDeleted:
            if is_new:  # the one of the Job that is being deleted goes with it
                await self.delete_secret(name)
            raise
        except (ClusterUnavailable, ObjectExists):
            raise
        except ClusterError:
            await self.delete_secret(name)
            raise
        await self.own_secret(job)
        return job

    async def own_secret(self, job: Object) -> None:
        name, uid = job["metadata"]["name"], job["metadata"]["uid"]
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": uid}
        await self.patch(SECRETS, name, {"metadata": {"ownerReferences": [owner]}})

    async def delete_secret(self, name: str) -> None:
        with contextlib.suppress(ObjectMissing):
            await self._json("DELETE", self._path(SECRETS, name))

    async def get(self, kind: ResourceKind, name: str) -> Object:
        found: Object = await self._json("GET", self._path(kind, name))
        return found

    async def patch(self, kind: ResourceKind, name: str, change: Object) -> Object:
        """A JSON merge patch."""
        content = "application/merge-patch+json"
        changed: Object = await self._json("PATCH", self._path(kind, name), body=change, content=content)
        return changed

    async def kill_job(self, name: str, reason: str, now: float) -> Object:
        """End a Job's pods and keep the Job. One change says why and lets its deadline pass, so that the Job
        controller, on its own, neither forgets the reason nor starts another pod."""
        change = {"metadata": {"annotations": {KILLED: f"{reason} {now:.3f}"}}, "spec": {"activeDeadlineSeconds": 1}}
        return await self.patch(JOBS, name, change)

    async def end_job(self, name: str, how: str) -> Object:
        """End what still runs in the pods of a Job whose harness ended, and note on the Job `how` that was."""
        change = {"metadata": {"annotations": {ENDED: how}}, "spec": {"activeDeadlineSeconds": 1}}
        return await self.patch(JOBS, name, change)

    async def delete_job(self, name: str, uid: str | None = None, *, grace_s: int | None = None) -> None:
        """The Job, then in the background its pods and its Secret. A Job that is gone, or another one of that name,
        is left alone."""
        body: Object = {"propagationPolicy": "Background"}
        if uid is not None:
            body["preconditions"] = {"uid": uid}
        if grace_s is not None:
            body["gracePeriodSeconds"] = grace_s
        with contextlib.suppress(ObjectMissing, ObjectExists):
            await self._json("DELETE", self._path(JOBS, name), body=body)

    async def list_all(self, kind: ResourceKind, *, labels: str = "", fields: str = "") -> tuple[list[Object], str]:
        """All objects that match, page by page, and the resource version to watch from."""
        items: list[Object] = []
        query = _query(labelSelector=labels, fieldSelector=fields, limit=PAGE)
        token = ""
        while True:
            page = await self._json("GET", self._path(kind), query=[*query, *_query(**{"continue": token})])
            try:
                items += [_lean(item) for item in page.get("items") or ()]
                token, version = page["metadata"].get("continue", ""), str(page["metadata"]["resourceVersion"])
            except (KeyError, TypeError, AttributeError) as error:
                raise ClusterUnavailable(f"the list of {kind.plural} is malformed: {_name(error)}") from error
            if not token:
                return items, version

    async def watch(
        self,
        kind: ResourceKind,
        version: str,
        *,
        labels: str = "",
        fields: str = "",
        timeout_s: int = 60,
        slack_s: float = 10,
    ) -> AsyncIterator[tuple[str, Object]]:
        """Events after `version`, as (type, object), bookmarks included, until the server ends the stream.

        The server is asked to end it after `timeout_s`; a stream without a byte for `slack_s` longer is dead and
        raises ClusterUnavailable. Raises VersionGone.
        """
        query = _query(
            watch="true",
            allowWatchBookmarks="true",
            resourceVersion=version,
            timeoutSeconds=timeout_s,
            labelSelector=labels,
            fieldSelector=fields,
        )
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=REQUEST_S, sock_read=timeout_s + slack_s)
        response = await self._send("GET", self._path(kind), query=query, timeout=timeout)
        try:
            async for line in _lines(response):
                yield _event(line)
        except (TimeoutError, aiohttp.ClientError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ClusterUnavailable(f"the watch of {kind.plural} broke: {_name(error)}") from error
        finally:
            response.close()

    async def log(self, pod: str, container: str, *, tail_lines: int, limit_bytes: int) -> str:
        """The last lines of a container's output. Of more than `limit_bytes` the last bytes are kept.

        Raises ObjectMissing once the pod is gone, ClusterError with status 400 before the container has started.
        """
        query = _query(container=container, tailLines=tail_lines)
        response = await self._send("GET", f"{self._path(PODS, pod)}/log", query=query)
        kept = bytearray()
        try:
            async for chunk in response.content.iter_any():
                kept += chunk
                del kept[:-limit_bytes]
        except (TimeoutError, aiohttp.ClientError) as error:
            raise ClusterUnavailable(f"the log of {pod} broke off: {_name(error)}") from error
        finally:
            response.close()
        return kept.decode("utf-8", "replace")

    @property
    def server(self) -> str:
        """The API server's URL."""
        return str(self._client.configuration.host)

    async def version(self) -> str:
        """The API server's version, such as v1.31.2."""
        return str((await self._json("GET", "/version"))["gitVersion"])

    async def allowed(self, verb: str, group: str, resource: str) -> bool:
        """Whether these credentials may do that in the namespace. `resource` may have a part: `pods/log`."""
        whole, _, part = resource.partition("/")
        attributes = {"namespace": self.namespace, "verb": verb, "group": group, "resource": whole, "subresource": part}
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": attributes},
        }
        answer = await self._json("POST", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", body=review)
        return bool(answer["status"]["allowed"])

    def _path(self, kind: ResourceKind, name: str = "") -> str:
        return f"{kind.prefix}/namespaces/{self.namespace}/{kind.plural}" + (f"/{name}" if name else "")

    async def _json(
        self,
        method: str,
        path: str,
        *,
        query: list[tuple[str, str]] | None = None,
        body: Object | None = None,
        content: str = "application/json",
    ) -> Any:
        response = await self._send(method, path, query=query, body=body, content=content)
        try:
            return orjson.loads(await response.read())
        except (TimeoutError, aiohttp.ClientError, orjson.JSONDecodeError) as error:
            raise ClusterUnavailable(f"{method} {path}: the answer broke off: {_name(error)}") from error
        finally:
            response.release()

    async def _send(
        self,
        method: str,
        path: str,
        *,
        query: list[tuple[str, str]] | None = None,
        body: Object | None = None,
        content: str = "application/json",
        timeout: aiohttp.ClientTimeout | None = None,
    ) -> aiohttp.ClientResponse:
        """A response with a good status, its body unread. A token that ran out is fetched anew once."""
        for last in (False, True):
            response = await self._once(method, path, query, body, content, timeout)
            if response.status == 401 and not last:
                response.release()
                await self._renew()
                continue
            break
        if response.status < 300:
            return response
        try:
            refused = await response.read()
        except (TimeoutError, aiohttp.ClientError):
            refused = b""
        finally:
            response.release()
        raise _refusal(response.status, _status(refused), f"{method} {path}")

    async def _once(
        self,
        method: str,
        path: str,
        query: list[tuple[str, str]] | None,
        body: Object | None,
        content: str,
        timeout: aiohttp.ClientTimeout | None,
    ) -> aiohttp.ClientResponse:
        try:
            response: aiohttp.ClientResponse = await self._client.call_api(
                path,
                method,
                query_params=query or [],
                header_params={"Accept": "application/json", "Content-Type": content},
                body=body,
                auth_settings=["BearerToken"],
                _preload_content=False,
                _request_timeout=timeout or aiohttp.ClientTimeout(total=REQUEST_S),
            )
        except aiohttp.ClientConnectorCertificateError as error:
            raise ClusterForbidden(
                f"{method} {path}: the API server's certificate is not trusted: {_name(error)}"
            ) from error
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise ClusterUnavailable(f"{method} {path}: {_name(error)}") from error
        return response

    async def _renew(self) -> None:
        configuration, _ = await _configuration(self._kubeconfig, self._context)
        self._client.configuration.api_key = configuration.api_key


async def _configuration(kubeconfig: Path | None, context: str | None) -> tuple[kubernetes.Configuration, str]:
    """The library's settings and the namespace that goes with them."""
    configuration = kubernetes.Configuration()
    # Many clusters' own authorities lack the key identifiers that Python 3.13 asks for; kubectl does not ask either.
    configuration.disable_strict_ssl_verification = True
    try:
        await kubernetes_config.load_kube_config(
            config_file=None if kubeconfig is None else str(kubeconfig),
            context=context,
            client_configuration=configuration,
            persist_config=False,
        )
        _, active = kubernetes_config.list_kube_config_contexts(None if kubeconfig is None else str(kubeconfig))
        chosen = active if context is None else {}
        return configuration, (chosen.get("context") or {}).get("namespace") or "default"
    except kubernetes_config.ConfigException as error:
        if kubeconfig is not None or context is not None:
            raise ConfigError("kubernetes.kubeconfig", f"{kubeconfig}: {error}") from error
        outside = error
    try:
        kubernetes_config.load_incluster_config(client_configuration=configuration)
        return configuration, await asyncio.to_thread(_NAMESPACE_FILE.read_text)
    except (kubernetes_config.ConfigException, OSError) as error:
        raise ConfigError(
            "kubernetes.kubeconfig", f"no cluster is named: {outside}; nor is this a pod: {error}"
        ) from error


def _event(line: bytes) -> tuple[str, Object]:
    """An event of a watch. Raises the ClusterError that it tells; KeyError, TypeError or the like for no event."""
    event = orjson.loads(line)
    what, thing = event["type"], event["object"]
    if what == "ERROR":
        said = thing if isinstance(thing, dict) else {}
        code = said.get("code")
        raise _refusal(code if isinstance(code, int) else None, said)
    if what == "BOOKMARK":
        return what, {"metadata": {"resourceVersion": str(thing["metadata"]["resourceVersion"])}}
    return str(what), _lean(thing)


def _refusal(status: int | None, said: Mapping[str, Any], call: str = "watch") -> ClusterError:
    """The API's Status object as an error."""
    message, reason = str(said.get("message") or said.get("reason") or f"status {status}"), said.get("reason")
    kind: type[ClusterError] = ClusterError
    if status == 403 and "exceeded quota" in message:
        kind = QuotaExceeded
    elif status in (401, 403):
        kind = ClusterForbidden
    elif status == 404:
        kind = ObjectMissing
    elif status == 409:
        kind = ObjectBeingDeleted if "being deleted" in message else ObjectExists
    elif status == 410 or reason == "Expired":
        kind = VersionGone
    elif status is None or status == 429 or status >= 500:
        kind = ClusterUnavailable
    return kind(f"{call}: {message}", status=status)


def _status(body: bytes) -> Mapping[str, Any]:
    try:
        said = orjson.loads(body)
    except orjson.JSONDecodeError:
        return {"message": body[:500].decode("utf-8", "replace")}
    return said if isinstance(said, dict) else {}


async def _lines(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Whole lines, of any length. A line that the end cuts off is not one."""
    rest = b""
    async for chunk in response.content.iter_any():
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            if line:
                yield line


def _lean(thing: Object) -> Object:
    """Without the bookkeeping of field owners, half of an object's size, and without nulls, which mean what a missing
    field means. Raises KeyError, TypeError or AttributeError for what is no object."""
    metadata = thing["metadata"]
    metadata.pop("managedFields", None)
    for name in ("name", "uid", "resourceVersion"):
        if not isinstance(metadata[name], str):
            raise TypeError(f"metadata.{name} is {metadata[name]!r:.100}")
    lean: Object = _without_nulls(thing)
    for part in ("spec", "status"):
        if not isinstance(lean.setdefault(part, {}), dict):
            raise TypeError(f"{part} is {lean[part]!r:.100}")
    return lean


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_nulls(v) for k, v in value.items() if v is not None}
    return [_without_nulls(v) for v in value] if isinstance(value, list) else value


def _query(**values: str | int) -> list[tuple[str, str]]:
    return [(name, str(value)) for name, value in values.items() if value != ""]


def _name(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")
