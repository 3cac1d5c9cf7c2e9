"""The control API in memory, for the controller's tests: the states and conflicts of the real one, nothing else."""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from typing import Any

from aiohttp import web

from leyden.client import control_key, mint, verify
from leyden.client.proof import gateways_proof
from leyden.types import Claims, Scope

Json = dict[str, Any]
TERMINAL = ("succeeded", "failed", "cancelled")


class FakeGateway:
    """`async with FakeGateway() as gateway`: serves on a loopback port; `gateway.rollouts` is its whole state."""

    def __init__(self, *, max_attempts: int = 3, port: int = 0) -> None:
        self.secret = secrets.token_bytes(32)
        self.key = control_key(self.secret)
        self.max_attempts = max_attempts
        self.rollouts: dict[str, Json] = {}
        self.calls: list[tuple[str, str]] = []
        self.url = ""
        self._port = port
        self._change = 0
        self._changed = asyncio.Condition()

    async def __aenter__(self) -> FakeGateway:
        app = web.Application()
        app.router.add_get("/api/rollouts", self._list)
        app.router.add_get("/api/controllers", self._controllers)
        app.router.add_get("/api/rollouts/{id}", self._get)
        app.router.add_post("/api/rollouts/{id}/{verb}", self._verb)
        app.router.add_post("/api/reward", self._reward)
        app.router.add_get("/hit", self._hit)
        app.router.add_get("/health", self._health)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port)
        await site.start()
        self._port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
        self.url = f"http://127.0.0.1:{self._port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _health(self, request: web.Request) -> web.Response:
        proof = gateways_proof(self.secret, request.query["nonce"], request.query["claims"])
        return web.json_response({"status": "ok", "proof": proof})

    def add(self, rollout_id: str, task: Json | None = None) -> None:
        self.rollouts[rollout_id] = {
            "rollout_id": rollout_id, "group_id": "g", "kind": "train", "step": 0, "slot": 0, "member": 0,
            "task": task or {}, "state": "queued", "attempt": 0, "change": 0, "reward": None, "failure": None,
            "reason": None, "exit_code": None, "timed_out": False, "turns": 0, "sampled_tokens": 0,
            "min_version": None, "max_version": None, "held_s": 0.0, "forks": {}, "created": time.time(),
            "started": None, "finished": None, "sampling": None, "controller": None,
        }  # fmt: skip
        self._touch(self.rollouts[rollout_id])

    def set(self, rollout_id: str, **fields: Any) -> None:
        self.rollouts[rollout_id].update(fields)
        self._touch(self.rollouts[rollout_id])

    async def ended(self, *rollout_ids: str, limit_s: float = 300.0) -> list[Json]:
        """Wait until these rollouts, or all, are final."""
        ids = rollout_ids or tuple(self.rollouts)

        def done() -> bool:
            return all(self.rollouts[i]["state"] in TERMINAL for i in ids)

        async with asyncio.timeout(limit_s), self._changed:
            await self._changed.wait_for(done)
        return [self.rollouts[i] for i in ids]

    async def reached(self, rollout_id: str, state: str, limit_s: float = 300.0) -> Json:
        async with asyncio.timeout(limit_s), self._changed:
            await self._changed.wait_for(lambda: self.rollouts[rollout_id]["state"] == state)
        return self.rollouts[rollout_id]

    def _touch(self, rollout: Json) -> None:
        self._change += 1
        rollout["change"] = self._change

        async def notify() -> None:
            async with self._changed:
                self._changed.notify_all()

        self._last = asyncio.ensure_future(notify())

    def _claims(self, request: web.Request) -> Claims:
        return verify(self.secret, request.headers["authorization"].removeprefix("Bearer "), time.time())

    def _newer(self, after: int, states: list[str], limit: int) -> list[Json]:
        found = [r for r in self.rollouts.values() if r["change"] > after and r["state"] in states]
        return sorted(found, key=lambda r: r["change"])[:limit]

    async def _list(self, request: web.Request) -> web.Response:
        assert self._claims(request).scope is Scope.CONTROL
        query = request.query
        args = (int(query["after"]), query["states"].split(","), int(query["limit"]))
        if not self._newer(*args):
            try:
                async with asyncio.timeout(float(query["wait_s"])), self._changed:
                    await self._changed.wait_for(lambda: self._newer(*args))
            except TimeoutError:
                pass
        rows = self._newer(*args)
        return web.json_response({"rollouts": rows, "cursor": rows[-1]["change"] if rows else args[0]})

    async def _controllers(self, _request: web.Request) -> web.Response:
        return web.json_response({"run": "fake", "controllers": []})

    async def _get(self, request: web.Request) -> web.Response:
        rollout = self.rollouts.get(request.match_info["id"])
        return web.json_response(rollout) if rollout else _error(404, "no such rollout")

    async def _hit(self, request: web.Request) -> web.Response:
        """A stand-in for a model call."""
        claims = self._claims(request)
        self.rollouts[claims.rollout_id]["turns"] += 1
        return web.Response(text="ok")

    async def _verb(self, request: web.Request) -> web.Response:
        assert self._claims(request).scope is Scope.CONTROL
        rollout, verb, body = self.rollouts[request.match_info["id"]], request.match_info["verb"], await request.json()
        self.calls.append((verb, rollout["rollout_id"]))
        if verb == "claim":
            return self._claim(rollout, body["controller"])
        if verb != "cancel" and body["attempt"] != rollout["attempt"]:
            return _error(409, "another attempt")
        answer: Json = getattr(self, f"_do_{verb.replace('-', '_')}")(rollout, body)
        if not answer:
            return _error(409, f"rollout is {rollout['state']}")
        self._touch(rollout)
        return web.json_response(answer)

    def _claim(self, rollout: Json, controller: str) -> web.Response:
        if rollout["state"] != "queued":
            return _error(409, f"rollout is {rollout['state']}")
        rollout.update(state="running", attempt=rollout["attempt"] + 1, controller=controller, reward=None, turns=0)
        self._touch(rollout)
        keys = {"agent_key": self._key(Scope.AGENT, rollout), "workspace_key": self._key(Scope.WORKSPACE, rollout)}
        return web.json_response({"rollout": rollout, **keys})

    def _do_exit(self, rollout: Json, body: Json) -> Json:
        if rollout["state"] not in ("running", "grading"):
            return {}
        if rollout["state"] == "running":
            rollout.update(state="grading", exit_code=body["exit_code"], timed_out=body["timed_out"])
            rollout["reason"] = body["reason"]
        return {"rollout": rollout, "grader_key": self._key(Scope.GRADER, rollout)}

    def _do_finish(self, rollout: Json, body: Json) -> Json:
        if rollout["state"] != "grading":
            return {}
        if rollout["reward"] is None:
            return self._do_infrastructure(rollout, {"reason": "no reward"})
        clean = rollout["exit_code"] == 0 and not rollout["timed_out"]
        rollout.update(state="succeeded" if clean else "failed", failure=None if clean else "agent")
        return rollout

    def _do_infrastructure(self, rollout: Json, body: Json) -> Json:
        if rollout["state"] not in ("running", "grading"):
            return {}
        again = rollout["attempt"] < self.max_attempts and not body.get("final")
        rollout.update(state="queued" if again else "failed", reason=body["reason"])
        rollout["failure"] = None if again else "infrastructure"
        return rollout

    def _do_give_back(self, rollout: Json, body: Json) -> Json:
        if rollout["state"] not in ("running", "grading"):
            return {}
        rollout.update(state="queued", reason=body["reason"])
        return rollout

    def _do_cancel(self, rollout: Json, body: Json) -> Json:
        rollout.update(state="cancelled", reason=body["reason"])
        return rollout

    async def _reward(self, request: web.Request) -> web.Response:
        claims, value = self._claims(request), (await request.json())["value"]
        rollout = self.rollouts[claims.rollout_id]
        if not isinstance(value, int | float) or not math.isfinite(value):
            return _error(422, "not a finite number")
        if rollout["attempt"] != claims.attempt or rollout["state"] != "grading" or rollout["reward"] is not None:
            return _error(409, "not now")
        self.set(claims.rollout_id, reward=float(value))
        return web.json_response({})

    def _key(self, scope: Scope, rollout: Json) -> str:
        return mint(self.secret, Claims(scope, rollout["rollout_id"], rollout["attempt"], time.time() + 3600))


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=status)
