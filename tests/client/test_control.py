from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from leyden.client import ControlClient, Group, Rollout
from leyden.client.keys import parts
from leyden.client.proof import proof
from leyden.errors import GatewayError
from leyden.types import FailureClass, RolloutState

ROLLOUT = {
    "rollout_id": "r1", "group_id": "g1", "kind": "train", "step": 3, "slot": 1, "member": 0, "task": {"a": 1},
    "state": "failed", "attempt": 2, "change": 9, "reward": 0.5, "failure": "agent", "reason": "exit code 1",
    "exit_code": 1, "timed_out": False, "turns": 4, "sampled_tokens": 77, "min_version": 1, "max_version": 2,
    "held_s": 1.5, "forks": {"compaction": 1}, "created": 1.0, "started": 2.0, "finished": 3.0, "sampling": None,
    "controller": "c", "of_a_later_version": True,
}  # fmt: skip


class Server:
    """Answers from a list of (status, body) and notes what was asked."""

    def __init__(self, *answers: tuple[int, Any]) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[str, str, Any, str]] = []

    async def handle(self, request: web.Request) -> web.Response:
        if nonce := request.query.get("nonce"):
            return web.json_response({"proof": proof(parts("KEY")[1], nonce)})
        body = await request.json() if request.can_read_body else None
        self.asked.append((request.method, request.path_qs, body, request.headers["authorization"]))
        status, answer = self.answers.pop(0)
        if isinstance(answer, str):
            return web.Response(status=status, text=answer)
        return web.json_response(answer, status=status)


@asynccontextmanager
async def serving(server: Server, port: int = 0) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    try:
        yield f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[attr-defined]
    finally:
        await runner.cleanup()


async def asked(call: Any, *answers: tuple[int, Any]) -> tuple[Any, Server]:
    server = Server(*answers)
    async with serving(server) as url, ControlClient(url + "/", "KEY") as client:
        return await call(client), server


async def test_rollouts_become_records() -> None:
    (found, cursor), server = await asked(
        lambda c: c.rollouts(
            after=5, states=[RolloutState.QUEUED, RolloutState.FAILED], wait_s=2, limit=7, tasks=False
        ),
        (200, {"rollouts": [ROLLOUT], "cursor": 9}),
    )
    assert server.asked == [
        ("GET", "/api/rollouts?after=5&states=queued,failed&wait_s=2&limit=7&tasks=0", None, "Bearer KEY")
    ]
    assert cursor == 9 and found == [Rollout.from_json(ROLLOUT)]
    rollout = found[0]
    assert (rollout.state, rollout.failure, rollout.forks, rollout.task) == (
        RolloutState.FAILED, FailureClass.AGENT, {"compaction": 1}, {"a": 1},
    )  # fmt: skip


async def test_every_call_has_its_route() -> None:
    rollout, group = ROLLOUT, {"group_id": "g1", "kind": "train", "step": 3, "slot": 1, "size": 1, "state": "active"}
    calls: list[tuple[Any, Any, str, Any]] = [
        (lambda c: c.create_groups([{"kind": "train"}]), {"groups": [group | {"rollouts": [rollout]}]},
         "POST /api/groups", {"groups": [{"kind": "train"}]}),
        (lambda c: c.groups(kind="train", step=3), {"groups": [group]}, "GET /api/groups?kind=train&step=3", None),
        (lambda c: c.consume(["g1"]), {}, "POST /api/groups/consume", {"group_ids": ["g1"]}),
        (lambda c: c.rollout("r1"), rollout, "GET /api/rollouts/r1", None),
        (lambda c: c.claim("r1", "me"), {"rollout": rollout, "agent_key": "k", "workspace_key": "w"},
         "POST /api/rollouts/r1/claim", {"controller": "me"}),
        (lambda c: c.controllers(), {"controllers": [{"controller": "me", "seen": 1.0, "alive": True}]},
         "GET /api/controllers", None),
        (lambda c: c.take_over("r1", 2, "me"), rollout,
         "POST /api/rollouts/r1/take-over", {"attempt": 2, "controller": "me"}),
        (lambda c: c.exit("r1", 2, exit_code=1, timed_out=False, reason=None), {"rollout": rollout, "grader_key": None},
         "POST /api/rollouts/r1/exit", {"attempt": 2, "exit_code": 1, "timed_out": False, "reason": None}),
        (lambda c: c.finish("r1", 2), rollout, "POST /api/rollouts/r1/finish", {"attempt": 2, "reason": None}),
        (lambda c: c.infrastructure("r1", 2, "x"), rollout,
         "POST /api/rollouts/r1/infrastructure", {"attempt": 2, "reason": "x", "final": False}),
        (lambda c: c.cancel("r1", "x"), rollout, "POST /api/rollouts/r1/cancel", {"reason": "x"}),
        (lambda c: c.reward("r1", 2, 0.5), {}, "POST /api/reward", {"value": 0.5, "rollout_id": "r1", "attempt": 2}),
        (lambda c: c.events("r1"), {"events": [{"kind": "k"}]}, "GET /api/events?rollout_id=r1", None),
        (lambda c: c.put_model("m", engines=["u"], version=1, lineage="l", context_tokens=9), {},
         "PUT /api/models/m", {"engines": ["u"], "version": 1, "lineage": "l", "context_tokens": 9}),
        (lambda c: c.models(), {"models": []}, "GET /api/models", None),
        (lambda c: c.pause(), {}, "POST /api/pause", {}),
        (lambda c: c.resume(), {}, "POST /api/resume", {}),
        (lambda c: c.recover(step=1, version=2), {"discarded": ["g"], "reopened": []},
         "POST /api/recover", {"step": 1, "version": 2}),
        (lambda c: c.health(), {"ok": True}, "GET /health", None),
        (lambda c: c.metrics(), "a 1\n", "GET /metrics", None),
    ]  # fmt: skip
    results = {}
    for call, answer, route, body in calls:
        results[route], server = await asked(call, (200, answer))
        method, path, sent, _ = server.asked[0]
        assert (f"{method} {path}", sent) == (route, body)
    assert results["POST /api/groups"] == [Group(**group, rollouts=(Rollout.from_json(rollout),))]
    assert results["POST /api/rollouts/r1/claim"].agent_key == "k"
    assert "_key" not in repr(results["POST /api/rollouts/r1/claim"])
    assert results["GET /api/controllers"] == {"me": True}
    assert results["POST /api/rollouts/r1/infrastructure"] == Rollout.from_json(rollout)
    assert results["POST /api/recover"].discarded == ("g",)
    assert results["GET /metrics"] == "a 1\n"


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (
            409,
            {"error": {"message": "rollout r1 is running"}},
            "POST /api/rollouts/r1/claim: 409 rollout r1 is running",
        ),
        (422, {"error": "not a number"}, "422 not a number"),
        (502, "<html>bad</html>", "502 <html>bad</html>"),
    ],
)
async def test_refusals_carry_status_and_the_servers_words_and_are_not_repeated(
    status: int, body: Any, message: str
) -> None:
    server = Server((status, body), (200, {}))
    async with serving(server) as url, ControlClient(url, "KEY") as client:
        with pytest.raises(GatewayError, match=message) as caught:
            await client.claim("r1", "me")
    assert caught.value.status == status and len(server.asked) == 1
    assert "KEY" not in str(caught.value)


async def test_answer_that_is_not_json_is_an_error() -> None:
    with pytest.raises(GatewayError, match="GET /health: the answer: Invalid JSON"):
        await asked(lambda c: c.health(), (200, "<html>"))
    with pytest.raises(GatewayError, match="GET /health: the answer: Input should be an object"):
        await asked(lambda c: c.health(), (200, []))
    with pytest.raises(GatewayError, match="the answer of /api/turns is not readable"):
        await asked(lambda c: c.turns(["r1"]), (200, "<html>"))


async def test_refused_connection_is_tried_again_until_the_gateway_is_back() -> None:
    async with serving(Server()) as url:
        pass
    server = Server((200, {"ok": True}))
    async with ControlClient(url, "KEY", retry_limit_s=100) as client:
        call = asyncio.create_task(client.health())
        await asyncio.sleep(0.3)
        assert not call.done()
        async with serving(server, int(url.rsplit(":", 1)[1])):
            assert await call == {"ok": True}


async def test_refused_connection_gives_up_at_the_limit() -> None:
    async with serving(Server()) as url:
        pass
    async with ControlClient(url, "KEY", retry_limit_s=0.2) as client:
        with pytest.raises(GatewayError, match=f"no gateway at {url}") as caught:
            await client.health()
    assert caught.value.status is None


async def test_lost_connection_is_not_repeated() -> None:
    hits = []

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        if nonce := re.search(r"nonce=(\w+)", head):
            body = json.dumps({"proof": proof(parts("KEY")[1], nonce[1])})
            writer.write(f"HTTP/1.1 200 OK\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode())
        else:
            hits.append(head)
        writer.close()

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with ControlClient(url, "KEY") as client:
        with pytest.raises(GatewayError, match="POST /api/pause: connection lost") as caught:
            await client.pause()
    server.close()
    assert caught.value.status is None and len(hits) == 1


REWARD = """
import sys
from leyden.client import post_reward
post_reward(float(sys.argv[1]), retry_limit_s=0.2)
print(*{m.split(".")[0] for m in sys.modules} & {"aiohttp", "pyarrow", "numpy"})
"""


async def post(url: str, value: str) -> tuple[int, str]:
    env = {"LEYDEN_REWARD_URL": f"{url}/api/reward", "LEYDEN_KEY": "KEY"} if url else {}
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", REWARD, value], env=env, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


async def test_grader_posts_its_reward_with_the_standard_library_only() -> None:
    server = Server((200, {}), (409, {"error": {"message": "has reward already"}}))
    async with serving(server) as url:
        assert await post(url, "0.5") == (0, "\n")
        assert server.asked == [("POST", "/api/reward", {"value": 0.5}, "Bearer KEY")]
        code, text = await post(url, "0.5")
        assert code == 1 and "reward refused with status 409" in text and "has reward already" in text
        code, text = await post(url, "nan")
        assert code == 1 and "the reward nan is not a finite number" in text and len(server.asked) == 2
    code, text = await post(url, "1")
    assert code == 1 and "could not be posted to" in text and "KEY" not in text
    code, text = await post("", "1")
    assert code == 1 and "LEYDEN_REWARD_URL and LEYDEN_KEY are not set" in text


def test_public_names_are_there() -> None:
    import leyden.client

    assert all(getattr(leyden.client, name) for name in leyden.client.__all__)
    with pytest.raises(AttributeError):
        _ = leyden.client.nothing
    assert json.dumps(sorted(leyden.client.__all__)) == json.dumps(leyden.client.__all__)
