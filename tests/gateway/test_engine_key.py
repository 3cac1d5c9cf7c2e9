"""Engines behind a key: it goes with every request to them, and nowhere else."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from leyden.doctor.engines import check_engines
from leyden.errors import ConfigError
from leyden.gateway.engines import engine_key
from leyden.gateway.render import ModelRenderer
from tests.gateway.conftest import make_config, serving
from tests.gateway.fake_vllm import FakeVllm, Json, chatted, generated, listening, own
from tests.gateway.test_engines import config_for, one_call, refusal

KEY = "sk-very-private"
KINDS: dict[str, tuple[Json, Json]] = {
    "leyden": ({"kind": "leyden"}, own([300, 2])),
    "vllm": ({"kind": "vllm"}, generated([300, 2])),
    "vllm renders": ({"kind": "vllm", "render": "engine"}, chatted([9], [300, 2])),
}


@pytest.mark.parametrize("kind", KINDS)
async def test_the_key_goes_with_every_request(
    tmp_path: Path, tokenizer_path: Path, renderer: ModelRenderer, kind: str
) -> None:
    settings, good = KINDS[kind]
    async with listening(FakeVllm(default=good, key=KEY)) as fake:
        config = config_for(tmp_path, tokenizer_path, fake, engine=settings | {"api_key_env": "ENGINE_KEY"})
        async with serving(config, renderer, engine_key=KEY) as gateway:
            assert (await one_call(gateway)).sampled_T.tolist() == [300, 2]
        assert fake.keys == {f"Bearer {KEY}"}
        (finding,) = await check_engines(config, {"ENGINE_KEY": KEY})
        assert finding.level == "ok"
        assert fake.keys == {f"Bearer {KEY}"}


@pytest.mark.parametrize("kind", KINDS)
async def test_a_key_that_is_refused_is_told_without_the_key(
    tmp_path: Path, tokenizer_path: Path, renderer: ModelRenderer, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Although the engine repeats it."""
    caplog.set_level(logging.DEBUG)
    settings, _ = KINDS[kind]
    async with listening(FakeVllm(key="another")) as fake:
        config = config_for(tmp_path, tokenizer_path, fake, engine=settings | {"api_key_env": "ENGINE_KEY"})
        async with serving(config, renderer, engine_key=KEY) as gateway:
            status, message, reason = await refusal(gateway)
            told = repr([await gateway.client.models(), message, reason])
    assert status in (400, 401)
    assert "no such key: Bearer [key]" in told
    assert KEY not in told + caplog.text
    store = b"".join(file.read_bytes() for file in config.run_dir.iterdir() if file.is_file())
    assert KEY.encode() not in store


async def test_an_engine_without_a_key_gets_none(tmp_path: Path, tokenizer_path: Path, renderer: ModelRenderer) -> None:
    async with listening(FakeVllm()) as fake, serving(config_for(tmp_path, tokenizer_path, fake), renderer) as gateway:
        await one_call(gateway)
    assert fake.keys == {None}


@pytest.mark.parametrize("environment", [{}, {"ENGINE_KEY": ""}, {"ENGINE_KEY": "two words"}, {"ENGINE_KEY": "a\nb"}])
async def test_a_missing_key_is_named(tmp_path: Path, environment: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"engine\.api_key_env: .*ENGINE_KEY"):
        engine_key("ENGINE_KEY", environment)
    engine = {"kind": "vllm", "urls": ["http://127.0.0.1:1"], "api_key_env": "ENGINE_KEY"}
    (finding,) = await check_engines(make_config(tmp_path, tmp_path, engine=engine), environment)
    assert (finding.level, "ENGINE_KEY" in finding.what) == ("problem", True)


async def test_a_gateway_does_not_start_without_it(tmp_path: Path) -> None:
    run = tmp_path / "run.yaml"
    document: dict[str, Any] = {
        "run_dir": str(tmp_path / "run"),
        "model": {"path": "none"},
        "data": {"train": "train.jsonl"},
        "harness": {"command": ["true"]},
        "grader": {"command": ["true"]},
        "engine": {"kind": "vllm", "urls": ["http://127.0.0.1:1"], "api_key_env": "ENGINE_KEY"},
    }
    run.write_text(json.dumps(document))
    environment = {name: value for name, value in os.environ.items() if name != "ENGINE_KEY"}
    command = [sys.executable, "-m", "leyden", "gateway", str(run)]
    done = await asyncio.to_thread(subprocess.run, command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "the environment has no ENGINE_KEY" in done.stderr + done.stdout


def test_no_harness_is_given_it(tmp_path: Path) -> None:
    for section in ("harness", "grader"):
        with pytest.raises(ConfigError, match="pass_env names ENGINE_KEY"):
            make_config(
                tmp_path,
                tmp_path,
                engine={"api_key_env": "ENGINE_KEY"},
                **{section: {"command": ["true"], "pass_env": ["ENGINE_KEY"]}},
            )
