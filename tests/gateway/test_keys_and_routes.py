"""Every route with every scope, and what the control API says to bad input."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest
from starlette.routing import Route

from leyden.client import control_key, mint
from leyden.errors import ConfigError, GatewayError
from leyden.gateway import serving as gateway_serving
from leyden.gateway.control_routes import OPERATIONS
from leyden.protocols import COUNT_ROUTES, LIST_ROUTES, ROUTES
from leyden.types import Claims, Scope
from tests.gateway.conftest import SECRET, Gateway, make_config

OPEN = ("/health", "/", "/rollouts/{rollout_id}")
ALLOWED = {
    **{
        ("GET", prefix + path): {Scope.AGENT, Scope.CONTROL}
        for prefix in ("", "/rollouts/{rollout_id}")
        for path, _ in LIST_ROUTES
    },
    ("POST", "/api/reward"): {Scope.GRADER, Scope.CONTROL},
    ("POST", "/api/events"): {Scope.AGENT, Scope.CONTROL},
    ("PUT", "/api/workspace"): {Scope.WORKSPACE},
    ("GET", "/api/workspace"): {Scope.GRADER},
}


def keys_of(rollout_id: str) -> dict[Scope, str]:
    later = time.time() + 3600
    return {
        Scope.AGENT: mint(SECRET, Claims(Scope.AGENT, rollout_id, 1, later)),
        Scope.GRADER: mint(SECRET, Claims(Scope.GRADER, rollout_id, 1, later)),
        Scope.WORKSPACE: mint(SECRET, Claims(Scope.WORKSPACE, rollout_id, 1, later)),
        Scope.CONTROL: control_key(SECRET),
    }


async def status(gateway: Gateway, method: str, path: str, headers: dict[str, str], body: Any = None) -> int:
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, gateway.url + path, json={} if body is None else body, headers=headers) as response,
    ):
        return response.status


async def test_every_route_with_every_scope(gateway: Gateway) -> None:
    """A key of the right scope gets past the door (whatever it then hears about its empty body); others get 403."""
    rollout_id, _ = await gateway.start_rollout()
    served = [
        (m, r.path) for r in cast(list[Route], gateway.app.routes) for m in r.methods - {"HEAD"} if r.path not in OPEN
    ]
    assert len(served) == len(OPERATIONS) + 2 * (len(ROUTES) + len(COUNT_ROUTES) + len(LIST_ROUTES))
    for method, path in served:
        default = Scope.AGENT if "/v1" in path else Scope.CONTROL
        allowed = ALLOWED.get((method, path), {default})
        url = path.replace("{rollout_id}", rollout_id).replace("{name}", "policy")
        for scope, key in keys_of(rollout_id).items():
            got = await status(gateway, method, url, {"authorization": f"Bearer {key}"})
            assert (got == 403) == (scope not in allowed), (method, path, scope, got)
        assert await status(gateway, method, url, {}) == 401, (method, path)


@pytest.mark.parametrize("header", ["authorization", "x-api-key", "x-goog-api-key"])
async def test_three_headers_carry_the_key(gateway: Gateway, header: str) -> None:
    _, key = await gateway.start_rollout()
    value = f"Bearer {key}" if header == "authorization" else key
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    assert await status(gateway, "POST", "/v1/chat/completions", {header: value}, body) == 200


async def test_forged_expired_and_foreign_keys(gateway: Gateway) -> None:
    rollout_id, key = await gateway.start_rollout()
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}

    async def with_key(candidate: str, path: str = "/v1/chat/completions") -> int:
        return await status(gateway, "POST", path, {"authorization": f"Bearer {candidate}"}, body)

    assert await with_key(key[:-1] + ("A" if key[-1] != "A" else "B")) == 401
    assert await with_key(mint(b"x" * 32, Claims(Scope.AGENT, rollout_id, 1, time.time() + 60))) == 401
    assert await with_key(mint(SECRET, Claims(Scope.AGENT, rollout_id, 1, time.time() - 1))) == 401
    assert await with_key(mint(SECRET, Claims(Scope.AGENT, rollout_id, 2, time.time() + 60))) == 403
    assert await with_key(key, f"/rollouts/{rollout_id}/v1/chat/completions") == 200
    other, _ = await gateway.start_rollout()
    assert await with_key(key, f"/rollouts/{other}/v1/chat/completions") == 403
    for path, _ in LIST_ROUTES:
        agent = {"authorization": f"Bearer {key}"}
        assert await status(gateway, "GET", f"/rollouts/{rollout_id}{path}", agent) == 200
        assert await status(gateway, "GET", f"/rollouts/{other}{path}", agent) == 403


async def test_keys_end_with_their_phase(gateway: Gateway) -> None:
    rollout_id, key = await gateway.start_rollout()
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    agent = {"authorization": f"Bearer {key}"}
    assert await status(gateway, "POST", "/v1/chat/completions", agent, body) == 200
    receipt = await gateway.client.exit(rollout_id, 1, exit_code=0, timed_out=False, reason=None)
    assert await status(gateway, "POST", "/v1/chat/completions", agent, body) == 403
    grader = {"authorization": f"Bearer {receipt.grader_key}"}
    assert await status(gateway, "POST", "/api/reward", grader, {"value": 0.5}) == 200
    assert await status(gateway, "POST", "/api/reward", grader, {"value": 1.0}) == 409
    assert (await gateway.client.rollout(rollout_id)).reward == 0.5


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (True, 1.0),
        (False, 0.0),
        (2, 2.0),
        (-3.5, -3.5),
        ("0.5", None),
        (None, None),
        ([1], None),
        ({}, None),
        (1e12, 1e12),
        (1e200, None),
        (-1e200, None),
        (10**18, None),
        (5e-324, 5e-324),
    ],
)
async def test_reward_values(gateway: Gateway, value: Any, expected: float | None) -> None:
    rollout_id, _ = await gateway.start_rollout()
    receipt = await gateway.client.exit(rollout_id, 1, exit_code=0, timed_out=False, reason=None)
    headers = {"authorization": f"Bearer {receipt.grader_key}"}
    assert await status(gateway, "POST", "/api/reward", headers, {"value": value}) == (422 if expected is None else 200)
    assert (await gateway.client.rollout(rollout_id)).reward == expected


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("{}", "value is missing"),
        ('{"reward": 0.5}', "value is missing"),
        ('{"value": 0.5, "score": 1}', "score: 1 is refused"),
        ('{"value": "0.5"}', "value: '0.5' is refused: '0.5' (str) is not a finite number"),
        ('{"value": 1e200}', "value: 1e+200 is refused: 1e+200 is beyond the largest reward, 1e+12"),
        ('{"value": 1e400}', "the body is not JSON that can be read: number is infinity"),
        ("0.5", "the body is a number, not a JSON object"),
        ("", "value is missing"),
        ("reward=1", "the body is not JSON"),
    ],
)
async def test_a_refused_reward_shows_the_body_that_is_expected(gateway: Gateway, body: str, said: str) -> None:
    rollout_id, _ = await gateway.start_rollout()
    receipt = await gateway.client.exit(rollout_id, 1, exit_code=0, timed_out=False, reason=None)
    headers = {"authorization": f"Bearer {receipt.grader_key}"}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{gateway.url}/api/reward", data=body, headers=headers) as response,
    ):
        message = (await response.json())["error"]["message"]
        assert response.status in (400, 422)
    assert message.startswith(said) and 'send {"value": 0.5}: one finite number' in message


async def test_a_task_whose_integer_would_become_a_float_is_refused(gateway: Gateway) -> None:
    spec = b'{"groups": [{"kind": "train", "step": 1, "slot": 0, "size": 1, "task": {"n": 18446744073709551617}}]}'
    headers = {"authorization": f"Bearer {control_key(SECRET)}"}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{gateway.url}/api/groups", data=spec, headers=headers) as response,
    ):
        assert response.status == 422
        assert "18446744073709551617 has more than 64 bits; send it as text" in await response.text()


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999"])
async def test_rewards_that_are_no_numbers(gateway: Gateway, number: str) -> None:
    rollout_id, _ = await gateway.start_rollout()
    receipt = await gateway.client.exit(rollout_id, 1, exit_code=0, timed_out=False, reason=None)
    headers = {"authorization": f"Bearer {receipt.grader_key}", "content-type": "application/json"}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{gateway.url}/api/reward", data=f'{{"value": {number}}}', headers=headers) as response,
    ):
        assert response.status in (400, 422)
    assert (await gateway.client.rollout(rollout_id)).reward is None


async def test_conditional_updates_answer_409(gateway: Gateway) -> None:
    rollout_id, _ = await gateway.start_rollout()
    client = gateway.client
    with pytest.raises(GatewayError) as caught:
        await client.claim(rollout_id, "second")
    assert caught.value.status == 409
    await client.exit(rollout_id, 1, exit_code=0, timed_out=False, reason=None)
    again = await client.exit(rollout_id, 1, exit_code=0, timed_out=False, reason=None)
    assert again.rollout.state == "grading"
    assert again.grader_key
    await client.reward(rollout_id, 1, 1.0)
    done = await client.finish(rollout_id, 1)
    assert (done.state, done.reward, done.failure) == ("succeeded", 1.0, None)
    for late in (client.finish(rollout_id, 1), client.reward(rollout_id, 1, 0.0), client.cancel(rollout_id, "late")):
        with pytest.raises(GatewayError) as caught:
            await late
        assert caught.value.status == 409
    assert await client.rollout(rollout_id) == done


async def test_agent_failures_keep_their_reward_and_infrastructure_failures_never_have_one(gateway: Gateway) -> None:
    client = gateway.client
    crashed, _ = await gateway.start_rollout()
    await client.exit(crashed, 1, exit_code=3, timed_out=False, reason=None)
    await client.reward(crashed, 1, 0.25)
    done = await client.finish(crashed, 1)
    assert (done.state, done.failure, done.reason, done.reward) == ("failed", "agent", "exit code 3", 0.25)

    lost, _ = await gateway.start_rollout()
    for attempt in (1, 2):
        again = await client.infrastructure(lost, attempt, "evicted")
        assert (again.state, again.attempt) == ("queued", attempt)
        await client.claim(lost, "test")
    done = await client.infrastructure(lost, 3, "evicted")
    assert (done.state, done.failure, done.reason, done.reward) == ("failed", "infrastructure", "evicted", None)

    stopped, _ = await gateway.start_rollout()
    for attempt in range(1, 6):
        again = await client.give_back(stopped, attempt, "the controller was stopped")
        assert (again.state, again.attempt) == ("queued", attempt)
        await client.claim(stopped, "test")
    assert (await client.infrastructure(stopped, 6, "evicted")).state == "queued"

    ungraded, _ = await gateway.start_rollout()
    await client.exit(ungraded, 1, exit_code=0, timed_out=False, reason=None)
    again = await client.finish(ungraded, 1, "grader exit code 1")
    assert (again.state, again.reason) == ("queued", "no reward: grader exit code 1")


async def test_the_feed_wakes_at_a_change(gateway: Gateway) -> None:
    rows, cursor = await gateway.client.rollouts()
    assert rows == []
    rollout_id, _ = await gateway.start_rollout()
    rows, cursor = await gateway.client.rollouts(after=cursor, wait_s=30)
    assert [(r.rollout_id, r.state) for r in rows] == [(rollout_id, "running")]
    rows, same = await gateway.client.rollouts(after=cursor, wait_s=0.2)
    assert (rows, same) == ([], cursor)


async def test_recover_discards_the_future_and_reopens_the_rest(gateway: Gateway) -> None:
    client = gateway.client
    spec = {"kind": "train", "slot": 0, "size": 1, "task": {}}
    groups = await client.create_groups([spec | {"step": 1}, spec | {"step": 2}, spec | {"step": 3}])
    for version, group in enumerate(groups[:2]):
        gateway.engine.version = version
        claim = await client.claim(group.rollouts[0].rollout_id, "test")
        headers = {"authorization": f"Bearer {claim.agent_key}"}
        body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
        assert await status(gateway, "POST", "/v1/chat/completions", headers, body) == 200
    await client.consume([groups[0].group_id])
    recovery = await client.recover(step=0, version=0)
    assert recovery.discarded == (groups[1].group_id, groups[2].group_id)
    assert recovery.reopened == (groups[0].group_id,)
    remade = await client.create_groups([spec | {"step": 1}, spec | {"step": 2}, spec | {"step": 3}])
    assert [g.group_id for g in remade] == ["train-00001-0000", "train-00002-0000-r1", "train-00003-0000-r1"]
    for gone in groups[1:]:
        assert (await client.rollout(gone.rollouts[0].rollout_id)).state == "cancelled"


async def test_groups_of_another_data_set_are_refused(gateway: Gateway) -> None:
    spec = {"kind": "train", "step": 1, "slot": 0, "size": 1, "task": {"a": 1}}
    await gateway.client.create_groups([spec])
    await gateway.client.create_groups([spec])
    with pytest.raises(GatewayError, match="another task"):
        await gateway.client.create_groups([spec | {"task": {"a": 2}}])


@pytest.mark.parametrize("field", ["template", "job_template", "command", "config", "kubernetes"])
async def test_no_template_comes_over_the_api(gateway: Gateway, field: str) -> None:
    """Templates are the run file's, a task is none. Groups are made with the control key alone."""
    attack = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    spec = {"kind": "train", "step": 99, "slot": 0, "size": 1, "task": {"text": attack}}
    _, agent = await gateway.start_rollout()
    control = {"authorization": f"Bearer {control_key(SECRET)}"}
    assert await status(gateway, "POST", "/api/groups", control, {"groups": [spec | {field: attack}]}) == 422
    assert await status(gateway, "POST", "/api/groups", {"authorization": f"Bearer {agent}"}, {"groups": [spec]}) == 403
    (group,) = await gateway.client.create_groups([spec])
    assert (await gateway.client.rollout(group.rollouts[0].rollout_id)).task == {"text": attack}


@pytest.mark.parametrize("host", ["0.0.0.0", "::", ""])
def test_an_open_address_needs_a_secret(tmp_path: Path, host: str) -> None:
    """Without one the gateway does not start; where no address is given, only this machine reaches it."""
    config = make_config(tmp_path, tmp_path, gateway={"host": host})
    with pytest.raises(ConfigError, match="LEYDEN_SECRET"):
        gateway_serving.serve(config)
    assert make_config(tmp_path, tmp_path).gateway.host == "127.0.0.1"
