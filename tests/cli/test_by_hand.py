"""`leyden rollout`: a person runs the agent; everything else runs as in training."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import anthropic
import pytest
import yaml

from leyden.cli.by_hand import Choice, shell
from leyden.errors import ConfigError
from leyden.run_file import load
from tests.gateway.fake_vllm import FakeVllm, listening

GRADE = """
def grade(task, workspace):
    return task["worth"] if (workspace / "answer.txt").read_text() == "by hand" else 0.0
"""


@pytest.fixture
def run_file(tmp_path: Path, tokenizer_path: Path) -> Path:
    (tmp_path / "grade.py").write_text(GRADE)
    (tmp_path / "train.jsonl").write_text('{"worth": 0.25}\n{"worth": 0.5}\n')
    document = {
        "run_dir": "run",
        "model": {"path": str(tokenizer_path), "renderer": "qwen3", "context_tokens": 512},
        "data": {"train": "train.jsonl"},
        "harness": {"command": ["no-such-agent"], "env": {"TOPIC": "it's {{ task.worth }}"}, "timeout_s": 1},
        "grader": {"function": "grade:grade"},
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def ask(env: dict[str, str]) -> None:
    """What a person does: curl in one protocol, an SDK in another, and a file left in the workspace."""
    body = json.dumps({"model": "any", "messages": [{"role": "user", "content": "hi"}]})
    bearer = f"authorization: Bearer {env['OPENAI_API_KEY']}"
    url = f"{env['OPENAI_BASE_URL']}/chat/completions"
    words = ["curl", "-sf", "--noproxy", "*", url, "-H", bearer, "-H", "content-type: application/json", "-d", body]
    answer = json.loads(subprocess.run(words, check=True, capture_output=True).stdout)
    assert answer["choices"][0]["finish_reason"] == "stop"
    client = anthropic.Anthropic(base_url=env["ANTHROPIC_BASE_URL"], api_key=env["ANTHROPIC_API_KEY"])
    client.messages.create(model="any", max_tokens=64, messages=[{"role": "user", "content": "hello"}])
    assert env["TOPIC"] == "it's 0.5"
    Path(env["LEYDEN_WORKSPACE"], "answer.txt").write_text("by hand")


def sourced(path: str) -> dict[str, str]:
    """The environment of a shell that sources a file, which nobody else may read."""
    assert Path(path).stat().st_mode & 0o077 == Path(path).parent.stat().st_mode & 0o077 == 0
    words = ["bash", "-c", f"source {path}; env -0; pwd"]
    shown = subprocess.run(words, capture_output=True, check=True, env={"PATH": os.environ["PATH"]}).stdout.decode()
    *pairs, folder = shown.split("\0")
    env = dict(pair.split("=", 1) for pair in pairs)
    assert folder.strip() == env["LEYDEN_WORKSPACE"]
    return env


async def test_a_rollout_by_hand_against_any_engine(run_file, tmp_path):
    fake = FakeVllm()
    async with listening(fake):
        words = ["rollout", str(run_file), "--index", "1", f"engine={{kind: vllm, urls: ['{fake.url}']}}"]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "leyden", *words,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert process.stdin is not None and process.stdout is not None
        said = []
        while line := (await process.stdout.readline()).decode():
            said.append(line)
            if line.startswith("cd "):
                break
        (source,) = [line.split()[1] for line in said if line.startswith("source ")]
        env = await asyncio.to_thread(sourced, source)
        await asyncio.to_thread(ask, env)
        process.stdin.write(b"\n")
        rest = (await process.stdout.read()).decode()
        assert await process.wait() == 0, rest
    assert "succeeded, reward 0.5, exit 0" in rest
    assert "2 turns" in rest
    (made,) = (tmp_path / "run/rollouts").iterdir()
    assert (made / "store.sqlite").exists() and not Path(source).parent.exists()
    assert not (tmp_path / "run/store.sqlite").exists()


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (Choice("{", None, "train"), "--task: the text: not JSON"),
        (Choice("[]", None, "train"), "--task: the text: a task is a JSON object, not list"),
        (Choice("{}", 1, "train"), "--task: --index names a task too; give one of them"),
        (Choice(None, 2, "train"), "--index: 2 is past the last of 2 tasks of train, counted from 0"),
        (Choice(None, 0, "validation"), "--split: the run file has no data.validation"),
    ],
)
def test_tasks_that_are_none(run_file, choice, message):
    with pytest.raises(ConfigError) as caught:
        choice.of(load(run_file))
    assert str(caught.value).startswith(message)


def test_the_first_task_unless_told_otherwise(run_file):
    config = load(run_file)
    assert Choice(None, None, "train").of(config).tasks == ({"worth": 0.25},)
    assert Choice('{"a": 1}', None, "train").of(config).tasks == ({"a": 1},)


def test_what_an_agent_needs_without_what_it_has_already():
    environment = {
        "PATH": "/bin", "HOME": "/h", "OPENAI_BASE_URL": "u", "OPENAI_API_KEY": "a b", "MINE": "same", "X": "new",
        "LEYDEN_WORKSPACE": "/w",
    }  # fmt: skip
    assert shell(environment, {"MINE": "same", "X": "old"}) == [
        "# OpenAI SDK and what is built on it",
        "export OPENAI_BASE_URL=u",
        "export OPENAI_API_KEY='a b'",
        "# Anthropic SDK, Claude Code",
        "# Google SDK, Gemini CLI",
        "# this rollout",
        "export LEYDEN_WORKSPACE=/w",
        "export X=new",
        "cd /w",
    ]
