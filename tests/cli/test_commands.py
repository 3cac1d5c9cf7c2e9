"""The command line: exit status, one-line errors, what it imports, the plan, the choices of `leyden eval`."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from leyden.cli.dry_run import describe
from leyden.cli.evaluating import choose_checkpoint, choose_samples, choose_tasks
from leyden.cli.signals import Stopped, run_until_signal
from leyden.cli.training import closing_lines, nothing_lines, ways_on
from leyden.config import RunConfig
from leyden.doctor.preflight import check_backend
from leyden.errors import ConfigError
from leyden.run_file import load, parse

CLUSTER = ["controller.backend=kubernetes", "kubernetes={image: a, keeper_image: b}", "gateway.host=10.0.0.1"]


@pytest.fixture
def run_file(tmp_path: Path, tokenizer_path: Path) -> Path:
    (tmp_path / "grade.py").write_text("")
    (tmp_path / "train.jsonl").write_text('{"n": 1}\n{"n": 2}\n{"n": 3}\n')
    (tmp_path / "val.jsonl").write_text('{"v": 1}\n{"v": 2}\n')
    path = tmp_path / "run.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "run_dir": "run",
                "model": {"path": str(tokenizer_path), "renderer": "qwen3", "context_tokens": 512},
                "data": {"train": "train.jsonl", "validation": "val.jsonl"},
                "harness": {"command": ["true", "--go"]},
                "grader": {"function": "grade:score"},
                "trainer": {"steps": 6, "groups_per_step": 2, "group_size": 4},
            }
        )
    )
    return path


@pytest.fixture
def config(run_file: Path) -> RunConfig:
    return load(run_file)


def leyden(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "leyden", *arguments],
        capture_output=True, text=True, check=False, env={**os.environ, **environment},
    )  # fmt: skip


def test_a_wrong_run_file_is_one_line_and_status_2(run_file):
    result = leyden("train", str(run_file), "trainer.group_sise=4")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "error: trainer.group_sise: unknown key (value 4); did you mean 'group_size'?\n"


@pytest.mark.parametrize("command", ["train", "gateway", "controller", "eval"])
def test_every_command_reads_the_run_file_the_same_way(command):
    result = leyden(command, "none.yaml")
    assert result.returncode == 2
    assert result.stderr == "error: cannot read run file none.yaml: No such file or directory\n"


WITHOUT = """
import sys
for name in sys.argv.pop(1).split():
    sys.modules[name] = None
from leyden.cli import main
main()
"""


@pytest.mark.parametrize(
    ("command", "packages", "settings", "said"),
    [
        ("train", "torch transformers", [], "leyden train needs torch, transformers: pip install 'leyden[embedded]'"),
        ("train", "matplotlib", [], "leyden train needs matplotlib: pip install 'leyden[embedded]'"),
        ("eval", "torch", [], "leyden eval needs torch: pip install 'leyden[embedded]'"),
        (
            "train",
            "tensorboard kubernetes_asyncio",
            CLUSTER,
            "leyden train needs tensorboard, kubernetes_asyncio: pip install 'leyden[embedded,kubernetes]'",
        ),
        (
            "eval",
            "torch kubernetes_asyncio",
            [*CLUSTER, "engine={kind: vllm, urls: ['http://127.0.0.1:1']}"],
            "leyden eval needs kubernetes_asyncio: pip install 'leyden[kubernetes]'",
        ),
        (
            "controller",
            "torch kubernetes_asyncio",
            CLUSTER,
            "leyden controller needs kubernetes_asyncio: pip install 'leyden[kubernetes]'",
        ),
    ],
)
def test_a_missing_extra_is_one_line(run_file, tmp_path, command, packages, settings, said):
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, packages, command, run_file, *settings],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"error: {said}\n")
    assert not (tmp_path / "run").exists()


def test_a_dry_run_needs_what_the_run_does(run_file):
    command = [sys.executable, "-c", WITHOUT, "torch", "train", run_file, "--dry-run"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "error: leyden train needs torch: pip install 'leyden[embedded]'\n")


def test_a_task_file_with_a_bad_line(run_file, tmp_path):
    (tmp_path / "train.jsonl").write_text('{"n": 1}\n[]\n')
    result = leyden("train", str(run_file), "--dry-run")
    assert result.returncode == 2
    assert result.stderr == f"error: data.train: {tmp_path}/train.jsonl:2: a task is a JSON object, not list\n"


def test_a_failure_that_is_not_the_run_file_is_status_1(run_file):
    result = leyden("controller", str(run_file))
    assert result.returncode == 1
    assert result.stderr.startswith("error: no gateway has listened for ")
    assert "start `leyden gateway` first" in result.stderr


def test_a_short_secret_is_refused(run_file):
    result = leyden("controller", str(run_file), LEYDEN_SECRET="short")
    assert result.returncode == 2
    assert result.stderr == "error: LEYDEN_SECRET: has 5 bytes, at least 32 are needed\n"


def test_show_of_something_else(tmp_path):
    result = leyden("show", str(tmp_path))
    assert result.returncode == 2
    assert result.stderr == f"error: RUN_DIR: {tmp_path} is not the folder of a run: it has no run.json\n"


QUICK = {"torch", "transformers", "matplotlib"}
AT_ONCE = QUICK | {"aiohttp", "pyarrow", "starlette", "renderers"}


@pytest.mark.parametrize(
    ("arguments", "heavy"),
    [(["--help"], AT_ONCE), (["train", "RUN", "trainer.stepz=1"], AT_ONCE), (["train", "RUN", "--dry-run"], QUICK)],
)
def test_answers_at_once_because_nothing_heavy_is_imported(run_file, arguments, heavy):
    program = (
        "import sys\nsys.argv = ['leyden', *sys.argv[1:]]\nfrom leyden.cli import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        f"heavy = {heavy}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    words = [str(run_file) if word == "RUN" else word for word in arguments]
    result = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=True)
    assert result.stderr.splitlines()[-1] == "[]"


def plan_of(config: RunConfig) -> str:
    return describe(config, None, os.environ)


def test_dry_run_prints_settings_that_read_back_and_the_plan(config, run_file, tmp_path):
    result = leyden("train", str(run_file), "trainer.steps=9", "--dry-run")
    assert result.returncode == 0
    assert parse(yaml.safe_load(result.stdout)).trainer.steps == 9
    assert not (tmp_path / "run").exists()
    train, validation = (
        hashlib.sha256((tmp_path / f"{name}.jsonl").read_bytes()).hexdigest()[:12] for name in ("train", "val")
    )
    assert plan_of(config).split("# would start\n")[1].splitlines() == [
        "#   gateway     on 127.0.0.1, port any free one",
        f"#   engine      embedded, {config.model.path} on auto, 32 slots, 512 tokens of context",
        "#   controller  local, 8 harnesses at once",
        "#   harness     true --go",
        "#   grader      function: grade:score",
        f"#   memory      {check_backend(config)}",
        f"#   training    steps 1 to 6 of 2 groups x 4 = 8 rollouts; 3 tasks, 4.00 epochs (sha256 {train})",
        f"#   validation  2 tasks x 1, only at the ends (sha256 {validation})",
        f"#   run folder  {tmp_path}/run",
    ]


def test_plan_of_a_resume_beside_running_parts(run_file, tmp_path):
    (tmp_path / "run/checkpoints/step-000004").mkdir(parents=True)
    config = load(run_file, ["gateway.url=http://10.0.0.1:80", "controller.start=false", "eval.every=2"])
    lines = plan_of(config).split("# would start\n")[1].splitlines()
    assert lines[0] == "#   gateway     uses the one at http://10.0.0.1:80"
    assert lines[2] == "#   controller  uses one that already runs"
    assert lines[6].startswith("#   training    steps 5 to 6 of 2 groups")
    assert lines[7].startswith("#   validation  2 tasks x 1, every 2 steps")


def test_plan_of_a_run_that_is_done(run_file, tmp_path):
    (tmp_path / "run/checkpoints/step-000006").mkdir(parents=True)
    assert "#   training    nothing to do: 6 steps are done, trainer.steps is 5, of 2" in plan_of(
        load(run_file, ["trainer.steps=5"])
    )


@pytest.mark.parametrize("arguments", [["--dry-run"], []])
def test_engines_that_cannot_be_trained(run_file, arguments):
    result = leyden("train", str(run_file), "engine={kind: vllm, urls: ['10.0.0.1:8000']}", *arguments)
    assert result.returncode == 2
    assert result.stderr.startswith("error: engine: the embedded trainer updates no engine but its own")


def test_engines_that_run_are_evaluated_as_they_are(config, run_file):
    served = load(run_file, ["engine={kind: vllm, urls: ['10.0.0.1:8000']}"])
    assert choose_checkpoint(served.run_dir, served.engine.urls, "latest") is None
    with pytest.raises(ConfigError, match="--checkpoint: x cannot be loaded into the engines"):
        choose_checkpoint(served.run_dir, served.engine.urls, "x")


def test_choice_of_tasks(config, tmp_path):
    (tmp_path / "other.jsonl").write_text('{"o": 1}\n')
    assert choose_tasks(config, "validation", None).tasks == ({"v": 1}, {"v": 2})
    assert choose_tasks(config, "train", 2).tasks == ({"n": 1}, {"n": 2})
    assert choose_tasks(config, str(tmp_path / "other.jsonl"), None).tasks == ({"o": 1},)
    with pytest.raises(ConfigError, match="--split: cannot read "):
        choose_tasks(config, "nothing.jsonl", None)
    bare = config.model_copy(update={"data": config.data.model_copy(update={"validation": None})})
    with pytest.raises(ConfigError, match=r"no data\.validation; give --split train"):
        choose_tasks(bare, "validation", None)


def test_choice_of_samples():
    assert choose_samples([1], None, 1) == 1
    assert choose_samples([1, 4], None, 2) == 4
    assert choose_samples([1], None, 3) == 3
    assert choose_samples([1, 4], 8, 1) == 8
    with pytest.raises(ConfigError, match="--samples: 2 samples a task cannot give pass@4; use at least 4"):
        choose_samples([1, 4], 2, 1)


def test_choice_of_checkpoint(config):
    assert choose_checkpoint(config.run_dir, config.engine.urls, "latest") is None
    root = config.run_dir / "checkpoints"
    for name in ("step-000009", "step-000010", ".tmp-step-000011"):
        (root / name).mkdir(parents=True)
    assert choose_checkpoint(config.run_dir, config.engine.urls, "latest") == root / "step-000010"
    assert choose_checkpoint(config.run_dir, config.engine.urls, "none") is None
    assert choose_checkpoint(config.run_dir, config.engine.urls, str(root / "step-000009")) == root / "step-000009"
    with pytest.raises(ConfigError, match="--checkpoint: step-7 is not a folder"):
        choose_checkpoint(config.run_dir, config.engine.urls, "step-7")


def test_the_best_checkpoint_is_that_of_the_best_validation(config):
    with pytest.raises(ConfigError, match=r"--checkpoint: no validation of .* has a result"):
        choose_checkpoint(config.run_dir, config.engine.urls, "best")
    config.run_dir.mkdir(parents=True, exist_ok=True)
    log = config.run_dir / "metrics.jsonl"

    def evaluated(step, value, mean):
        line = {"event": "eval", "step": step, "pass": [{"k": 1, "value": value}], "mean_reward": mean}
        with log.open("a") as file:
            file.write(json.dumps(line) + "\n")

    evaluated(0, 0.25, 0.5)
    assert choose_checkpoint(config.run_dir, config.engine.urls, "best") is None
    evaluated(2, 0.25, 0.75)
    evaluated(4, 0.25, 0.75)
    evaluated(6, None, None)
    with pytest.raises(ConfigError, match=r"the best validation was at step 2, but .*step-000002 is gone"):
        choose_checkpoint(config.run_dir, config.engine.urls, "best")
    folder = config.run_dir / "checkpoints" / "step-000002"
    folder.mkdir(parents=True)
    assert choose_checkpoint(config.run_dir, config.engine.urls, "best") == folder
    with log.open("a") as file:
        file.write('{"event": "start", "step": 0}\n')
    assert choose_checkpoint(config.run_dir, config.engine.urls, "best") is None


def test_closing_lines(tmp_path):
    summary = {
        "steps": 3, "policy_version": 2, "seconds": {"rollouts": 3.21, "update": 0.4},
        "pass_at_1_before": 0.25, "pass_at_1_before_interval_95": [0.1, 0.5],
        "pass_at_1_after": None, "pass_at_1_after_interval_95": None, "mean_reward_before": 0.4,
    }  # fmt: skip
    assert closing_lines(tmp_path, summary) == [
        "finished 3 steps, policy version 2",
        "validation pass@1 before 0.250 [0.100, 0.500], mean reward 0.400",
        "seconds: rollouts 3.2, update 0.4",
        f"summary.json        {tmp_path}/summary.json",
        f"learning_curve.png  {tmp_path}/learning_curve.png",
        f"tensorboard         {tmp_path}/tensorboard",
        f"attempts            {tmp_path}/attempts",
        f"logs                {tmp_path}/logs",
    ]


def test_a_run_that_taught_nothing_ends_with_the_first_failure_of_each_kind():
    summary = {
        "nothing_learned": "no rollout made a model call that was served",
        "counts": {"outcomes": {"crashed": 3, "no_calls": 1}},
        "first_failures": {"crashed": {"rollout": "r1", "reason": "exit 2; last words: can't open file 'agent.py'"}},
    }
    assert nothing_lines(summary) == [
        "nothing was learned: no rollout made a model call that was served",
        "rollouts ended crashed 3, no_calls 1",
        "first crashed: rollout r1: exit 2; last words: can't open file 'agent.py'",
    ]


def test_a_run_ends_with_the_commands_that_use_its_checkpoint(config, run_file, tmp_path):
    assert ways_on(config, run_file, ()) == []
    for step in (1, 2):
        (tmp_path / "run" / "checkpoints" / f"step-00000{step}").mkdir(parents=True)
    checkpoint = tmp_path / "run" / "checkpoints" / "step-000002"
    assert ways_on(config, Path("my run.yaml"), ("optimizer.lr=1e-5",)) == [
        f"checkpoint          {checkpoint}, a Hugging Face folder",
        f"measure it          leyden eval 'my run.yaml' optimizer.lr=1e-5 --checkpoint {checkpoint}",
        f"serve it            vllm serve {checkpoint} --served-model-name policy",
    ]
    without = config.model_copy(update={"data": config.data.model_copy(update={"validation": None})})
    assert ways_on(without, run_file, ())[1].endswith(f"--checkpoint {checkpoint} --split train")


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_the_work_in_order(number, status):
    events: list[str] = []

    async def work() -> None:
        import asyncio

        os.kill(os.getpid(), number)
        try:
            await asyncio.sleep(60)
        finally:
            events.append("ended")

    with pytest.raises(Stopped) as caught:
        run_until_signal(work(), on_stop=lambda: events.append("asked"))
    assert events == ["asked", "ended"]
    assert caught.value.exit_status == status


def test_results_and_errors_pass_through():
    async def answer() -> int:
        return 3

    async def fail() -> None:
        raise ConfigError("a", "b")

    assert run_until_signal(answer(), on_stop=lambda: None) == 3
    with pytest.raises(ConfigError):
        run_until_signal(fail(), on_stop=lambda: None)
