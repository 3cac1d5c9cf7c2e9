"""`leyden train`, `--dry-run` and `leyden doctor` refuse the same run files in the same words, before all else."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from pydantic import BaseModel

from leyden.cli.dry_run import describe
from leyden.config import RunConfig
from leyden.doctor.checkup import Checkup
from leyden.doctor.findings import Level
from leyden.doctor.preflight import before_rollouts, before_training, unheeded
from leyden.errors import ConfigError, LeydenError
from leyden.run_file import load


@pytest.fixture
def run_file(tmp_path: Path, tokenizer_path: Path) -> Path:
    (tmp_path / "grade.py").write_text("def grade(task, workspace):\n    return 1.0\n")
    (tmp_path / "train.jsonl").write_text('{"n": 1}\n')
    (tmp_path / "a file").write_text("")
    document = {
        "run_dir": "run",
        "model": {"path": str(tokenizer_path), "renderer": "qwen3", "context_tokens": 512},
        "data": {"train": "train.jsonl"},
        "harness": {"command": [sys.executable, "-c", "pass"]},
        "grader": {"function": "grade:grade"},
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


REFUSED = [
    ("harness.command=[no-such-agent]", "harness.command: there is no program 'no-such-agent' in "),
    ("harness.command=[/no/such/agent]", "harness.command: '/no/such/agent' is no program that can be run here"),
    ("harness.command=[/tmp]", "harness.command: '/tmp' is no program that can be run here"),
    ("harness.command=['{{ task.q }}']", "harness.command[0]: 'dict object' has no attribute 'q'"),
    ("harness.command=[sh, -c, 'echo {{ x']", "harness.command[2]: the template 'echo {{ x' cannot be rendered"),
    ("harness.command=[awk, '{% c']", "harness.command[1]: the template '{% c' cannot be rendered"),
    ("harness.command=[docker, ps, --format, '{{.ID}}']", "are meant as they stand write {{ '{{' }} or {{ '{%' }}"),
    ("harness.env.A='{{ nothing }}'", "harness.env.A: 'nothing' is undefined"),
    ("harness.python=/no/python", "harness.python: '/no/python' is not an executable"),
    ("harness.python=no-such-python", "harness.python: 'no-such-python' is not an executable"),
    ("harness.pass_env=[NOT_SET_ANYWHERE]", "harness.pass_env: NOT_SET_ANYWHERE is not set where Leyden was started"),
    ("grader.pass_env=[NOT_SET_ANYWHERE]", "grader.pass_env: NOT_SET_ANYWHERE is not set where Leyden was started"),
    ("grader={command: [no-such-grader]}", "grader.command: there is no program 'no-such-grader' in "),
    ("grader.function=nowhere:grade", "grader.function: there is no module 'nowhere' in "),
    ("data.train=none.jsonl", "data.train: cannot read "),
    ("data.validation=none.jsonl", "data.validation: cannot read "),
    ("run_dir=a file/run", "run_dir: "),
    ("run_dir=/proc/leyden/run", "run_dir: /proc/leyden/run cannot be made and written: /proc/leyden: "),
    ("model.path=./modle", "there is no such folder; give a Hugging Face model folder or a hub id"),
    ("model.path=a/b/c", "there is no such folder; give a Hugging Face model folder or a hub id"),
    ("model.path=a file", "model.path: 'a file': no such folder beside the run file, so taken as a hub id; its "),
    ("model.path=nosuch", "model.path: 'nosuch': no such folder beside the run file, so taken as a hub id; its "),
    ("model.path=.", "has no tokenizer.json; give a Hugging Face model folder"),
    ("model.template_kwargs={enable_thinkin: false}", "'enable_thinkin' is not known to the renderer 'qwen3'"),
    ("model.renderer=qwen33", "model.renderer: 'qwen33' is refused"),
    ("model.renderer=llama-3", "model.renderer: 'llama-3' does not fit "),
    ("model.context_tokens=1000000", "model.context_tokens: 1000000 is over the model's "),
    ("embedded.slots=100000000", "embedded: "),
    ("embedded.micro_batch_tokens=10000000000", "lower embedded.slots, model.context_tokens or "),
    ("gateway.host=0.0.0.0", "gateway.host: '0.0.0.0' can be reached from other machines; set LEYDEN_SECRET"),
    ("harness={command: ['true'], sandbox: bubblewrap, readable: [nowhere]}", "harness."),
]  # fmt: skip


async def doctor_says(config: RunConfig) -> list[str]:
    checkup = Checkup(config, None, dict(os.environ), 60, lambda _: None, lambda _: None)
    await checkup.run()
    return [f.what for f in checkup.findings if f.level is Level.PROBLEM]


@pytest.mark.parametrize(("override", "message"), REFUSED, ids=[o for o, _ in REFUSED])
async def test_what_one_refuses_all_refuse(run_file, tmp_path, override, message):
    config = load(run_file, [override])
    with pytest.raises(LeydenError) as trained:
        before_training(config, None, os.environ)
    with pytest.raises(LeydenError) as described:
        describe(config, None, os.environ)
    assert message in str(trained.value)
    assert str(described.value) == str(trained.value)
    assert not (tmp_path / "run").exists()
    words = " ".join(str(trained.value).split())
    assert any(words in " ".join(what.split()) for what in await doctor_says(config))


@pytest.mark.parametrize("arguments", [["train"], ["train", "--dry-run"], ["eval"]])
def test_the_commands_end_with_that_line(run_file, tmp_path, arguments):
    command, *options = arguments
    words = [sys.executable, "-m", "leyden", command, str(run_file), "harness.command=[no-such-agent]", *options]
    result = subprocess.run(words, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr.startswith("error: harness.command: there is no program 'no-such-agent' in ")
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_port_that_another_program_has(run_file):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = load(run_file, [f"gateway.port={taken.getsockname()[1]}"])
        with pytest.raises(
            ConfigError, match=r"gateway\.port: cannot listen on 127\.0\.0\.1:\d+: Address already in use"
        ):
            before_rollouts(config, None, os.environ)


def test_an_address_that_this_machine_does_not_have(run_file):
    config = load(run_file, ["gateway.host=no-such-host.invalid"])
    with pytest.raises(ConfigError, match=r"gateway\.host: cannot listen on no-such-host\.invalid:0: "):
        before_rollouts(config, b"s" * 32, os.environ)


def test_a_run_that_was_started_with_other_groups(run_file, tmp_path):
    (tmp_path / "run").mkdir()
    config = load(run_file)
    document = {"config": config.model_dump(mode="json") | {"trainer": {"group_size": 3}}, "data": {}}
    (tmp_path / "run/run.json").write_text(json.dumps(document))
    for refuses in (before_training, describe):
        with pytest.raises(LeydenError, match=r"was started with another data\.train"):
            refuses(config, None, os.environ)


def test_a_run_file_that_is_well_passes_and_leaves_nothing(run_file, tmp_path):
    before = sorted(tmp_path.iterdir())
    assert len(before_training(load(run_file, ["run_dir=deep/er/run"]), None, os.environ).train) == 1
    assert sorted(tmp_path.iterdir()) == before


def test_a_controller_elsewhere_has_its_own_programs_and_files(run_file):
    started = ["harness.command=[no-such-program]"]
    elsewhere = [*started, "controller.start=false", "gateway.url=http://127.0.0.1:1"]
    with pytest.raises(ConfigError, match="there is no program 'no-such-program'"):
        before_rollouts(load(run_file, started), None, os.environ)
    before_rollouts(load(run_file, elsewhere), None, os.environ)


def test_settings_of_a_backend_that_is_not_used_are_named(run_file):
    config = load(run_file, ["kubernetes={image: x, ttl_s: 400}"])
    assert unheeded(config) == [
        "kubernetes.image, kubernetes.ttl_s: not looked at, because controller.backend is local"
    ]
    assert "# note: kubernetes.image, kubernetes.ttl_s: not looked at" in describe(config, None, os.environ)
    assert unheeded(load(run_file)) == []


def leaves(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, field in section.model_fields.items():
        kinds = [k for k in (field.annotation, *get_args(field.annotation)) if isinstance(k, type)]
        nested = next((k for k in kinds if issubclass(k, BaseModel)), None)
        if nested is not None:
            yield from leaves(nested, f"{prefix}{name}.")
        elif name != "config_dir":
            yield prefix + name, field.annotation


KEYS = sorted(key for key, _ in leaves(RunConfig))


@pytest.mark.parametrize("key", KEYS)
def test_every_key_refuses_a_value_of_another_type_by_its_path(run_file, key):
    """No key takes a mapping of this shape, nor a list of nulls."""
    for wrong in ("{no such: [1]}", "[null]"):
        with pytest.raises(ConfigError) as caught:
            load(run_file, [f"{key}={wrong}"])
        assert str(caught.value).startswith(key.rpartition(".")[0] or key)
        assert caught.value.path.startswith(key)


def test_every_number_refuses_one_that_is_not_finite(run_file):
    numbers = [
        key for key, kind in leaves(RunConfig) if int in (kind, *get_args(kind)) or float in (kind, *get_args(kind))
    ]
    assert len(numbers) > 40
    for key in numbers:
        for wrong in (".nan", ".inf", "-.inf", "true"):
            with pytest.raises(ConfigError):
                load(run_file, [f"{key}={wrong}"])
