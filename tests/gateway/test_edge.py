"""What reaches the gateway before it knows who calls, and what a key may still do at the end of an attempt."""

from __future__ import annotations

import asyncio
import gzip
import json
import stat
import zlib
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import zstandard

from leyden.client.announcement import announce
from leyden.doctor.cluster import agent_key, judge_reach
from leyden.doctor.findings import Level
from leyden.doctor.probe import ask
from leyden.doctor.probing import Probed
from leyden.gateway.bounded_http import HEAD_BYTES, BoundedHttp
from leyden.gateway.render import ModelRenderer
from tests.gateway.conftest import SECRET, Gateway, make_config, serving
from tests.gateway.test_workspaces import get, put

CHAT = "/v1/chat/completions"
BODY = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
HEAD = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer "


async def connect(gateway: Gateway) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))


async def call(gateway: Gateway, method: str, path: str, data: Any = None, **headers: str) -> tuple[int, Any]:
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.request(method, gateway.url + path, data=data) as response,
    ):
        return response.status, await response.json(content_type=None)


# Heads and bodies of strangers


@pytest.mark.parametrize("line", [b"x-more: aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\r\n", b"a" * 50])
async def test_an_endless_head_is_refused_and_closed(gateway: Gateway, line: bytes) -> None:
    reader, writer = await connect(gateway)
    writer.write(b"GET /health HTTP/1.1\r\nx-first: ")
    for _ in range(HEAD_BYTES // len(line) + 1):
        writer.write(line)
        await writer.drain()
    assert (await reader.read()).startswith(b"HTTP/1.1 431 ")


async def test_a_head_that_does_not_come_is_closed(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BoundedHttp, "look_s", 0.02)
    monkeypatch.setattr(BoundedHttp, "head_s", 0.05)
    (silent, _), (half, writer) = await connect(gateway), await connect(gateway)
    writer.write(b"GET /health HTTP/1.1\r\nx: ")
    assert await silent.read() == b""
    assert (await half.read()).startswith(b"HTTP/1.1 408 ")


async def test_a_connection_may_be_silent_after_an_answer(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BoundedHttp, "look_s", 0.01)
    monkeypatch.setattr(BoundedHttp, "head_s", 0.02)
    monkeypatch.setattr(BoundedHttp, "body_s", 0.02)
    reader, writer = await connect(gateway)
    for _ in range(2):
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await reader.readuntil(b'{"status":"ok"}')).startswith(b"HTTP/1.1 200")
        await asyncio.sleep(0.1)


async def test_a_body_that_does_not_come_is_closed(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BoundedHttp, "look_s", 0.02)
    monkeypatch.setattr(BoundedHttp, "body_s", 0.1)
    _, key = await gateway.start_rollout()
    reader, writer = await connect(gateway)
    writer.write(f"{HEAD}{key}\r\ncontent-length: 100\r\n\r\n{{".encode())
    assert await reader.read() == b""


async def test_a_stranger_is_refused_before_its_body_and_cannot_go_on_with_it(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BoundedHttp, "look_s", 0.02)
    monkeypatch.setattr(BoundedHttp, "body_s", 0.1)
    reader, writer = await connect(gateway)
    writer.write(f"{HEAD}none\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n".encode())
    assert (await reader.readline()).startswith(b"HTTP/1.1 401")
    while not reader.at_eof():
        writer.write(b"1\r\nx\r\n")
        await reader.read(1000)


# Compressed bodies


COMPRESSED = {
    "gzip": gzip.compress,
    "x-gzip": gzip.compress,
    "deflate": zlib.compress,
    "zstd": zstandard.ZstdCompressor().compress,
}


@pytest.mark.parametrize("encoding", COMPRESSED)
async def test_compressed_bodies_are_read_within_the_limit(
    encoding: str, tmp_path: Path, tokenizer_path: Path, renderer: ModelRenderer
) -> None:
    compress = COMPRESSED[encoding]
    config = make_config(tmp_path, tokenizer_path, gateway={"max_body_bytes": 100_000})
    async with serving(config, renderer) as gateway:
        _, key = await gateway.start_rollout()
        headers = {"authorization": f"Bearer {key}", "content-encoding": encoding}
        raw = json.dumps(BODY).encode()
        assert (await call(gateway, "POST", CHAT, compress(raw), **headers))[0] == 200
        event = json.dumps({"kind": "note", "data": {"a": 1}}).encode()
        assert (await call(gateway, "POST", "/api/events", compress(event), **headers))[0] == 200
        bomb = compress(b" " * 50_000_000 + raw)
        assert len(bomb) < 100_000
        status, answer = await call(gateway, "POST", CHAT, bomb, **headers)
        assert (status, answer["error"]["code"]) == (413, "request_too_large")
        assert "100000 bytes without its" in answer["error"]["message"]
        for broken in (compress(raw)[:-9], b"no such thing", b""):
            status, answer = await call(gateway, "POST", CHAT, broken, **headers)
            assert status == 400


async def test_deflate_without_its_head_is_read_too(gateway: Gateway) -> None:
    _, key = await gateway.start_rollout()
    bare = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    data = bare.compress(json.dumps(BODY).encode()) + bare.flush()
    headers = {"authorization": f"Bearer {key}", "content-encoding": "deflate"}
    assert (await call(gateway, "POST", CHAT, data, **headers))[0] == 200


# Keys


async def test_a_key_in_the_query_is_read_as_geminis_rest_calls_send_it(
    gateway: Gateway, caplog: pytest.LogCaptureFixture
) -> None:
    rollout_id, key = await gateway.start_rollout()
    body = json.dumps({"contents": [{"role": "user", "parts": [{"text": "x"}]}]})
    path = f"/v1beta/models/m:generateContent?key={key}"
    assert (await call(gateway, "POST", path, body))[0] == 200
    assert (await call(gateway, "GET", f"/v1beta/models?key={key}"))[0] == 200
    status, answer = await call(gateway, "POST", path.replace("key=", "key=x"), body)
    assert (status, key in json.dumps(answer)) == (401, False)
    status, answer = await call(gateway, "POST", f"/v1beta/nothing?key={key}", body)
    assert (status, key in json.dumps(answer)) == (404, False)
    status, answer = await call(gateway, "POST", f"/v1beta/models/m:generateContent?key={key}", "{")
    assert (status, key in json.dumps(answer)) == (400, False)
    assert key not in caplog.text
    assert key not in await gateway.client.metrics()
    assert key.encode() not in (gateway.config.run_dir / "store.sqlite-wal").read_bytes()
    assert len(await gateway.turns(rollout_id)) == 1


async def test_control_routes_take_no_key_from_the_query(gateway: Gateway) -> None:
    _, key = await gateway.start_rollout()
    assert (await call(gateway, "POST", f"/api/events?key={key}", b'{"kind": "x"}'))[0] == 401


async def test_after_the_exit_an_agents_key_opens_nothing(gateway: Gateway) -> None:
    rollout_id, key = await gateway.start_rollout()
    headers = {"authorization": f"Bearer {key}"}
    contents = {"contents": [{"role": "user", "parts": [{"text": "x"}]}]}
    routes: list[tuple[str, str, Any]] = [
        ("GET", "/v1/models", None),
        ("GET", "/v1beta/models", None),
        ("GET", f"/rollouts/{rollout_id}/v1/models", None),
        ("POST", CHAT, BODY),
        ("POST", "/v1/completions", {"model": "m", "prompt": "x"}),
        ("POST", "/v1/responses", {"model": "m", "input": "x"}),
        ("POST", "/v1/messages", BODY | {"max_tokens": 9}),
        ("POST", "/v1/messages/count_tokens", BODY),
        ("POST", "/v1beta/models/m:generateContent", contents),
        ("POST", "/v1beta/models/m:countTokens", contents),
        ("POST", "/api/events", {"kind": "x"}),
    ]

    async def statuses() -> list[int]:
        sent = [(method, path, None if body is None else json.dumps(body)) for method, path, body in routes]
        return [(await call(gateway, method, path, data, **headers))[0] for method, path, data in sent]

    assert await statuses() == [200] * len(routes)
    await gateway.client.exit(rollout_id, 1, exit_code=0, timed_out=False, reason=None)
    assert await statuses() == [403] * len(routes)


async def test_a_graders_key_reads_the_workspace_until_there_is_a_reward(gateway: Gateway) -> None:
    (group,) = await gateway.client.create_groups([{"kind": "train", "step": 9, "slot": 0, "size": 1, "task": {}}])
    claim = await gateway.client.claim(group.rollouts[0].rollout_id, "c")
    rollout_id = claim.rollout.rollout_id
    assert await put(gateway, claim.workspace_key, b"left") == 200
    receipt = await gateway.client.exit(rollout_id, 1, exit_code=0, timed_out=False, reason=None)
    assert receipt.grader_key is not None
    assert await get(gateway, receipt.grader_key) == (200, b"left")
    await gateway.client.reward(rollout_id, 1, 1.0)
    assert (await get(gateway, receipt.grader_key))[0] == 409


async def test_a_hand_in_that_its_sender_gave_up_is_no_bug(gateway: Gateway, caplog: pytest.LogCaptureFixture) -> None:
    (group,) = await gateway.client.create_groups([{"kind": "train", "step": 9, "slot": 0, "size": 1, "task": {}}])
    claim = await gateway.client.claim(group.rollouts[0].rollout_id, "c")
    _, writer = await connect(gateway)
    head = f"PUT /api/workspace HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {claim.workspace_key}\r\n"
    writer.write(f"{head}content-length: 100\r\n\r\nhalf".encode())
    await writer.drain()
    folder = gateway.config.run_dir / "attempts" / claim.rollout.rollout_id / "1"
    while not (folder.exists() and any(folder.iterdir())):  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    writer.close()
    while any(folder.iterdir()):  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    await asyncio.sleep(0.05)
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


async def test_a_gateway_recognises_the_doctor_s_key(gateway: Gateway) -> None:
    """As a pod asks it: a key of this run is told from others, although nobody runs under it."""
    for secret, level in ((SECRET, Level.OK), (b"o" * 32, Level.PROBLEM)):
        answer = await asyncio.to_thread(ask, gateway.url, agent_key(secret))
        probed = Probed({}, result={"gateways": {gateway.url: answer}, "open": []})
        assert [f.level for f in judge_reach(probed, gateway.url, ours=True)] == [Level.OK, level]


# What an attempt may add


async def test_events_of_an_attempt_are_bounded(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    _, key = await gateway.start_rollout()
    headers = {"authorization": f"Bearer {key}"}
    large = json.dumps({"kind": "x", "data": {"a": "y" * 60_000}})
    statuses = [(await call(gateway, "POST", "/api/events", large, **headers))[0] for _ in range(20)]
    assert statuses == [200] * 17 + [400] * 3
    monkeypatch.setattr("leyden.store.turns.MOST_EVENTS", 3)
    _, key = await gateway.start_rollout()
    small = json.dumps({"kind": "x"})
    answers = [await call(gateway, "POST", "/api/events", small, authorization=f"Bearer {key}") for _ in range(4)]
    assert [status for status, _ in answers] == [200, 200, 200, 400]
    assert "has 3 events of 6 bytes; the limits are 3 and 1048576" in answers[3][1]["error"]["message"]


def test_where_the_gateway_listens_is_told_to_its_user_alone(tmp_path: Path) -> None:
    announce(tmp_path, "http://127.0.0.1:1")
    assert stat.S_IMODE((tmp_path / "gateway.json").stat().st_mode) == 0o600
