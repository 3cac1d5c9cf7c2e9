"""Run files that `leyden doctor` examines."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from leyden.gateway.render import ModelRenderer

AGENT = """
import json, os, sys, time, urllib.request

def ask(url, key):
    body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "hi"}]}).encode()
    headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
    request = urllib.request.Request(url + "/chat/completions", data=body, headers=headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    answer = json.load(opener.open(request))
    open("answer.txt", "w").write(answer["choices"][0]["message"]["content"])

url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
mode = sys.argv[1]
if mode == "silent":
    print("I was told nothing of a model")
    raise SystemExit(3)
if mode == "hangs":
    ask(url, key)
    time.sleep(600)
ask(url + "/v1" if mode == "doubled" else url, "sk-mine" if mode == "own-key" else key)
"""
GRADE = """
import sys

def good(task, workspace):
    return 0.5 if (workspace / "answer.txt").read_text() == "There is nothing to do." else 0.0

def nan(task, workspace):
    return float("nan")

def nothing(task, workspace):
    print("no idea")

def broken(task, workspace):
    raise KeyError("score")
"""


@pytest.fixture(scope="session")
def renderer(tokenizer_path: Path) -> ModelRenderer:
    return ModelRenderer(str(tokenizer_path), "qwen3", "template")


@pytest.fixture
def make(tmp_path: Path, tokenizer_path: Path) -> Callable[..., Path]:
    """Writes a run file whose agent behaves as told."""

    def write(mode: str = "good", **sections: Any) -> Path:
        (tmp_path / "agent.py").write_text(AGENT)
        (tmp_path / "grade.py").write_text(GRADE)
        (tmp_path / "train.jsonl").write_text('{"n": 1, "files": {"a.txt": "a"}}\n{"n": 2}\n')
        document: dict[str, Any] = {
            "run_dir": "run",
            "model": {"path": str(tokenizer_path), "renderer": "qwen3", "context_tokens": 2000},
            "data": {"train": "train.jsonl"},
            "workspace": {"files": "files"},
            "harness": {"command": [sys.executable, "{{ config_dir }}/agent.py", mode], "timeout_s": 1000},
            "grader": {"function": "grade:good"},
        }
        for name, section in sections.items():
            document[name] = section if name == "grader" else document.get(name, {}) | section
        path = tmp_path / "run.yaml"
        path.write_text(yaml.safe_dump(document))
        return path

    return write
