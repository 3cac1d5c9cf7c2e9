"""`leyden doctor`: each check fails for its own reason and says what to do; a run that is well passes all."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from leyden import extras
from leyden.doctor import access
from leyden.doctor.chat_template import read_chat_template
from leyden.doctor.checkup import Checkup
from leyden.doctor.findings import Finding, Level, problem
from leyden.doctor.model import COMMAND, TOOL, check_renderer, check_template, round_trip
from leyden.doctor.rehearsal import Refused, Rehearsed, advice_for, judge_grader, judge_harness, judge_wishes
from leyden.gateway.render import ModelRenderer
from leyden.records import Rollout
from leyden.run_file import load
from leyden.types import RolloutState
from tests.gateway.conftest import SECRET, make_config, serving
from tests.gateway.fake_vllm import FakeVllm, listening
from tests.qwen_tokenizers import qwen_tokenizer_folder

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


async def examine(run_file: Path, *overrides: str, patience_s: float = 300, secret: bytes | None = None) -> Checkup:
    parent = dict(os.environ)
    checkup = Checkup(load(run_file, list(overrides)), secret, parent, patience_s, lambda _: None, lambda _: None)
    await checkup.run()
    return checkup


def of(checkup: Checkup, check: str) -> Finding:
    (found,) = [f for f in checkup.findings if f.check == check]
    return found


def levels(checkup: Checkup) -> dict[str, str]:
    return {f.check: f.level.value for f in checkup.findings}


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


class Spelled:
    """A renderer of one token per character, whose conversation goes on as a test wants it."""

    stop_token_ids = [ord("$")]  # noqa: RUF012

    def __init__(self, parsed: str = COMMAND, bridge: str | None = "{}R>", head: str = "U>", end: str = "$") -> None:
        self._parsed, self._bridge, self._head, self._end = parsed, bridge, head, end

    def render(self, messages: Any, tools: Any) -> list[int]:
        return ids("U>" if len(messages) == 2 else f"{self._head}C{self._end}R>")

    def parse(self, sampled: list[int], prompt: list[int], tools: Any, **_: Any) -> dict[str, Any]:
        call = {"function": {"name": "shell", "arguments": {"command": self._parsed}}}
        return {"content": "C", "tool_calls": [call] if self._parsed else []}

    def bridge(self, prompt: list[int], sampled: list[int], *_: Any, reasoning: bool) -> list[int] | None:
        return None if self._bridge is None else ids(self._bridge.format(text([*prompt, *sampled])))

    def encode(self, spelled: str, *, add_special_tokens: bool) -> list[int]:
        return ids(spelled)

    def decode(self, tokens: Any) -> str:
        return text(tokens)


def ids(spelled: str) -> list[int]:
    return [ord(c) for c in spelled]


def text(tokens: list[int]) -> str:
    return "".join(map(chr, tokens))


@pytest.mark.parametrize(
    ("renderer", "broken", "differs"),
    [
        (Spelled(), "", ""),
        (Spelled(parsed=""), "is parsed as 'C', sampled was 'C$'", ""),
        (Spelled("ls"), "is parsed as [{'name': 'shell', 'arguments': {'command': 'ls'}}], sampled was 'C$'", ""),
        (Spelled(end=""), "ends with none of the renderer's stop tokens", ""),
        (Spelled(bridge=None), "", "its sampled ids are not continued"),
        (Spelled(bridge="{}r>"), "", "the next prompt is not the template's: at character 4 'r>', not 'R>'"),
        (Spelled(head="V>"), "", "the template shows the turns before otherwise: at character 0 'V>C$R>', not 'U>'"),
    ],
)  # fmt: skip
def test_round_trip_of_a_tool_call(renderer, broken, differs):
    assert round_trip(renderer, "") == (broken, differs)


@pytest.mark.parametrize("family", ["qwen3", "qwen3.5"])
def test_round_trip_with_real_vocabularies(family):
    renderer = ModelRenderer(str(qwen_tokenizer_folder(family)), family, "template")
    assert check_renderer(renderer, family).line == (
        f"ok       renderer     {family}: a tool call is parsed, and with its result goes on as the template shows it"
    )


def test_the_folders_own_template(tmp_path, make):
    """A server of the trained model uses the folder's template, so it must show what is trained."""
    folder = tmp_path / "model"
    shutil.copytree(qwen_tokenizer_folder("qwen3"), folder)
    shutil.copy(Path(__file__).parents[1] / "vllm" / "qwen3.jinja", folder / "chat_template.jinja")
    config = load(make(model={"path": str(folder)}))
    renderer = ModelRenderer(str(folder), "qwen3", "template")
    template = read_chat_template(str(folder))
    assert (
        check_template(config.model, renderer, template).what
        == "the model's own chat template gives the renderer's text"
    )
    changed = (folder / "chat_template.jinja").read_text().replace("# Tools", "## Tools")
    (folder / "chat_template.jinja").write_text(changed)
    finding = check_template(config.model, renderer, read_chat_template(str(folder)))
    assert finding.level is Level.WARNING
    assert finding.what.startswith("the model's own chat template is not the renderer's: at character 50 ' Tools")
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no tools') }}")
    assert check_template(config.model, renderer, read_chat_template(str(folder))).what.endswith(
        "its chat template fails: TemplateError: no tools"
    )
    (folder / "chat_template.jinja").unlink()
    assert read_chat_template(str(folder)) is None


TEMPLATE = """{{- bos_token }}
{%- for message in messages %}
  {%- if message.role == 'assistant' %}{% generation %}{{ message.content }}{% endgeneration %}
  {%- else %}
    {{- message.role ~ ': ' ~ message.content ~ '\n' }}
  {%- endif %}
  {%- if loop.index == 5 %}{% break %}{% endif %}
{%- endfor %}
{{- tools | tojson }} {{ [1] | tojson(indent=2) }}{% if add_generation_prompt %}>{% endif %}
"""


def test_templates_are_rendered_as_transformers_does(tmp_path, tokenizer_path):
    from transformers import AutoTokenizer

    folder = tmp_path / "model"
    shutil.copytree(tokenizer_path, folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"bos_token": "<s>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    messages = [{"role": "user", "content": "<é>"}, {"role": "assistant", "content": "b"}]
    theirs = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        messages, tools=[TOOL], tokenize=False, add_generation_prompt=True
    )
    template = read_chat_template(str(folder))
    assert template.text(messages, [TOOL]) == theirs
    assert "<é>" in theirs


def seen(**changes: Any) -> Rehearsed:
    """A rehearsal in which all went well, but for `changes`."""
    rollout = Rollout(
        rollout_id="r", group_id="g", kind="eval", step=0, slot=0, member=0, state=RolloutState.SUCCEEDED, attempt=1,
        change=1, reward=0.5, exit_code=0, turns=1, sampled_tokens=5, min_version=0, max_version=0,
    )  # fmt: skip
    of_rollout = {k: changes.pop(k) for k in list(changes) if k in Rollout.__dataclass_fields__}
    known = {"protocols": {"openai-chat": 1}, "refused": (), "error": None, "harness_log": (), "grader_log": ()}
    return Rehearsed(rollout=replace(rollout, **of_rollout), **(known | changes))


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"protocols": {"gemini": 2, "chat": 1}}, "ok       harness      model calls: 2 gemini, 1 chat; exit 0"),
        ({"exit_code": -11}, "ok       harness      model calls: 1 openai-chat; killed by signal 11"),
        (
            {"protocols": {}, "exit_code": None, "state": RolloutState.FAILED, "reason": "exec: not found"},
            "problem  harness      it did not run to its end: exec: not found",
        ),
        (
            {"protocols": {}, "exit_code": None, "state": RolloutState.RUNNING, "error": "it was not over after 9 s"},
            "problem  harness      it did not run to its end: it was not over after 9 s",
        ),
    ],
)  # fmt: skip
def test_judgement_of_a_harness(changes, line):
    assert judge_harness(seen(**changes)).line == line


def test_judgement_of_a_grader():
    refusal = Refused("POST", "/api/reward", 422, "the reward must be a finite number")
    late = seen(reward=None, state=RolloutState.GRADING, error="it was not over after 9 s", grader_log=("working",))
    assert judge_grader(late, by_harness=False).line.startswith(
        "problem  grader       no reward: it was not over after 9 s; "
    )
    assert judge_grader(late, by_harness=False).detail == ("working",)
    none = seen(reward=None, refused=(refusal,), harness_log=("posted nan",))
    assert "no reward: POST /api/reward: 422 the reward must be" in judge_grader(none, by_harness=True).what
    assert judge_grader(none, by_harness=True).detail == ("posted nan",)


def test_advice_for_a_call_that_is_refused():
    long = Refused("POST", "/v1/chat/completions", 400, "This model's maximum context length is 448 tokens, but ...")
    assert advice_for(long) == "raise model.context_tokens, or shorten the harness's prompt"
    assert advice_for(replace(long, text="n must be 1")) == "docs/protocols.md says what is served"


def test_a_finding_is_one_line():
    assert problem("harness", "first\nsecond  third", "do\tthis").line == (
        "problem  harness      first second third; do this"
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


def test_what_the_harness_asks_for_and_does_not_get_is_a_warning() -> None:
    assert judge_wishes(seen()) == []
    (finding,) = judge_wishes(seen(unmet={"tool_choice": 2, "response_format": 1}))
    assert finding.line.startswith("warning")
    assert finding.what == "the harness asks for what it does not get: response_format, tool_choice"
