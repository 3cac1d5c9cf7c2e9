"""The emulation of mini and of the shell says what the real ones say."""

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

import demonstrations
import grade
import harness
import pytest
import tasks
import yaml

from tests.micro_swe import EXAMPLE
from tests.micro_swe.laid_out import lay_out


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
