"""What a harness left on another machine: handed in with one key, read with another."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from leyden.client import control_key
from leyden.errors import NotFound, TooLarge
from leyden.gateway.render import ModelRenderer
from leyden.gateway.workspaces import Workspaces
from tests.gateway.conftest import SECRET, Gateway, make_config, serving


async def put(gateway: Gateway, key: str, body: bytes | AsyncIterator[bytes]) -> int:
    headers = {"authorization": f"Bearer {key}"}
    async with (
        aiohttp.ClientSession() as session,
        session.put(f"{gateway.url}/api/workspace", data=body, headers=headers) as response,
    ):
        return response.status


async def get(gateway: Gateway, key: str) -> tuple[int, bytes]:
    headers = {"authorization": f"Bearer {key}"}
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{gateway.url}/api/workspace", headers=headers) as response,
    ):
        return response.status, await response.read()


async def test_the_last_archive_of_a_running_attempt_reaches_its_grader(gateway: Gateway) -> None:
    (group,) = await gateway.client.create_groups([{"kind": "train", "step": 9, "slot": 0, "size": 1, "task": {}}])
    claim = await gateway.client.claim(group.rollouts[0].rollout_id, "c")
    rollout_id = claim.rollout.rollout_id
    assert await put(gateway, claim.workspace_key, b"first") == 200
    assert await put(gateway, claim.workspace_key, b"second") == 200
    assert await put(gateway, claim.agent_key, b"forged") == 403
    assert await put(gateway, control_key(SECRET), b"forged") == 403
    receipt = await gateway.client.exit(rollout_id, 1, exit_code=0, timed_out=False, reason=None)
    assert receipt.grader_key is not None
    assert await put(gateway, claim.workspace_key, b"too late") == 409
    assert await get(gateway, receipt.grader_key) == (200, b"second")
    assert (await get(gateway, claim.workspace_key))[0] == 403


@pytest.mark.parametrize(
    ("keep", "code", "kept"),
    [("all", 0, True), ("failed", 0, False), ("failed", 1, True), ("none", 0, False), ("none", 1, False)],
)
async def test_an_archive_stays_as_long_as_a_workspace(
    tmp_path: Path, tokenizer_path: Path, renderer: ModelRenderer, keep: str, code: int, kept: bool
) -> None:
    config = make_config(tmp_path, tokenizer_path, workspace={"keep": keep})
    async with serving(config, renderer) as gateway:
        (group,) = await gateway.client.create_groups([{"kind": "train", "step": 9, "slot": 0, "size": 1, "task": {}}])
        claim = await gateway.client.claim(group.rollouts[0].rollout_id, "c")
        rollout_id = claim.rollout.rollout_id
        assert await put(gateway, claim.workspace_key, b"archive") == 200
        await gateway.client.exit(rollout_id, 1, exit_code=code, timed_out=False, reason=None)
        path = Workspaces(config.run_dir, 100).find(rollout_id, 1)
        await gateway.client.reward(rollout_id, 1, 1.0)
        await gateway.client.finish(rollout_id, 1)
        assert path.exists() == kept


async def test_a_hand_in_that_is_complete_only_after_the_exit_is_too_late(gateway: Gateway) -> None:
    (group,) = await gateway.client.create_groups([{"kind": "train", "step": 9, "slot": 0, "size": 1, "task": {}}])
    claim = await gateway.client.claim(group.rollouts[0].rollout_id, "c")
    assert await put(gateway, claim.workspace_key, b"first") == 200
    graders_key = ""

    async def slow() -> AsyncIterator[bytes]:
        nonlocal graders_key
        yield b"se"
        receipt = await gateway.client.exit(claim.rollout.rollout_id, 1, exit_code=0, timed_out=False, reason=None)
        graders_key = str(receipt.grader_key)
        yield b"cond"

    assert await put(gateway, claim.workspace_key, slow()) == 409
    assert await get(gateway, graders_key) == (200, b"first")


async def test_an_archive_over_the_limit_leaves_the_earlier_one(tmp_path: Path) -> None:
    workspaces = Workspaces(tmp_path, limit=4)
    with pytest.raises(NotFound, match="has handed in no workspace"):
        workspaces.find("r", 1)
    assert await workspaces.put("r", 1, chunks(b"ke", b"pt")) == 4
    with pytest.raises(TooLarge, match=r"more than 4 bytes compressed \(gateway.max_workspace_bytes\)"):
        await workspaces.put("r", 1, chunks(b"1234", b"5"))
    kept = workspaces.find("r", 1)
    assert {path.name: path.read_bytes() for path in kept.parent.iterdir()} == {"workspace.tar.gz": b"kept"}


async def chunks(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part
