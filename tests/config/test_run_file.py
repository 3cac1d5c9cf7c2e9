"""Every refusal of the run file, word for word: key path, value, limit, fix."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import yaml

from leyden.errors import ConfigError
from leyden.run_file import load, parse

MINIMAL = {
    "run_dir": "runs/one",
    "model": {"path": "model"},
    "data": {"train": "train.jsonl"},
    "harness": {"command": ["agent"]},
    "grader": {"function": "grade:score"},
}


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(MINIMAL))
    return path


REFUSED = [
    ("trainer.group_sise=4", "trainer.group_sise: unknown key (value 4); did you mean 'group_size'?"),
    ("trainr.steps=3", "trainr: unknown key (value {'steps': 3}); did you mean 'trainer'?"),
    (
        "grader.zzz=1",
        "grader.zzz: unknown key (value 1); valid keys are command, function, harness, max_tries, timeout_s",
    ),
    ("trainer.steps=1.5", "trainer.steps: 1.5 is refused: Input should be a valid integer"),
    ("trainer.steps=true", "trainer.steps: True is refused: Input should be a valid integer"),
    ("trainer.steps='3'", "trainer.steps: '3' is refused: Input should be a valid integer"),
    ("trainer.steps=0", "trainer.steps: 0 is refused: Input should be greater than or equal to 1"),
    ("trainer.steps=", "trainer.steps: None is refused: Input should be a valid integer"),
    ("optimizer.lr=.inf", "optimizer.lr: inf is refused: give a finite number"),
    ("optimizer.lr=.nan", "optimizer.lr: nan is refused: give a finite number"),
    ("harness.env.A=-.inf", "harness.env.A: -inf is refused: give a finite number"),
    ("optimizer.lr=0", "optimizer.lr: 0 is refused: Input should be greater than 0"),
    ("optimizer.lr=1e3", "optimizer.lr: 1000.0 is refused: Input should be less than or equal to 1"),
    ("optimizer.betas=[0.9, 1.0]", "optimizer.betas: [0.9, 1.0]: both must be at least 0 and below 1"),
    ("harness.timeout_s=-1", "harness.timeout_s: -1 is refused: Input should be greater than 0"),
    ("harness.command=echo hi", "harness.command: 'echo hi' is refused: Input should be a valid array"),
    ("harness.command=[a, 2]", "harness.command.1: 2 is refused: Input should be a valid string"),
    ("harness.env={A: 8080}", "harness.env.A: 8080 is refused: Input should be a valid string"),
    ("harness.env={1: a}", "harness.env.1: key 1 is not a string; quote it"),
    ("run_dir=2024-01-01", "run_dir: datetime.date(2024, 1, 1) is date, which no setting takes; quote it"),
    (
        "grader.harness=true",
        "grader: give exactly one of command, function, harness; got ['function', 'harness']",
    ),
    ("grader.function=grade", "grader.function: 'grade' is not of the form 'module:function'"),
    (
        "algorithm.advantage=gae",
        "algorithm.advantage: 'gae' is refused: Input should be 'grpo', 'rloo' or 'mean_only'",
    ),
    (
        "algorithm.weights=constant",
        "algorithm: constant_tokens goes with weights: constant, and only with it",
    ),
    (
        "algorithm.constant_tokens=9",
        "algorithm: constant_tokens goes with weights: constant, and only with it",
    ),
    ("trainer.mini_batches=65", "trainer: mini_batches 65 is more than the step's 64 rollouts"),
    (
        "trainer.group_size=1",
        "trainer.group_size 1 gives every rollout advantage 0 under algorithm.advantage grpo; use at least 2",
    ),
    ("eval.every=2", "eval.every 2 needs data.validation"),
    (
        "sampling.max_tokens=4096",
        "sampling.max_tokens 4096 leaves no room for a prompt in model.context_tokens 4096",
    ),
    (
        "controller.start=false",
        "controller.start: false needs gateway.url, or nothing would ever run a harness",
    ),
    (
        "kubernetes.files=[a/x.py, b/x.py]",
        "kubernetes.files: a/x.py and b/x.py would both be x.py in the pod; rename one",
    ),
    (
        "kubernetes.files=[a/task.json]",
        "kubernetes.files: a/task.json: task.json is a file of Leyden's own in the pod; rename it",
    ),
    ("kubernetes.files=[a/..]", "kubernetes.files: 'a/..' has no file name that a pod can have"),
    ("config_dir=/x", "config_dir: is the run file's own folder and cannot be set"),
    ("model.path.sub=1", "model.path.sub: 'path' holds 'model', which has no keys of its own"),
    ("trainer.steps", "override 'trainer.steps' is not of the form key.sub=value"),
    ("=3", "override '=3' is not of the form key.sub=value"),
]


@pytest.mark.parametrize(("override", "message"), REFUSED, ids=[o for o, _ in REFUSED])
def test_refusals_name_path_value_and_fix(run_file, override, message):
    with pytest.raises(ConfigError) as caught:
        load(run_file, [override])
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "harness.sandbox=bubblewrap",
            "harness.sandbox bubblewrap is for .*: a pod is one already; kubernetes.template",
        ),
        (
            "harness.limits.memory_bytes=5000000",
            r"harness.limits \{'memory_bytes': 5000000\} .* kubernetes.resources: ",
        ),
        ("harness.limits.workspace_bytes=5", r"harness.limits \{'workspace_bytes': 5\} .* gateway.max_workspace_bytes"),
        ("harness.preload=[mini]", r"harness.preload \['mini'\] is for .*: each pod imports its modules itself"),
        ("harness.python=/usr/bin/python3", "harness.python /usr/bin/python3 .*: the image's own interpreter runs"),
        ("harness.readable=[data]", "harness.readable .* name them in kubernetes.files"),
        ("harness.log_bytes=5", "harness.log_bytes 5 is for .*: set kubernetes.log_lines"),
    ],
)
def test_what_only_this_machine_heeds_is_refused_for_a_cluster(run_file, override, message):
    cluster = ["controller.backend=kubernetes", "kubernetes.image=agent:1"]
    load(run_file, [override])
    load(run_file, [*cluster, "harness.sandbox=none", "harness.limits={}", "harness.readable=[]"])
    with pytest.raises(ConfigError, match=message):
        load(run_file, [*cluster, override])


@pytest.mark.parametrize("missing", sorted(MINIMAL))
def test_required_keys(missing):
    document = {key: value for key, value in MINIMAL.items() if key != missing}
    with pytest.raises(ConfigError) as caught:
        parse(document)
    assert str(caught.value) == f"{missing}: is required and missing"


def test_override_that_is_not_yaml(run_file):
    with pytest.raises(ConfigError, match=r"^harness\.env: '\{A: ' is not a YAML value") as caught:
        load(run_file, ["harness.env={A: "])
    assert caught.value.path == "harness.env"


def test_files_that_cannot_be_read(tmp_path):
    def message(name: str) -> str:
        with pytest.raises(ConfigError) as caught:
            load(tmp_path / name)
        return str(caught.value)

    (tmp_path / "list.yaml").write_text("- 1\n")
    (tmp_path / "broken.yaml").write_text("a: [1\n")
    (tmp_path / "twice.yaml").write_text("trainer: {steps: 1}\nmodel: {path: m}\ntrainer: {steps: 2}\n")
    assert message("none.yaml") == f"cannot read run file {tmp_path}/none.yaml: No such file or directory"
    assert message("list.yaml") == f"{tmp_path}/list.yaml holds list, not a mapping of settings"
    assert message("broken.yaml").startswith(f"{tmp_path}/broken.yaml is not YAML: ")
    assert "key 'trainer' is given twice" in message("twice.yaml")
    assert "line 3" in message("twice.yaml")


def test_numbers_in_exponent_form(run_file):
    """YAML 1.1 reads 1e-3 as text; the run file means a number."""
    config = load(run_file, ["optimizer.lr=1e-3", "harness.timeout_s=6E2", "optimizer.eps=1.5e-8"])
    assert (config.optimizer.lr, config.harness.timeout_s, config.optimizer.eps) == (1e-3, 600.0, 1.5e-8)


def test_overrides_reach_new_and_existing_sections(run_file):
    config = load(run_file, ["trainer.steps=3", "model.name=tiny", "harness.env.A=x=y", "harness.command=[a, b]"])
    assert config.trainer.steps == 3
    assert config.model.name == "tiny"
    assert config.harness.env == {"A": "x=y"}
    assert config.harness.command == ["a", "b"]


def test_paths_start_at_the_run_file(run_file, tmp_path):
    (tmp_path / "model").mkdir()
    config = load(run_file, ["data.validation=/abs/val.jsonl"])
    assert config.run_dir == tmp_path / "runs/one"
    assert config.data.train == tmp_path / "train.jsonl"
    assert config.data.validation == Path("/abs/val.jsonl")
    assert config.model.path == str(tmp_path / "model")
    assert config.config_dir == tmp_path


def test_a_hub_id_is_left_alone(run_file):
    assert load(run_file, ["model.path=Qwen/Qwen3-0.6B"]).model.path == "Qwen/Qwen3-0.6B"


def test_the_resolved_configuration_reads_back(run_file):
    config = load(run_file, ["optimizer.betas=[0.8, 0.99]"])
    document = config.model_dump(mode="json", exclude={"config_dir"})
    assert parse(copy.deepcopy(document)) == config.model_copy(update={"config_dir": Path()})


def test_frozen():
    config = parse(copy.deepcopy(MINIMAL))
    with pytest.raises(ValueError, match="frozen"):
        config.trainer.steps = 5
