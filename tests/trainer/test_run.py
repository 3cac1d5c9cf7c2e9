from __future__ import annotations

import asyncio
import json
import sys
import urllib.request

import pytest

from leyden.config import RunConfig
from leyden.errors import GatewayError, TrainingError
from leyden.run_file import load
from leyden.trainer.run import _unless_a_child_ends
from leyden.trainer.run_json import write_run_json
from leyden.trainer.serving import serve
from leyden.trainer.supervise import Children
from leyden.trainer.tasks import read_data


@pytest.fixture
def config(tmp_path) -> RunConfig:
    (tmp_path / "train.jsonl").write_text('{"n": 1}\n')
    (tmp_path / "run").mkdir()
    document = {
        "run_dir": "run",
        "model": {"path": "m"},
        "data": {"train": "train.jsonl"},
        "harness": {"command": ["agent"]},
        "grader": {"function": "a:b"},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(document))
    return load(tmp_path / "run.yaml")


def changed(config: RunConfig, section: str, **values) -> RunConfig:
    return config.model_copy(update={section: getattr(config, section).model_copy(update=values)})


def test_run_json(config):
    data = read_data(config.data)
    write_run_json(config, data)
    document = json.loads((config.run_dir / "run.json").read_text())
    assert document["data"] == {"train": data.train.sha256, "validation": None}
    assert document["config"]["trainer"]["seed"] == 0
    write_run_json(changed(config, "optimizer", lr=0.5), data)
    assert json.loads((config.run_dir / "run.json").read_text())["config"]["optimizer"]["lr"] == 0.5


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        ("trainer", {"seed": 1}, r"another trainer\.seed: 0, now 1;"),
        ("trainer", {"groups_per_step": 4}, r"another trainer\.groups_per_step: 8, now 4;"),
        ("trainer", {"group_size": 4}, r"another trainer\.group_size: 8, now 4;"),
        ("data", {"shuffle": False}, r"another data\.shuffle: True, now False;"),
        ("model", {"path": "other"}, r"another model\.path: 'm', now 'other';"),
    ],
)
def test_a_resume_that_would_repeat_or_skip_tasks_is_refused(config, section, values, message):
    data = read_data(config.data)
    write_run_json(config, data)
    with pytest.raises(TrainingError, match=message):
        write_run_json(changed(config, section, **values), data)


def test_other_data_is_refused(config):
    write_run_json(config, read_data(config.data))
    config.data.train.write_text('{"n": 2}\n')
    with pytest.raises(TrainingError, match=r"another data\.train \(sha256\): '"):
        write_run_json(config, read_data(config.data))


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


async def test_the_result_of_the_work(tmp_path):
    async with Children(tmp_path) as children:
        await children.start("gateway", python("import sys; sys.stdin.read()"))
        assert await _unless_a_child_ends(asyncio.sleep(0, "result"), children) == "result"


async def test_a_dead_child_stops_the_work_at_once(tmp_path):
    cancelled = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async with Children(tmp_path) as children:
        await children.start("controller", python("raise SystemExit(4)"))
        with pytest.raises(TrainingError, match="the controller ended with exit status 4"):
            await _unless_a_child_ends(work(), children)
    assert cancelled.is_set()


async def test_a_dead_gateway_is_named_rather_than_the_call_that_failed(tmp_path, monkeypatch):
    """Also where it dies a moment later."""
    monkeypatch.setattr("leyden.trainer.run.DEATH_NOTICE_S", 60.0)

    async def work() -> None:
        raise GatewayError("connection lost")

    async with Children(tmp_path) as children:
        await children.start("gateway", python("import time; time.sleep(0.1); raise SystemExit(5)"))
        with pytest.raises(TrainingError, match="the gateway ended with exit status 5"):
            await _unless_a_child_ends(work(), children)


async def test_a_stop_is_waited_for(tmp_path):
    ended: list[str] = []
    started = asyncio.Event()

    async def work() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0.05)
            ended.append("written")
            raise

    async with Children(tmp_path) as children:
        task = asyncio.create_task(_unless_a_child_ends(work(), children))
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert ended == ["written"]


async def test_serving_an_app_on_loopback():
    async def app(scope, receive, send):
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"hello"})

    async with serve(app) as url:
        assert url.startswith("http://127.0.0.1:")
        body = await asyncio.to_thread(lambda: urllib.request.urlopen(url).read())
    assert body == b"hello"
    with pytest.raises(OSError):
        await asyncio.to_thread(lambda: urllib.request.urlopen(url).read())
