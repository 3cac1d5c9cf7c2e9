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
        "grader.zzz: unknown key (value 1); valid keys are command, function, harness, max_tries, pass_env, timeout_s",
    ),
    ("trainer.steps=1.5", "trainer.steps: 1.5 is refused: Input should be a valid integer"),
    ("trainer.steps=true", "trainer.steps: True is refused: Input should be a valid integer"),
    ("trainer.steps='3'", "trainer.steps: '3' is refused: Input should be a valid integer"),
    ("trainer.steps=0", "trainer.steps: 0 is refused: Input should be greater than or equal to 1"),
    ("trainer.steps=", "trainer.steps: None is refused: Input should be a valid integer"),
    ("optimizer.lr=.inf", "optimizer.lr: inf is refused: give a finite number"),
    ("optimizer.lr=.nan", "optimizer.lr: nan is refused: give a finite number"),
    ("harness.env.A=-.inf", "harness.env.A: -inf is refused: give a finite number"),
    ("optimizer.lr=0", "optimizer.lr: 0 is refused: Input should be greater than or equal to 0.0000000001"),
    ("optimizer.lr=1e3", "optimizer.lr: 1000.0 is refused: Input should be less than or equal to 1"),
    ("optimizer.betas=[0.9, 1.0]", "optimizer.betas: [0.9, 1.0]: both must be at least 0 and below 1"),
    ("harness.timeout_s=-1", "harness.timeout_s: -1 is refused: Input should be greater than 0"),
    ("harness.command=echo hi", "harness.command: 'echo hi' is refused: Input should be a valid array"),
    ("harness.command=[a, 2]", "harness.command.1: 2 is refused: Input should be a valid string"),
    ("harness.env={A: 8080}", "harness.env.A: 8080 is refused: Input should be a valid string"),
    ("harness.env={1: a}", "harness.env.1: key 1 is not a string; quote it"),
    ("run_dir=!!timestamp 2024-01-01", "run_dir: datetime.date(2024, 1, 1) is date, which no setting takes; quote it"),
    ("data.shuffle=maybe", "data.shuffle: 'maybe' is refused: Input should be a valid boolean"),
    ("grader.function=", "grader: give exactly one of command, function, harness; got none"),
    ("gateway.url=nonsense", "gateway.url: 'nonsense' is no address; give http://host:port"),
    ("gateway.url=10.0.0.1:80", "gateway.url: '10.0.0.1:80' is no address; give http://host:port"),
    ("kubernetes.gateway_url=http://", "kubernetes.gateway_url: 'http://' is no address; give http://host:port"),
    ("gateway.url=http://h:99999", "gateway.url: 'http://h:99999' is no address; give http://host:port"),
    (
        "async_rolout.size=8",
        "async_rolout: unknown key (value {'size': 8}); did you mean 'algorithm'? valid keys are algorithm, "
        "controller, data, embedded, engine, eval, gateway, grader, harness, kubernetes, model, optimizer, run_dir, "
        "sampling, trainer, workspace",
    ),
    ("group_size=8", "group_size: unknown key (value 8); did you mean 'trainer.group_size'?"),
    ("trainer.lr=8", "trainer.lr: unknown key (value 8); did you mean 'optimizer.lr'?"),
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
    (
        "optimizer.warmup_steps=100000000",
        "optimizer.warmup_steps 100000000: the run has 100 optimizer steps (trainer.steps x trainer.mini_batches), so "
        "the rate would stay under 1 % of optimizer.lr",
    ),
    (
        "optimizer.max_grad_norm=1e-30",
        "optimizer.max_grad_norm: 1e-30 is refused: Input should be greater than or equal to 0.001",
    ),
    ("optimizer.eps=1e9", "optimizer.eps: 1000000000.0 is refused: Input should be less than or equal to 0.001"),
    (
        "optimizer.weight_decay=1e9",
        "optimizer.weight_decay: 1000000000.0 is refused: Input should be less than or equal to 1",
    ),
    (
        "algorithm.correction_clip=1e-9",
        "algorithm.correction_clip: 1e-09 is refused: Input should be greater than or equal to 1",
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
        ("harness.pass_env=[TOKEN]", r"harness.pass_env \['TOKEN'\] is for .*: give the variables in harness.env"),
        ("grader.pass_env=[TOKEN]", r"grader.pass_env \['TOKEN'\] is for "),
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


@pytest.mark.parametrize("advantage", ["grpo", "rloo", "mean_only"])
def test_a_group_of_one_has_nothing_to_be_compared_with(run_file, advantage):
    with pytest.raises(
        ConfigError, match=f"group_size 1 gives every rollout advantage 0 .* {advantage}; use at least 2"
    ):
        load(run_file, ["trainer.group_size=1", f"algorithm.advantage={advantage}"])


def test_words_that_yaml_1_1_reads_as_booleans_are_text_and_switches_take_them(run_file):
    assert load(run_file, ["model.continuity=off"]).model.continuity == "off"
    assert load(run_file, ["model.name=on", "harness.env.DEBUG=yes"]).harness.env == {"DEBUG": "yes"}
    assert load(run_file, ["data.shuffle=no"]).data.shuffle is False
    assert load(run_file, ["gateway.keep_wire=on"]).gateway.keep_wire is True


@pytest.mark.parametrize("text", ["010", "-007", "08", "[3, 00]"])
def test_a_number_with_a_leading_zero_is_refused_with_both_readings(run_file, text):
    with pytest.raises(ConfigError, match=r"is octal in YAML 1\.1 and decimal in YAML 1\.2"):
        load(run_file, [f"trainer.steps={text}"])


def test_text_that_yaml_1_1_reads_as_something_else(run_file):
    for text in ("2024-01-01", "12:30", "1_000", "0777x"):
        assert load(run_file, [f"model.name={text}"]).model.name == text
    assert load(run_file, ["trainer.steps=0x10"]).trainer.steps == 16


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


def test_the_home_folder_in_every_path(run_file, tmp_path, monkeypatch):
    home = tmp_path / "home"
    monkeypatch.setenv("HOME", str(home))
    config = load(
        run_file,
        [
            "run_dir=~/runs/a", "data={train: ~/t.jsonl, validation: ~/v.jsonl}", "model.path=~/m",
            "harness={command: [x], python: ~/bin/python, readable: [~/r, s]}",
            "workspace.template=~/repos/{{ task.r }}",
            "kubernetes={kubeconfig: ~/k, template: ~/job.yaml, files: [~/f, g]}",
        ],
    )  # fmt: skip
    assert config.run_dir == home / "runs/a"
    assert (config.data.train, config.data.validation) == (home / "t.jsonl", home / "v.jsonl")
    assert (config.model.path, config.harness.python) == (str(home / "m"), str(home / "bin/python"))
    assert config.harness.readable == [home / "r", tmp_path / "s"]
    assert config.workspace.template == f"{home}/repos/{{{{ task.r }}}}"
    kubernetes = config.kubernetes
    assert (kubernetes.kubeconfig, kubernetes.template) == (home / "k", home / "job.yaml")
    assert kubernetes.files == [home / "f", tmp_path / "g"]


def test_the_home_folder_of_nobody(run_file):
    with pytest.raises(ConfigError) as caught:
        load(run_file, ["run_dir=~nobody-of-that-name/a"])
    assert str(caught.value) == (
        "run_dir: '~nobody-of-that-name/a': no such user has a home folder here; write ./~ for a name"
    )


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
