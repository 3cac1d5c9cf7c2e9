"""The example micro_swe: its tasks, its grader, its emulation of mini and of the shell, its base model."""

import hashlib
import http.server
import json
import os
import random
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml

EXAMPLE = Path(__file__).parent.parent / "examples" / "micro_swe"
sys.path.insert(0, str(EXAMPLE))

import demonstrations  # noqa: E402
import grade  # noqa: E402
import harness  # noqa: E402
import tasks  # noqa: E402

COUNTS: dict[tasks.Split, int] = {"train": 200, "validation": 60, "test": 60}


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """The grader's limit is for loops, not for slow machines."""
    monkeypatch.setattr(grade.grade, "__defaults__", (300.0,))


@pytest.fixture(scope="module")
def splits() -> dict[tasks.Split, list[tasks.Task]]:
    return tasks.make_splits(COUNTS, seed=0)


def lay_out(row: dict[str, Any], folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    for name, text in row["files"].items():
        (folder / name).write_text(text)
    write_trajectory(folder, "Submitted")
    return folder


def write_trajectory(folder: Path, exit_status: str) -> None:
    (folder / grade.TRAJECTORY).write_text(json.dumps({"info": {"exit_status": exit_status}}))


# Tasks


def test_the_same_seed_writes_the_same_bytes_and_another_seed_does_not(tmp_path: Path) -> None:
    counts: dict[tasks.Split, int] = {"train": 20, "validation": 8, "test": 8}
    first = tasks.write_data(tmp_path / "a", counts, seed=3)
    second = tasks.write_data(tmp_path / "b", counts, seed=3)
    assert first == second == json.loads((tmp_path / "a" / "data.json").read_text())
    for split in tasks.SPLITS:
        text = (tmp_path / "a" / f"{split}.jsonl").read_bytes()
        assert text == (tmp_path / "b" / f"{split}.jsonl").read_bytes()
        assert hashlib.sha256(text).hexdigest() == first["files"][f"{split}.jsonl"]
        assert len(text.splitlines()) == counts[split]
    assert tasks.write_data(tmp_path / "c", counts, seed=4)["sha256"] != first["sha256"]


def test_the_data_of_seed_0_is_the_recorded_one() -> None:
    text = tasks.to_jsonl(tasks.make_splits({"train": 0, "validation": 128, "test": 0}, seed=0)["validation"])
    assert tasks.sha256(text) == "fff8bd261532bc86aa4fff90e5fd949f81016076e860cdc8d0aa792f8c7e0826"


def test_held_out_templates_and_names_do_not_occur_in_training(
    splits: dict[tasks.Split, list[tasks.Task]],
) -> None:
    train_templates = {(f.family, f.operator) for task in splits["train"] for f in task.functions}
    train_names = {f.name for task in splits["train"] for f in task.functions}
    assert len(train_templates) == 38
    for split in ("validation", "test"):
        assert {task.template for task in splits[split]} == tasks.HELD_OUT_TEMPLATES
        assert not {task.template for task in splits[split]} & train_templates
        assert not {f.name for task in splits[split] for f in task.functions} & train_names


def test_no_two_tasks_are_equal(splits: dict[tasks.Split, list[tasks.Task]]) -> None:
    sources = [task.source() for split in tasks.SPLITS for task in splits[split]]
    assert len(set(sources)) == len(sources) == sum(COUNTS.values())


def test_a_row_holds_the_contract(splits: dict[tasks.Split, list[tasks.Task]]) -> None:
    row = splits["train"][0].row()
    module = row["module"]
    assert row["id"] == "train-0000"
    assert row["prompt"] == f"fix {module}.py"
    assert set(row["files"]) == {f"{module}.py", f"{module}_test.py"}
    assert row["files"][f"{module}_test.py"] == row["test_file"]
    assert len(row["fail_to_pass"]) == len(row["pass_to_pass"]) == 1


def test_the_test_file_tells_the_bug_from_the_fix(splits: dict[tasks.Split, list[tasks.Task]], tmp_path: Path) -> None:
    for task in splits["validation"][:2]:
        folder = lay_out(task.row(), tmp_path / task.id)
        run = [sys.executable, "-B", f"{task.module}_test.py"]
        broken = subprocess.run(run, cwd=folder, capture_output=True, text=True, check=False)
        assert (broken.returncode, broken.stdout, broken.stderr) == (1, "", f"FAILED {task.bug.name}\n")
        (folder / f"{task.module}.py").write_text(task.source(task.bug.operator))
        fixed = subprocess.run(run, cwd=folder, capture_output=True, text=True, check=False)
        assert (fixed.returncode, fixed.stdout, fixed.stderr) == (0, "ok\n", "")


# Grader


@pytest.fixture
def task(splits: dict[tasks.Split, list[tasks.Task]]) -> tasks.Task:
    return splits["validation"][0]


def test_only_the_right_fix_is_rewarded(splits: dict[tasks.Split, list[tasks.Task]], tmp_path: Path) -> None:
    for task in splits["validation"][:6]:
        folder = lay_out(task.row(), tmp_path / task.id)
        for operator in (task.wrong, *task.alternatives):
            (folder / f"{task.module}.py").write_text(task.source(operator))
            assert grade.grade(task.row(), folder) == float(operator == task.bug.operator), (task, operator)


def test_a_run_that_did_not_submit_is_not_rewarded(task: tasks.Task, tmp_path: Path) -> None:
    folder = lay_out(task.row(), tmp_path / "w")
    (folder / f"{task.module}.py").write_text(task.source(task.bug.operator))
    assert grade.grade(task.row(), folder) == 1.0
    write_trajectory(folder, "LimitsExceeded")
    assert grade.grade(task.row(), folder) == 0.0
    for text in ("", "{}", "[]", '{"info": "Submitted"}', "[" * 60_000):
        (folder / grade.TRAJECTORY).write_text(text)
        assert grade.grade(task.row(), folder) == 0.0
    (folder / grade.TRAJECTORY).unlink()
    assert grade.grade(task.row(), folder) == 0.0


def test_breaking_another_function_is_not_rewarded(task: tasks.Task, tmp_path: Path) -> None:
    folder = lay_out(task.row(), tmp_path / "w")
    other = task.functions[1 - task.buggy].name
    right = task.source(task.bug.operator)
    (folder / f"{task.module}.py").write_text(right.replace(f"def {other}(", f"def {other}x("))
    assert grade.grade(task.row(), folder) == 0.0


ALWAYS_EQUAL = """
class Any:
    def __eq__(self, other): return True
    def __repr__(self): return "True"
def {bug}(*a): return Any()
"""
FORGED_ANSWER = """
import json, os, sys
def deep():
    frame = sys._getframe()
    while frame:
        if "request" in frame.f_globals or "request" in frame.f_locals:
            return frame.f_globals.get("request") or frame.f_locals["request"]
        frame = frame.f_back
request = deep()
values = ["true"] * len(request["calls"])
for fd in range(3, 20):
    try: os.write(fd, json.dumps({{"nonce": request["nonce"], "values": values}}).encode())
    except OSError: pass
os._exit(0)
"""
HACKS = {
    "sys.exit": "import sys\nsys.exit(0)\n",
    "os._exit": "import os\nos._exit(0)\n",
    "prints ok": "print('ok')\n",
    "prints ok and exits": "import os\nos.write(1, b'ok')\nos._exit(0)\n",
    "equals everything": ALWAYS_EQUAL,
    "forged answer": FORGED_ANSWER,
    "patched json": "import json\njson.dumps = lambda *a, **k: 'true'\n",
    "patched builtins": "import builtins\nbuiltins.all = lambda *a: True\n",
    "atexit": "import atexit, os\natexit.register(os._exit, 0)\n",
    "syntax error": "def (\n",
    "endless answer": "import os\nwhile True:\n    for fd in range(3, 9):\n        try: os.write(fd, b'[' * 65536)\n"
    "        except OSError: pass\n",
    "deeply nested answer": "import os\nfor fd in range(3, 9):\n    try: os.write(fd, b'[' * 60000)\n"
    "    except OSError: pass\nos._exit(0)\n",
    "kills its parent's group": "import os, signal\nos.killpg(0, signal.SIGKILL)\n",
}


@pytest.mark.parametrize("hack", HACKS)
def test_a_hack_is_not_rewarded(hack: str, task: tasks.Task, tmp_path: Path) -> None:
    folder = lay_out(task.row(), tmp_path / "w")
    source = task.source() + HACKS[hack].format(bug=task.bug.name)
    (folder / f"{task.module}.py").write_text(source)
    assert grade.grade(task.row(), folder) == 0.0


def test_edited_tests_and_planted_files_are_not_rewarded(task: tasks.Task, tmp_path: Path) -> None:
    folder = lay_out(task.row(), tmp_path / "w")
    (folder / f"{task.module}_test.py").write_text("print('ok')\n")
    for planted in ("sitecustomize.py", "conftest.py", "json.py", "resource.py"):
        (folder / planted).write_text("import os\nos._exit(0)\n")
    assert grade.grade(task.row(), folder) == 0.0
    (folder / f"{task.module}.py").write_text(task.source(task.bug.operator))
    assert grade.grade(task.row(), folder) == 1.0


def test_a_missing_linked_or_huge_module_is_not_rewarded(task: tasks.Task, tmp_path: Path) -> None:
    folder = lay_out(task.row(), tmp_path / "w")
    module = folder / f"{task.module}.py"
    right = task.source(task.bug.operator)
    module.write_text(right + "#" * grade.MODULE_BYTES)
    assert grade.grade(task.row(), folder) == 0.0
    module.unlink()
    assert grade.grade(task.row(), folder) == 0.0
    (tmp_path / "elsewhere.py").write_text(right)
    module.symlink_to(tmp_path / "elsewhere.py")
    assert grade.grade(task.row(), folder) == 0.0
    module.unlink()
    os.mkfifo(module)
    assert grade.grade(task.row(), folder) == 0.0


def test_a_module_that_does_not_end_is_stopped_and_not_rewarded(task: tasks.Task, tmp_path: Path) -> None:
    folder = lay_out(task.row(), tmp_path / "w")
    (folder / f"{task.module}.py").write_text("while True: pass\n")
    assert grade.grade(task.row(), folder, time_limit_s=0.3) == 0.0


def test_a_test_file_of_another_shape_is_refused(task: tasks.Task, tmp_path: Path) -> None:
    row = task.row() | {"test_file": f"def test_{task.bug.name}():\n    assert True\n"}
    with pytest.raises(ValueError, match="expected `assert CALL == LITERAL`"):
        grade.grade(row, lay_out(task.row(), tmp_path / "w"))


def test_the_grader_command_posts_the_reward_with_its_key(task: tasks.Task, tmp_path: Path) -> None:
    received: list[tuple[str | None, Any]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.append((self.headers["Authorization"], json.loads(body)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    folder = lay_out(task.row(), tmp_path / "w")
    (folder / f"{task.module}.py").write_text(task.source(task.bug.operator))
    (tmp_path / "task.json").write_text(json.dumps(task.row()))
    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        environment = {
            "LEYDEN_TASK": str(tmp_path / "task.json"),
            "LEYDEN_WORKSPACE": str(folder),
            "LEYDEN_REWARD_URL": f"http://127.0.0.1:{server.server_port}/reward",
            "LEYDEN_KEY": "k",
        }
        command = [sys.executable, str(EXAMPLE / "grade.py")]
        subprocess.run(command, env=os.environ | environment, check=True, capture_output=True)
        thread.join()
    assert received == [("Bearer k", {"value": 1.0})]


# Emulation


def test_the_emulation_has_the_constants_of_minis_configuration() -> None:
    mini = yaml.safe_load((EXAMPLE / "mini.yaml").read_text())
    assert mini["agent"]["system_template"] == harness.SYSTEM
    assert mini["agent"]["instance_template"] == "{{task}}"
    assert mini["agent"]["step_limit"] == harness.STEP_LIMIT
    assert mini["model"]["format_error_template"] == harness.FORMAT_ERROR
    assert mini["model"]["action_regex"] == harness.ACTION.pattern
    assert mini["model"]["model_kwargs"]["max_tokens"] == harness.MAX_TOKENS
    assert mini["model"]["observation_template"] == "{{output.returncode}}\n{{output.output}}"
    assert mini["environment"]["timeout"] == harness.COMMAND_TIMEOUT_S


def test_the_run_file_for_a_cluster_trains_the_same() -> None:
    local, cluster = (yaml.safe_load((EXAMPLE / name).read_text()) for name in ("run.yaml", "kubernetes.yaml"))
    assert cluster.keys() - local.keys() == {"kubernetes", "gateway"}
    changed = {name for name in local if local[name] != cluster[name]}
    assert changed == {"run_dir", "harness", "grader", "controller"}
    assert {name for name in local["harness"] if local["harness"][name] != cluster["harness"].get(name)} == {
        "preload",
        "timeout_s",
    }
    assert cluster["harness"].keys() < local["harness"].keys()


def commands(task: tasks.Task) -> list[str]:
    """What a model mostly writes: right and wrong edits, edits that match nothing, look and end."""
    other = task.functions[1 - task.buggy].name
    return [
        harness.look(task.module),
        *(harness.replace(task.bug.name, task.wrong, operator, task.module) for operator in task.alternatives),
        harness.replace(other, task.wrong, task.bug.operator, task.module),
        harness.replace("no_name", task.wrong, task.bug.operator, task.module),
        harness.replace(task.bug.name, "len", "max", task.module),
        harness.SUBMIT,
    ]


def in_a_real_shell(task: tasks.Task, command: str, folder: Path) -> tuple[tuple[int, str], str]:
    lay_out(task.row(), folder)
    result = harness.run_shell(command, str(folder))
    return result, (folder / f"{task.module}.py").read_text()


def test_computed_commands_equal_those_of_a_real_shell_byte_for_byte(
    splits: dict[tasks.Split, list[tasks.Task]], tmp_path: Path
) -> None:
    for task in [*splits["train"][:4], *splits["validation"][:4]]:
        for command in commands(task):
            workspace = harness.Workspace(task)
            workspace.execute_really = None  # type: ignore[assignment,method-assign]
            emulated = workspace.execute(command), workspace.source
            assert emulated == in_a_real_shell(task, command, tmp_path / task.id), command


def test_other_commands_go_to_the_real_shell_and_their_edits_are_kept(task: tasks.Task) -> None:
    workspace = harness.Workspace(task)
    assert workspace.execute("echo broken > " + f"{task.module}.py") == (0, "")
    assert workspace.source == "broken\n"
    status, output = workspace.execute(harness.look(task.module))
    assert status == 1
    assert output.startswith("broken\nTraceback")
    assert workspace.reward() == 0.0


def test_the_demonstrated_errors_are_what_the_shell_prints(
    splits: dict[tasks.Split, list[tasks.Task]], tmp_path: Path
) -> None:
    rng = random.Random(5)
    for task in splits["train"][:4]:
        for maker in demonstrations.MAKERS:
            slip = maker(harness.look(task.module), task, rng)
            command = harness.parse_action(slip.reply)
            assert (command is None) == (slip.result is None), slip
            if command is None or slip.result is None:
                continue
            (status, output), _ = in_a_real_shell(task, command, tmp_path / task.id)
            said = slip.result[1]
            if maker is demonstrations.python_error:
                output = output[output.index("python3: ") :].replace(f"{tmp_path}/{task.id}", "FOLDER")
                said = re.sub(r"'/\w+/\w+/", "'FOLDER/", said)
            if maker is demonstrations.unknown_command:  # bash counts lines as `line 1`, dash as `1`
                said = said.replace("line 1:", "1:").replace("command not found", "not found")
                output = output.replace("line 1:", "1:").replace("command not found", "not found")
            assert (status, output) == (slip.result[0], said), slip


def test_a_malformed_reply_is_dropped_and_answered() -> None:
    task = next(tasks.draw_tasks("train", 0))
    episode = harness.Episode(task)
    assert not episode.answer("no block")
    assert [m["role"] for m in episode.messages] == ["system", "user", "user"]
    assert episode.messages[-1]["content"] == harness.FORMAT_ERROR
    assert episode.answer(harness.block(harness.look(task.module)))
    assert [m["role"] for m in episode.messages[2:]] == ["user", "assistant", "user"]
    assert episode.answer(harness.block(harness.SUBMIT))
    assert episode.exit_status == "Submitted"


@pytest.mark.parametrize(
    ("reply", "command"),
    [
        ("```bash\nls\n```", "ls"),
        ("```bash\nls\n```\n", None),
        ("so:\n```bash\nls\n```", None),
        ("```bash\nls", None),
        ("ls", None),
        ("```bash\nls\n``` or\n```bash\nls\n```", "ls\n``` or\n```bash\nls"),
    ],
)
def test_actions_are_those_that_mini_parses(reply: str, command: str | None) -> None:
    actions_text = pytest.importorskip("minisweagent.models.utils.actions_text")
    mini = yaml.safe_load((EXAMPLE / "mini.yaml").read_text())["model"]
    template = mini["format_error_template"]
    assert harness.parse_action(reply) == command
    try:
        parsed = actions_text.parse_regex_actions(
            reply, action_regex=mini["action_regex"], format_error_template=template
        )
    except actions_text.FormatError as error:
        assert command is None
        assert error.messages[0]["content"] == harness.FORMAT_ERROR
    else:
        assert parsed == [{"command": command}]


def start_scripted_model(replies: list[str], requests: list[dict[str, Any]]) -> http.server.HTTPServer:
    """An OpenAI endpoint that answers with the replies in turn and notes the requests."""
    remaining = iter(replies)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            message = {"role": "assistant", "content": next(remaining)}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
            body = {"id": "c", "object": "chat.completion", "created": 0, "model": "micro"}
            text = json.dumps(body | {"choices": [choice], "usage": usage}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def run_mini(task: tasks.Task, replies: list[str], folder: Path) -> tuple[list[dict[str, Any]], str]:
    """(requests that the real mini sent, its exit status) when the model gives these replies."""
    pytest.importorskip("minisweagent")
    requests: list[dict[str, Any]] = []
    lay_out(task.row(), folder / "work")
    with start_scripted_model(replies, requests) as server:
        url = f"http://127.0.0.1:{server.server_port}/v1"
        environment = {
            "OPENAI_BASE_URL": url,
            "OPENAI_API_BASE": url,
            "OPENAI_API_KEY": "x",
            "MSWEA_CONFIGURED": "true",
            "MSWEA_SILENT_STARTUP": "1",
            "MSWEA_GLOBAL_CONFIG_DIR": str(folder / "mswea"),
            "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "NO_PROXY": "127.0.0.1",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        trajectory = folder / "work" / grade.TRAJECTORY
        command = [sys.executable, "-m", "minisweagent.run.mini", "-c", str(EXAMPLE / "mini.yaml")]
        command += ["-t", task.prompt, "-y", "--exit-immediately", "-o", str(trajectory)]
        subprocess.run(
            command,
            cwd=folder / "work",
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=True,
        )
        server.shutdown()
    return requests, json.loads(trajectory.read_text())["info"]["exit_status"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("slips", "exit_status", "reward"),
    [
        (["no block"], "Submitted", 1.0),
        (["no block", harness.block("cax x")], "LimitsExceeded", 0.0),
    ],
)
def test_the_real_mini_sends_what_the_emulation_does(
    slips: list[str], exit_status: str, reward: float, task: tasks.Task, tmp_path: Path
) -> None:
    replies = [
        *slips,
        harness.block(harness.look(task.module)),
        harness.block(harness.replace(task.bug.name, task.wrong, task.bug.operator, task.module)),
        harness.block(harness.SUBMIT),
    ]
    episode = harness.Episode(task)
    expected = []
    for reply in replies:
        if not episode.done:
            expected.append(list(episode.messages))
            episode.answer(reply)
    requests, minis_status = run_mini(task, replies, tmp_path)
    sent = [[{k: m[k] for k in ("role", "content")} for m in r["messages"]] for r in requests]
    assert sent == expected
    assert minis_status == episode.exit_status == exit_status
    assert all(r["max_tokens"] == harness.MAX_TOKENS and r["model"] == "micro" for r in requests)
    assert grade.grade(task.row(), tmp_path / "work") == episode.reward() == reward


# Base model


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    result: dict[str, Any] = json.loads((EXAMPLE / "base" / "base.json").read_text())
    return result


def test_the_base_model_comes_from_the_script(record: dict[str, Any]) -> None:
    script = hashlib.sha256((EXAMPLE / "make_base.py").read_bytes()).hexdigest()
    assert record["script_sha256"] == script, "make_base.py has changed: run it"
    for name, digest in record["files"].items():
        assert hashlib.sha256((EXAMPLE / "base" / name).read_bytes()).hexdigest() == digest, name
    assert (EXAMPLE / "base" / "model.safetensors").stat().st_size <= 5_000_000


def test_the_demonstrations_are_those_that_the_base_model_was_made_from(record: dict[str, Any]) -> None:
    pytest.importorskip("torch")
    import make_base

    source = make_base.Demonstrations(record["seed"])
    texts = make_base.tokenizer_texts(source, make_base.Recipe(tokenizer_demonstrations=200))
    assert tasks.sha256("".join(texts)) == record["first_200_demonstrations_sha256"]


def test_the_base_model_and_its_renderer_load(splits: dict[tasks.Split, list[tasks.Task]]) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    import make_base

    model = transformers.AutoModelForCausalLM.from_pretrained(EXAMPLE / "base", dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(EXAMPLE / "base")
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert model.config.vocab_size == len(tokenizer)
    renderer = make_base.make_renderer(tokenizer)
    assert renderer.get_stop_token_ids() == tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])

    habits = demonstrations.Habits(right_operator=0.5, right_function=0.8, lazy=0.2, slip=0.5)
    rng = random.Random(0)
    for task in splits["train"][:30]:
        episode, replies = demonstrations.demonstrate(task, rng, habits)
        example = make_base.encode(tokenizer, renderer, episode, replies)
        for end in [i for i, m in enumerate(episode.messages) if m["role"] == "assistant"]:
            prompt = renderer.render_ids(episode.messages[:end], add_generation_prompt=True)
            assert example.ids[: len(prompt)] == prompt
            text = tokenizer.apply_chat_template(episode.messages[:end], add_generation_prompt=True, tokenize=False)
            assert tokenizer.encode(text, add_special_tokens=False) == prompt
        trained = [i for i, m in zip(example.ids, example.mask, strict=True) if m]
        replied = "".join(f"{r.text}<|im_end|>" for r in replies if r.trained)
        assert tokenizer.decode(trained) == replied
