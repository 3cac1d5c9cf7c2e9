"""`leyden doctor`: each check fails for its own reason and says what to do; a run that is well passes all."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from leyden import extras
from leyden.doctor import access
from leyden.doctor.findings import Level
from tests.cli.examining import examine, levels, of
from tests.gateway.conftest import SECRET, make_config, serving
from tests.gateway.fake_vllm import FakeVllm, listening


async def test_a_run_that_is_well(make, tmp_path):
    checkup = await examine(make(grader={"function": "grade:good"}))
    assert [f.line for f in checkup.findings if f.level is not Level.OK] == []
    assert list(levels(checkup)) == [
        *(
            "folder",
            "sandbox",
            "data",
            "templates",
            "training",
            "renderer",
            "engine",
            "address",
            "own gateway",
            "keys",
            "harness",
            "grader",
        )
    ]
    assert of(checkup, "data").what == "2 tasks in train.jsonl"
    assert of(checkup, "harness").what == "model calls: 1 openai-chat; exit 0"
    assert of(checkup, "grader").what == "reward 0.5 for what the harness left"
    assert checkup.passed
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("mode", "what", "advice"),
    [
        ("silent", "it made no model call; exit 3", "let it take its base URL from OPENAI_BASE_URL, "),
        ("doubled", "none of its 1 calls was served; the first: POST /v1/v1/chat/completions: 404 ", "its base URL"),
        ("own-key", "none of its 1 calls was served; the first: POST /v1/chat/completions: 401 ", "its key must be"),
    ],
)
async def test_a_harness_that_the_model_never_hears(make, mode, what, advice):
    """No call is told with the variables that a harness should read."""
    checkup = await examine(make(mode))
    harness = of(checkup, "harness")
    assert harness.level is Level.PROBLEM
    assert harness.what.startswith(what)
    assert harness.advice.startswith(advice)
    if mode == "silent":
        assert harness.detail == ("I was told nothing of a model",)
    assert checkup.kept is not None
    assert (checkup.kept / "attempts").is_dir()


async def test_a_harness_that_does_not_end_is_ended_and_graded(make):
    for patience_s in (4, 40, 400):  # as long as this machine needs to make one call
        checkup = await examine(make("hangs"), patience_s=patience_s)
        if of(checkup, "harness").what != "it made no model call; it was ended at its time limit":
            break
    assert of(checkup, "harness").what == "model calls: 1 openai-chat; it was ended at its time limit"
    assert of(checkup, "grader").what == "reward 0.5 for what the harness left"
    assert checkup.passed


async def test_a_harness_that_is_not_there(make):
    checkup = await examine(make(harness={"command": ["no-such-agent"]}))
    assert of(checkup, "templates").what.startswith("harness.command: there is no program 'no-such-agent' in ")
    checkup = await examine(make(harness={"command": ["./no-such-agent"]}))
    assert of(checkup, "harness").level is Level.PROBLEM
    assert "no-such-agent" in of(checkup, "harness").what
    assert of(checkup, "grader").level is Level.SKIPPED


async def test_a_module_that_cannot_be_preloaded(make):
    checkup = await examine(make(harness={"preload": ["no_such_module"]}))
    assert of(checkup, "harness").level is Level.PROBLEM
    assert "no_such_module" in of(checkup, "harness").line


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("nan", "finite"),
        ("nothing", ""),
        ("broken", "the grader failed 1 times"),
        ("missing", "the grader failed 1 times"),
    ],
)
async def test_a_grader_without_a_number(make, function, said):
    checkup = await examine(make(grader={"function": f"grade:{function}"}))
    grader = of(checkup, "grader")
    assert grader.level is Level.PROBLEM
    assert grader.what.startswith("no reward: ")
    assert said in grader.what + " ".join(grader.detail)
    assert (
        grader.advice == "it must post one finite number to LEYDEN_REWARD_URL with LEYDEN_KEY as Bearer, or return it"
    )
    if function == "broken":
        assert grader.detail[-1] == "KeyError: 'score'"


async def test_a_grader_command_that_posts_nothing(make):
    checkup = await examine(make(grader={"command": ["true"]}))
    assert of(checkup, "grader").what == "no reward: no reward"


async def test_templates_of_the_first_task(make):
    run_file = make(harness={"command": [sys.executable, "{{ task.prompt }}"]})
    checkup = await examine(run_file)
    assert of(checkup, "templates").line == (
        "problem  templates    the first task cannot be launched: harness.command[1]: 'dict object' has no attribute "
        "'prompt'; known are config_dir, model, rollout_id, run_dir, task, url, workspace; the first task has the "
        "fields files, n"
    )
    assert levels(checkup) | {"harness": "skipped", "grader": "skipped", "keys": "ok"} == levels(checkup)


async def test_data_that_is_none(make, tmp_path):
    run_file = make(data={"validation": "val.jsonl"})
    (tmp_path / "val.jsonl").write_text("[]\n")
    checkup = await examine(run_file)
    assert of(checkup, "data").line == (
        f"problem  data         data.validation: {tmp_path}/val.jsonl:1: a task is a JSON object, not list; give "
        "data.validation a file with one JSON object a line"
    )
    assert of(checkup, "harness").level is Level.OK


async def test_a_model_without_a_tokenizer(make, tmp_path):
    checkup = await examine(make(model={"path": str(tmp_path)}))
    assert of(checkup, "renderer").level is Level.PROBLEM
    assert "has no tokenizer.json; give a Hugging Face model folder" in of(checkup, "renderer").what
    assert [of(checkup, check).level for check in ("own gateway", "harness", "grader")] == [Level.SKIPPED] * 3


async def test_a_model_of_another_family(make):
    checkup = await examine(make(model={"renderer": "llama-3"}))
    assert of(checkup, "renderer").what.startswith("model.renderer: 'llama-3' does not fit ")


async def test_a_folder_that_cannot_be_made(make, tmp_path):
    (tmp_path / "file").write_text("")
    checkup = await examine(make(), f"run_dir={tmp_path}/file/run")
    assert levels(checkup) == {"folder": "problem"}
    assert of(checkup, "folder").what.startswith(f"run_dir: {tmp_path}/file/run cannot be made and written: ")


async def test_a_port_that_is_taken_and_an_open_address(make):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        checkup = await examine(make(), f"gateway.port={port}")
    in_use = f"gateway.port: cannot listen on 127.0.0.1:{port}: Address already in use by process "
    assert of(checkup, "address").what.startswith(in_use)
    checkup = await examine(make(), "gateway.host=0.0.0.0")
    assert "set LEYDEN_SECRET to a secret of at least 32 bytes" in of(checkup, "address").what


async def test_images_and_models_without_a_renderer_are_left_to_the_engine(make):
    checkup = await examine(make(engine={"kind": "vllm", "render": "engine"}))
    assert of(checkup, "renderer").what == "engine.render: engine; the engines turn messages into ids"
    assert of(checkup, "harness").what == "model calls: 1 openai-chat; exit 0"
    assert of(checkup, "grader").what == "reward 0.5 for what the harness left"


async def test_engines_of_the_run_file(make):
    fake = FakeVllm(max_model_len=1000)
    async with listening(fake):
        urls = json.dumps([fake.url, "http://127.0.0.1:1"])
        checkup = await examine(make(), f"engine={{kind: vllm, urls: {urls}}}")
        short, gone = [f for f in checkup.findings if f.check == "engine"]
        assert short.what == (
            f"engine {fake.url} takes 1000 tokens: start it with --max-model-len 2000, or lower model.context_tokens "
            "in the run file"
        )
        assert gone.what.startswith("engine http://127.0.0.1:1: ")
        assert gone.advice == "engine.urls must name running engines of kind vllm"
        fake.max_model_len = 2000
        checkup = await examine(make(), f"engine={{kind: vllm, urls: [{fake.url}]}}")
        assert of(checkup, "engine").what == f"{fake.url} answers, and gives ids and log-probs as this run needs them"
        assert fake.asked == []


async def test_a_trainer_without_torch(make, monkeypatch):
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == "torch" else name)
    checkup = await examine(make())
    assert of(checkup, "training").line == (
        "warning  training     leyden train needs torch: pip install 'leyden[embedded]'"
    )


async def test_a_gateway_in_use(make, tmp_path, tokenizer_path, renderer):
    other = tmp_path / "other"
    other.mkdir()
    async with serving(make_config(other, tokenizer_path), renderer) as gateway:
        checkup = await examine(make(), f"gateway.url={gateway.url}", secret=SECRET)
        assert [f.what for f in checkup.findings if f.check in ("gateway", "keys")][:2] == [
            f"{gateway.url} answers and takes this run's control key",
            "17 calls without a key, with a wrong one or one of another scope are refused",
        ]
        assert gateway.engine.requests == []
        assert await gateway.client.rollouts() == ([], 0)
        checkup = await examine(make(), f"gateway.url={gateway.url}", secret=b"x" * 32)
        assert of(checkup, "gateway").what.startswith(
            f"what answers at {gateway.url} is not this run's gateway (it has another secret"
        )
        assert of(checkup, "gateway").advice == "set LEYDEN_SECRET to the secret that the gateway was started with"
        checkup = await examine(make(), f"gateway.url={gateway.url}")
        assert of(checkup, "gateway").advice == (
            f"set LEYDEN_SECRET to the secret that the gateway at {gateway.url} was started with"
        )
    checkup = await examine(make(), f"gateway.url={gateway.url}", secret=SECRET)
    assert of(checkup, "gateway").what.startswith(f"{gateway.url} does not answer: ")


async def test_something_else_where_the_gateway_should_be(make):
    fake = FakeVllm()
    async with listening(fake):
        checkup = await examine(make(), f"gateway.url={fake.url}", secret=SECRET)
    assert of(checkup, "gateway").what.startswith(
        f"what answers at {fake.url} is not this run's gateway (GET /health is answered 200 without a proof); "
    )


def test_a_gateway_that_lets_too_much_through():
    """With an agent's key every route but its own is refused."""
    answers = [access.TrialResult(call, call.status) for call in access.REFUSALS]
    assert access.judge_keys(answers).level is Level.OK
    (at,) = [i for i, call in enumerate(access.REFUSALS) if (call.key, call.path) == ("agent", "/api/rollouts")]
    open_ = replace(answers[at], status=200)
    assert access.judge_keys([*answers[:at], open_, *answers[at + 1 :]]).line.startswith(
        "problem  keys         GET /api/rollouts with agent key answers 200 instead of 403; let nothing but the gateway"
    )


def leyden(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "leyden", *arguments], capture_output=True, text=True, check=False)


def test_a_run_file_that_is_wrong_is_a_finding():
    result = leyden("doctor", "none.yaml")
    assert (result.returncode, result.stderr) == (1, "")
    assert result.stdout == (
        "problem  run file     cannot read run file none.yaml: No such file or directory; docs/run-file.md lists all "
        "keys\n"
    )


def test_as_json(make):
    result = leyden("doctor", "--json", str(make("silent")))
    document = json.loads(result.stdout)
    assert (result.returncode, document["ok"]) == (1, False)
    assert document["findings"][0] == {
        "check": "run file", "level": "ok", "what": str(make("silent")), "advice": "", "detail": [],
    }  # fmt: skip
    harness = document["findings"][-2]
    assert (harness["check"], harness["level"], harness["detail"]) == (
        "harness", "problem", ["I was told nothing of a model"],
    )  # fmt: skip
    assert Path(document["logs"], "attempts").is_dir()


@pytest.mark.slow
def test_the_example_with_the_real_mini_swe_agent(tmp_path):
    root = Path(__file__).parents[2]
    tasks = [sys.executable, "examples/micro_swe/tasks.py", "--train", "2", "--validation", "2", "--test", "2"]
    subprocess.run([*tasks, "--out", str(tmp_path / "data"), "--seed", "0"], check=True, cwd=root, capture_output=True)
    data = [f"data.{name}={tmp_path}/data/{name}.jsonl" for name in ("train", "validation")]
    result = leyden(
        "doctor",
        str(root / "examples/micro_swe/run.yaml"),
        f"run_dir={tmp_path}/run",
        "harness.timeout_s=600",
        "--patience=600",
        *data,
    )
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["ok"] * 14, result.stdout
    assert lines[-2:] == [
        "ok       harness      model calls: 3 openai-chat; exit 0",
        "ok       grader       reward 0 for what the harness left",
    ]
    assert result.returncode == 0
