"""An API server that remembers: Jobs, Secrets, pods and events of one namespace, with lists, watches and faults."""

from __future__ import annotations

import asyncio
import copy
import json
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from aiohttp import web

Json = dict[str, Any]


class FakeCluster:
    """`async with FakeCluster(folder) as cluster`: serves on a loopback port, `kubeconfig` leads to it.

    `faults` are what the next creations of a Job meet: (status, message) refuses, `lost` creates it and breaks the
    connection. `logs` are what pods have printed, by name. Watches of the kinds in `mute` say nothing.
    """

    def __init__(self, folder: Path) -> None:
        self.kubeconfig = folder / "kubeconfig"
        self.things: dict[tuple[str, str], Json] = {}
        self.faults: deque[tuple[int, str] | str] = deque()
        self.logs: dict[str, str] = {}
        self.mute: set[str] = set()
        self.asked: list[tuple[str, str]] = []
        self._version = 0
        self._history: list[tuple[int, str, str, Json]] = []
        self._changed = asyncio.Condition()

    async def __aenter__(self) -> FakeCluster:
        app = web.Application()
        for group in ("/apis/batch/v1", "/api/v1"):
            base = group + "/namespaces/{ns}/{kind}"
            app.router.add_get(base, self._list)
            app.router.add_post(base, self._create)
            app.router.add_get(base + "/{name}/log", self._log)
            app.router.add_route("*", base + "/{name}", self._one)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": {"server": url}}],
            "users": [{"name": "u", "user": {"token": "CANARY-token"}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u", "namespace": "runs"}}],
            "current-context": "x",
        }
        self.kubeconfig.write_text(json.dumps(document))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    def all(self, kind: str) -> list[Json]:
        return [thing for (found, _), thing in self.things.items() if found == kind]

    async def put(self, kind: str, thing: Json) -> Json:
        """Make or change an object, as the cluster itself does."""
        name = thing["metadata"]["name"]
        event = "MODIFIED" if (kind, name) in self.things else "ADDED"
        known = {"uid": f"uid-{name}", "creationTimestamp": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")}
        thing = thing | {"metadata": known | thing["metadata"]}
        self.things[kind, name] = thing
        await self._tell(event, kind, thing)
        return thing

    async def remove(self, kind: str, name: str) -> None:
        if (thing := self.things.pop((kind, name), None)) is not None:
            await self._tell("DELETED", kind, thing)

    async def pod(self, job: Json, status: Json) -> Json:
        """The pod of a Job, in this state."""
        template, name = job["spec"]["template"], f"{job['metadata']['name']}-pod"
        metadata = {**template["metadata"], "name": name}
        conditions = [{"type": "PodScheduled", "status": "True", "lastTransitionTime": "2026-11-30T10:00:00Z"}]
        state = {"phase": "Pending", "conditions": conditions} | status
        return await self.put("pods", {"metadata": metadata, "spec": template["spec"], "status": state})

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60), self._changed:
            await self._changed.wait_for(condition)

    async def _tell(self, event: str, kind: str, thing: Json) -> None:
        self._version += 1
        thing["metadata"]["resourceVersion"] = str(self._version)
        self._history.append((self._version, event, kind, copy.deepcopy(thing)))
        async with self._changed:
            self._changed.notify_all()

    async def _list(self, request: web.Request) -> web.StreamResponse:
        kind = request.match_info["kind"]
        if "watch" in request.query:
            return await self._watch(request, kind)
        items = [thing for thing in self.all(kind) if _selected(thing, request.query.get("labelSelector", ""))]
        self.asked.append(("LIST", kind))
        return web.json_response({"metadata": {"resourceVersion": str(self._version)}, "items": items})

    async def _watch(self, request: web.Request, kind: str) -> web.StreamResponse:
        seen = int(request.query["resourceVersion"])
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            for version, event, of, thing in self._history:
                if version > seen and of == kind and kind not in self.mute:
                    await response.write(json.dumps({"type": event, "object": thing}).encode() + b"\n")
            seen = self._version
            async with self._changed:
                while self._version == seen:
                    await self._changed.wait()

    async def _create(self, request: web.Request) -> web.StreamResponse:
        kind, thing = request.match_info["kind"], await request.json()
        name = thing["metadata"]["name"]
        self.asked.append(("POST", f"{kind}/{name}"))
        fault = self.faults.popleft() if kind == "jobs" and self.faults else None
        if isinstance(fault, tuple):
            return _status(*fault)
        if (kind, name) in self.things:
            return _status(409, f'{kind} "{name}" already exists')
        made = await self.put(kind, thing)
        if fault == "lost":
            assert request.transport is not None
            request.transport.abort()
        return web.json_response(made, status=201)

    async def _one(self, request: web.Request) -> web.StreamResponse:
        kind, name = request.match_info["kind"], request.match_info["name"]
        thing = self.things.get((kind, name))
        if request.method != "GET":
            self.asked.append((request.method, f"{kind}/{name}"))
        if thing is None:
            return _status(404, f'{kind} "{name}" not found')
        if request.method == "PATCH":
            thing = await self.put(kind, _merged(thing, json.loads(await request.read())))
        if request.method == "DELETE":
            await self.remove(kind, name)
            if kind == "jobs":
                await self.remove("pods", f"{name}-pod")
                await self.remove("secrets", name)
        return web.json_response(thing)

    async def _log(self, request: web.Request) -> web.StreamResponse:
        return web.Response(text=self.logs.get(request.match_info["name"], ""))


def _selected(thing: Json, labels: str) -> bool:
    wanted = dict(label.split("=") for label in labels.split(",") if label)
    return wanted.items() <= (thing["metadata"].get("labels") or {}).items()


def _merged(old: Json, change: Json) -> Json:
    """RFC 7386, without deletions."""
    return {**old, **{k: _merged(old.get(k, {}), v) if isinstance(v, dict) else v for k, v in change.items()}}


def _status(code: int, message: str) -> web.Response:
    return web.json_response({"kind": "Status", "code": code, "message": message}, status=code)
