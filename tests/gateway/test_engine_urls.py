"""Engines that run already, without a trainer: `leyden eval` and `leyden gateway` as processes."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest
import yaml

from tests.gateway.fake_vllm import FakeVllm, Json, chatted, listening
from tests.trainer.test_end_to_end import AGENT

GRADER = """
def score(task, workspace):
    return float("hello" in (workspace / "answer.txt").read_text())
"""


async def leyden(folder: Path, *arguments: str) -> tuple[int | None, str]:
    """Exit status and both outputs of a command."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "leyden", *arguments),
        cwd=folder,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await asyncio.wait_for(process.communicate(), 500)
    return process.returncode, output.decode()


def write_run(folder: Path, fake: FakeVllm, **engine: object) -> None:
    """Nothing of the model is there but its name."""
    (folder / "agent.py").write_text(AGENT)
    (folder / "grade.py").write_text(GRADER)
    (folder / "val.jsonl").write_text('{"question": "the dog"}\n{"question": "the fox"}\n')
    settings: Json = {
        "run_dir": "run",
        "model": {"path": "/nowhere/model", "context_tokens": 256},
        "data": {"train": "val.jsonl", "validation": "val.jsonl"},
        "harness": {"command": [sys.executable, str(folder / "agent.py"), str(folder)], "timeout_s": 1000},
        "grader": {"function": "grade:score"},
        "engine": {"kind": "vllm", "urls": [fake.url], "render": "engine"} | engine,
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(settings))


@pytest.mark.slow
async def test_eval_of_engines_that_run(tmp_path: Path) -> None:
    """Gateway and controller start, no model is loaded, and the engine's answers are graded."""
    async with listening(FakeVllm(default=chatted([1, 2], [3, 4]))) as fake:
        write_run(tmp_path, fake)
        status, output = await leyden(tmp_path, "eval", "run.yaml", "-k", "1")
    assert (status, f"evaluating {fake.url} on 2 tasks x 1" in output) == (0, True)
    (result,) = (tmp_path / "run" / "eval").glob("*-engines/result.json")
    document = json.loads(result.read_text())
    assert (document["checkpoint"], document["version"], document["rewarded"]) == (None, 0, 2)
    assert [estimate["value"] for estimate in document["pass"]] == [1.0]
    assert len(fake.asked) == 4


@pytest.mark.slow
async def test_evaluations_at_one_gateway_do_not_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway that runs already: the second evaluation has rollouts of its own, the third other tasks."""
    monkeypatch.setenv("LEYDEN_SECRET", "s" * 40)
    async with listening(FakeVllm(default=chatted([1, 2], [3, 4]))) as fake:
        write_run(tmp_path, fake)
        gateway = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "leyden", "gateway", "run.yaml", "--with-parent"),
            cwd=tmp_path,
            stdin=asyncio.subprocess.PIPE,
        )
        found = tmp_path / "run" / "gateway.json"
        async with asyncio.timeout(500):
            while not found.exists():  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        url = json.loads(found.read_text())["url"]
        for number, limit in enumerate(("2", "2", "1"), 1):
            status, output = await leyden(
                *(tmp_path, "eval", "run.yaml", "--limit", limit, f"gateway.url={url}", f"run_dir=eval{number}")
            )
            assert status == 0, output
            assert len(fake.asked) == (4, 8, 10)[number - 1]
        assert gateway.stdin is not None
        gateway.stdin.close()
        assert await asyncio.wait_for(gateway.wait(), 500) == 0


@pytest.mark.slow
async def test_a_gateway_without_a_usable_engine_ends(tmp_path: Path) -> None:
    """It names the option and stops, so that no step starts without ids; and so does what it serves."""
    missing = {"/inference/v1/generate", "/v1/completions", "/v1/chat/completions"}
    async with listening(FakeVllm(missing=missing)) as fake:
        write_run(tmp_path, fake)
        status, output = await leyden(tmp_path, "gateway", "run.yaml")
        assert (status, output.splitlines()[-1].startswith("error: engine http")) == (1, True), output
        assert "return_token_ids" in output.splitlines()[-1]
        status, output = await leyden(tmp_path, "eval", "run.yaml")
    assert (status, "the gateway ended" in output, "return_token_ids" in output) == (1, True, True), output
