"""Async client of the gateway's control API: one method per route.

A connection that is refused (the gateway may be restarting) and a call that cannot be written now (503: its disk is
full) are tried again with growing pauses until `retry_limit_s`; nothing else is. Every failure is a GatewayError:
`status` is the HTTP status of a refusal (409: somebody else was there first, read again and go on) and None if there
was no reply. Before the key goes over a new connection, the gateway proves itself (`proof`); where it once did, another
program at its address is taken for one that leaves again, and the call is tried again like a refused one. One client
may be used by many tasks of one loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from weakref import WeakSet

import aiohttp
import orjson
from pydantic import ValidationError

from leyden.client.proof import UnprovenGateway, prove
from leyden.errors import GatewayError
from leyden.records import (
    Claim,
    ControllerList,
    EventLog,
    ExitReceipt,
    Group,
    Groups,
    Model,
    Record,
    Recovery,
    Rollout,
    RolloutPage,
    ServedModels,
    Unmet,
    adapter,
)
from leyden.types import Json, RolloutState, Turn

if TYPE_CHECKING:
    from aiohttp.client_reqrep import ClientRequest
    from aiohttp.connector import Connection
    from aiohttp.tracing import Trace

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 2.0
UNWRITABLE = 503
PROOF_S = 10.0
# Below the 5 s after which common servers close an idle connection, so that no request meets a dying socket.
KEEP_ALIVE_S = 2.0


class ControlClient:
    """`async with ControlClient(url, key) as client: ...`. `timeout_s` bounds one request, its long-poll apart."""

    def __init__(self, url: str, key: str, *, timeout_s: float = 120.0, retry_limit_s: float = 60.0) -> None:
        self._url = url.rstrip("/")
        self._key = key
        self._known = False
        self._timeout_s = timeout_s
        self._retry_limit_s = retry_limit_s
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()
            self._http = None

    async def create_groups(self, groups: Iterable[Json]) -> list[Group]:
        """Create groups {kind, step, slot, size, task, sampling}; those that exist already are answered as they are."""
        return list((await self._call(Groups, "POST", "/api/groups", {"groups": list(groups)})).groups)

    async def groups(
        self, *, kind: str | None = None, step: int | None = None, state: str | None = None
    ) -> list[Group]:
        query = {"kind": kind, "step": step, "state": state}
        return list((await self._call(Groups, "GET", "/api/groups", query=query)).groups)

    async def consume(self, group_ids: Iterable[str]) -> None:
        await self._bytes("POST", "/api/groups/consume", {"group_ids": list(group_ids)})

    async def rollouts(
        self,
        *,
        after: int = 0,
        states: Iterable[RolloutState] = (),
        wait_s: float = 0.0,
        limit: int = 1000,
        tasks: bool = True,
        controller: str | None = None,
    ) -> tuple[list[Rollout], int]:
        """Rollouts changed after the cursor, oldest change first, and the next cursor. Waits up to `wait_s` for one.
        Naming a `controller` renews its lease.
        """
        query = {
            "after": after,
            "states": ",".join(states) or None,
            "wait_s": wait_s,
            "limit": limit,
            "tasks": None if tasks else 0,
            "controller": controller,
        }
        page = await self._call(RolloutPage, "GET", "/api/rollouts", query=query, wait_s=wait_s)
        return list(page.rollouts), page.cursor

    async def rollout(self, rollout_id: str) -> Rollout:
        return await self._call(Rollout, "GET", f"/api/rollouts/{rollout_id}")

    async def claim(self, rollout_id: str, controller: str) -> Claim:
        """queued -> running as the next attempt. 409 if it is not queued any more."""
        return await self._call(Claim, "POST", f"/api/rollouts/{rollout_id}/claim", {"controller": controller})

    async def controllers(self) -> dict[str, bool]:
        """Controllers that were ever seen, and whether their leases hold."""
        found = await self._call(ControllerList, "GET", "/api/controllers")
        return {one.controller: one.alive for one in found.controllers}

    async def run_name(self) -> str:
        """A name of the run that no other run has."""
        return (await self._call(ControllerList, "GET", "/api/controllers")).run

    async def take_over(self, rollout_id: str, attempt: int, controller: str) -> Rollout:
        """Make `controller` responsible for an attempt whose own controller is gone. 409 if it is not."""
        return await self._move(rollout_id, "take-over", attempt=attempt, controller=controller)

    async def exit(
        self, rollout_id: str, attempt: int, *, exit_code: int | None, timed_out: bool, reason: str | None
    ) -> ExitReceipt:
        """running -> grading; the harness's key ends. Repeating it in state grading answers the same."""
        body = {"attempt": attempt, "exit_code": exit_code, "timed_out": timed_out, "reason": reason}
        return await self._call(ExitReceipt, "POST", f"/api/rollouts/{rollout_id}/exit", body)

    async def finish(self, rollout_id: str, attempt: int, reason: str | None = None) -> Rollout:
        """grading -> succeeded or failed (agent); an infrastructure failure if no reward was accepted."""
        return await self._move(rollout_id, "finish", attempt=attempt, reason=reason)

    async def infrastructure(self, rollout_id: str, attempt: int, reason: str, *, final: bool = False) -> Rollout:
        """running or grading -> queued while attempts remain and this is not `final`, else failed (infrastructure)."""
        return await self._move(rollout_id, "infrastructure", attempt=attempt, reason=reason, final=final)

    async def give_back(self, rollout_id: str, attempt: int, reason: str) -> Rollout:
        """running or grading -> queued, through no fault of the attempt: it counts against no limit of attempts."""
        return await self._move(rollout_id, "give-back", attempt=attempt, reason=reason)

    async def cancel(self, rollout_id: str, reason: str) -> Rollout:
        return await self._move(rollout_id, "cancel", reason=reason)

    async def reward(self, rollout_id: str, attempt: int, value: float) -> None:
        """Post a reward with the control key. 422 unless it is a finite number, 409 if there is one already."""
        await self._bytes("POST", "/api/reward", {"value": value, "rollout_id": rollout_id, "attempt": attempt})

    async def events(self, rollout_id: str) -> list[Json]:
        return list((await self._call(EventLog, "GET", "/api/events", query={"rollout_id": rollout_id})).events)

    async def put_model(
        self, name: str, *, engines: Sequence[str], version: int, lineage: str, context_tokens: int
    ) -> None:
        """Say which engines serve `name`, and which weights they hold."""
        body = {"engines": list(engines), "version": version, "lineage": lineage, "context_tokens": context_tokens}
        await self._bytes("PUT", f"/api/models/{name}", body)

    async def models(self) -> list[Model]:
        return list((await self._call(ServedModels, "GET", "/api/models")).models)

    async def pause(self) -> None:
        """From now on, model calls are held."""
        await self._bytes("POST", "/api/pause", {})

    async def resume(self) -> None:
        await self._bytes("POST", "/api/resume", {})

    async def recover(self, *, step: int, version: int) -> Recovery:
        """Discard groups of the future that a checkpoint does not know; reopen consumed ones of its next step."""
        return await self._call(Recovery, "POST", "/api/recover", {"step": step, "version": version})

    async def turns(self, rollout_ids: Iterable[str]) -> list[Turn]:
        """Committed turns of each rollout's last attempt."""
        from leyden.client.arrow import decode

        body = await self._bytes("POST", "/api/turns", {"rollout_ids": list(rollout_ids)})
        try:
            return decode(body)
        except ValueError as error:
            raise GatewayError(f"the answer of /api/turns is not readable: {error}") from error

    async def health(self) -> Json:
        return await self._call(dict[str, Any], "GET", "/health")

    async def unmet(self) -> dict[str, int]:
        """What harnesses asked for and did not get since the gateway started, in how many calls."""
        return (await self._call(Unmet, "GET", "/api/unmet")).unmet

    async def metrics(self) -> str:
        """Prometheus text."""
        return (await self._bytes("GET", "/metrics")).decode()

    async def _move(self, rollout_id: str, change: str, **body: Any) -> Rollout:
        return await self._call(Rollout, "POST", f"/api/rollouts/{rollout_id}/{change}", body)

    async def _call(
        self,
        kind: type[Record],
        method: str,
        path: str,
        body: Json | None = None,
        *,
        query: dict[str, Any] | None = None,
        wait_s: float = 0.0,
    ) -> Record:
        raw = await self._bytes(method, path, body, query=query, wait_s=wait_s)
        try:
            return adapter(kind).validate_json(raw)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"])) or "the answer"
            raise GatewayError(f"{method} {path}: {where}: {first['msg']}") from error

    async def _bytes(
        self,
        method: str,
        path: str,
        body: Json | None = None,
        *,
        query: dict[str, Any] | None = None,
        wait_s: float = 0.0,
    ) -> bytes:
        """One request, sent again while the connection is refused or the gateway cannot write."""
        give_up = time.monotonic() + self._retry_limit_s
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                return await self._once(method, path, body, query, wait_s)
            except UnprovenGateway:
                if not self._known or time.monotonic() + pause_s > give_up:
                    raise
            except GatewayError as error:
                if error.status != UNWRITABLE or time.monotonic() + pause_s > give_up:
                    raise
            except aiohttp.ClientConnectorError as error:
                if not isinstance(error.os_error, ConnectionRefusedError) or time.monotonic() + pause_s > give_up:
                    raise GatewayError(f"no gateway at {self._url}: {error.os_error}") from error
            except (aiohttp.ClientError, TimeoutError) as error:
                raise GatewayError(f"{method} {path}: connection lost: {error or type(error).__name__}") from error
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _once(
        self, method: str, path: str, body: Json | None, query: dict[str, Any] | None, wait_s: float
    ) -> bytes:
        params = {k: str(v) for k, v in (query or {}).items() if v is not None}
        headers = {"content-type": "application/json"} if body is not None else {}
        async with self._session().request(
            method,
            self._url + path,
            params=params,
            data=None if body is None else orjson.dumps(body),
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=self._timeout_s + wait_s),
        ) as response:
            raw = await response.read()
            if response.status >= 400:
                raise GatewayError(f"{method} {path}: {response.status} {_message(raw)}", status=response.status)
            return raw

    def _session(self) -> aiohttp.ClientSession:
        if self._http is None:
            connector = _Proven(self._prove)
            headers = {"authorization": f"Bearer {self._key}"}
            self._http = aiohttp.ClientSession(connector=connector, headers=headers)
        return self._http

    async def _prove(self) -> None:
        timeout = aiohttp.ClientTimeout(total=PROOF_S)
        async with aiohttp.ClientSession(timeout=timeout) as keyless:
            await prove(keyless, self._url, self._key)
        self._known = True


class _Proven(aiohttp.TCPConnector):
    """Connections that were opened before a successful `proof`: whoever accepted one could not know a key earlier."""

    def __init__(self, proof: Callable[[], Awaitable[None]]) -> None:
        super().__init__(limit=0, keepalive_timeout=KEEP_ALIVE_S)
        self._proof = proof
        self._proven: WeakSet[object] = WeakSet()

    async def connect(self, req: ClientRequest, traces: list[Trace], timeout: aiohttp.ClientTimeout) -> Connection:
        connection = await super().connect(req, traces, timeout)
        if connection.protocol not in self._proven:
            try:
                await self._proof()
            except BaseException:
                connection.close()
                raise
            self._proven.add(connection.protocol)
        return connection


def _message(raw: bytes) -> str:
    """The server's own words: `error.message` or `error` of a JSON body, else the start of the text."""
    try:
        error = orjson.loads(raw)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return raw[:300].decode(errors="replace")
