"""Every block of README and docs, as it is printed: files load, commands parse, what can run here runs.

`pytest -rA tests/docs` lists the blocks that are only checked, each with what it needs to run.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import click
import pytest
import typer.main
import yaml

from leyden import run_file
from leyden.cli.commands import app
from leyden.config import RunConfig
from tests.docs.blocks import PAGES, REPOSITORY, Block, commands, page_blocks, without_blocks

BLOCKS = [block for page in PAGES for block in page_blocks(page)]
LANGUAGES = {"bash", "json", "python", "text", "ts", "yaml"}
GETTING_STARTED = "docs/getting-started.md"
# A run file for pages that show sections of one.
REST: dict[str, Any] = {
    "run_dir": "run",
    "model": {"path": "model"},
    "data": {"train": "tasks.jsonl"},
    "harness": {"command": ["agent"]},
    "grader": {"function": "grade:grade"},
    "gateway": {"host": "10.1.2.3"},
    "kubernetes": {"image": "agent:1", "keeper_image": "leyden:1"},
}


def of(language: str) -> Any:
    return pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == language], ids=str)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(REPOSITORY).as_posix())
def test_code_stands_between_fences_that_name_its_language(page: Path) -> None:
    assert {block.language for block in page_blocks(page)} <= LANGUAGES
    assert re.findall(r"\n\n {4,}\S.*", without_blocks(page)) == []


@of("yaml")
def test_a_run_file_or_a_part_of_one_is_accepted(block: Block) -> None:
    document = yaml.safe_load(block.text)
    if block.needs:
        print(f"{block}: not run: needs {block.needs}")
        return
    config = run_file.parse(document if "run_dir" in document else merged(REST, document))
    assert isinstance(config, RunConfig)


def merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """A grader of another kind replaces the one below; other sections are merged."""
    together = {
        name: below.get(name, {}) | section if name != "grader" and isinstance(section, dict) else section
        for name, section in above.items()
    }
    return below | together


@of("json")
def test_json_is_json(block: Block) -> None:
    for text in block.text.splitlines() if block.file.endswith(".jsonl") else [block.text]:
        json.loads(text)


@of("ts")
def test_a_program_in_another_language_is_one_that_the_harnesses_tests_run(block: Block) -> None:
    assert block.text in {path.read_text() for path in (REPOSITORY / "tests" / "harnesses" / "agents").iterdir()}


@of("python")
def test_python_compiles(block: Block) -> None:
    compile(block.text, str(block), "exec")


@of("bash")
def test_commands_are_known_and_name_what_is_there(block: Block, tmp_path: Path) -> None:
    rest = tmp_path / "run.yaml"
    rest.write_text(yaml.safe_dump(REST))
    subprocess.run(["bash", "-n"], input=block.text, text=True, check=True)
    found = list(commands(block.text))
    assert found
    for words in found:
        check(words, block, rest)
    if block.needs:
        print(f"{block}: not run: needs {block.needs}")


def check(words: list[str], block: Block, rest: Path) -> None:
    """One command: a `leyden` one as the command line itself reads it, others by what they name."""
    program, *arguments = words
    if program == "leyden":
        check_leyden(arguments, block, rest)
    elif program == "make":
        for target in arguments:
            subprocess.run(["make", "-n", target], cwd=REPOSITORY, check=True, capture_output=True)
    elif program == "pip":
        for extra in re.findall(r"\[(\w+(?:,\w+)*)\]", " ".join(arguments)):
            assert set(extra.split(",")) <= set(project()["optional-dependencies"])
        assert f"leyden-{project()['version']}" in " ".join(arguments) or "leyden-" not in " ".join(arguments)
    else:
        assert program in PROGRAMS, f"{block}: {program}"
    for name in arguments:
        if re.match(r"(\./)?(deploy|examples|docs|tests)/", name) and program != "leyden":
            assert (REPOSITORY / name).exists(), f"{block}: {name}"


PROGRAMS = frozenset(
    {
        *(
            ".",
            "./build",
            "./down",
            "./image",
            "./up",
            "curl",
            "docker",
            "eval",
            "export",
            "kubectl",
            "mini",
            "printf",
            "source",
        ),
        *("python", "python3", "tensorboard", "vllm", "base64"),
    }
)


def project() -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    return table


def check_leyden(arguments: list[str], block: Block, rest: Path) -> None:
    """Options and overrides are read, the run file loaded, `rest` for one that a reader writes; nothing is started."""
    group = typer.main.get_group(app)
    context = click.Context(group, info_name="leyden")
    found = group.get_command(context, arguments[0])
    if found is None:
        assert arguments == ["--version"], f"{block}: {arguments}"
        return
    given = found.make_context(arguments[0], arguments[1:], parent=context).params
    if "run_file" in given:
        shown = REPOSITORY / given["run_file"]
        run_file.load(shown if shown.exists() else rest, list(given["overrides"] or ()))


# What runs


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """As in a shell whose environment is active."""
    home = tmp_path / "home"
    home.mkdir()
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "HOME": str(home), "HF_HUB_OFFLINE": "1"}


def write_files(page: str, folder: Path) -> None:
    """What the page shows as files, under the names that it gives them."""
    for block in BLOCKS:
        if block.page == page and block.file:
            path = folder / block.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)


def shell(text: str, folder: Path, environment: dict[str, str]) -> str:
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_readme_starts_a_rollout_of_the_real_mini(
    tmp_path: Path, tokenizer_path: Path, environment: dict[str, str]
) -> None:
    """All as printed but the model, of which a tokenizer is enough: `doctor` plays a rollout."""
    write_files("README.md", tmp_path)
    (tmp_path / "repos" / "one").mkdir(parents=True)
    (tmp_path / "repos" / "one" / "test_it.py").write_text("def test_it():\n    pass\n")
    for name in ("tasks.jsonl", "held_out.jsonl"):
        (tmp_path / name).write_text('{"prompt": "Say hi.", "repo": "one"}\n')
    model = shutil.copytree(tokenizer_path, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 40_960}))
    said = shell("leyden doctor run.yaml model.path=model", tmp_path, environment)
    assert re.search(r"ok +harness +model calls: \d+ openai-chat; exit 0\n", said), said
    assert re.search(r"ok +grader +reward 1(\.0)? for what the harness left\n", said), said


@pytest.mark.slow
def test_getting_started_runs_as_printed(tmp_path: Path, environment: dict[str, str]) -> None:
    """Block after block in one folder, as a clone is."""
    shutil.copytree(REPOSITORY / "examples", tmp_path / "examples")
    write_files(GETTING_STARTED, tmp_path)
    said = []
    for block in page_blocks(REPOSITORY / GETTING_STARTED):
        if block.needs or block.file:
            continue
        if block.language == "bash":
            said.append(shell(block.text, tmp_path, environment))
        elif block.language == "python":
            command = [sys.executable, "-c", block.text]
            done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
            said.append(done.stdout)
    first, used, mine = said
    assert "problem" not in first + mine
    assert (tmp_path / "runs/first/checkpoints/step-000002").is_dir() and int(used) > 100_000
    for name in (
        "metrics.jsonl",
        "tensorboard",
        "summary.json",
        "learning_curve.png",
        "attempts",
        "logs",
        "store.sqlite",
    ):
        assert (tmp_path / "runs" / "first" / name).exists(), name
    assert json.loads((tmp_path / "runs/mine/summary.json").read_text())["counts"]["rollouts"] == 16
