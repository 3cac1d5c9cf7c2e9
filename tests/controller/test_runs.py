"""Real processes through the whole controller, against a real gateway."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import sys
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from leyden.config import RunConfig
from leyden.controller.jobs import WATCHER_KILLED
from leyden.records import Rollout
from tests.controller.conftest import controlling
from tests.controller.live_gateway import LiveGateway
from tests.controller.programs import appears, wait_until

Config = Callable[..., RunConfig]
Left = Callable[[], list[str]]
CALL = (
    "import os, urllib.request as u; headers = {'authorization': 'Bearer ' + os.environ['LEYDEN_KEY']}; "
    "url = os.environ['LEYDEN_URL'] + '/v1/chat/completions'; body = os.environ['LEYDEN_CALL'].encode(); "
    "print(u.urlopen(u.Request(url, body, headers)).read())"
)
MESSAGES = '{"model": "policy", "messages": [{"role": "user", "content": "hello"}]}'
CALL_MODEL = f"LEYDEN_CALL='{MESSAGES}' {sys.executable} -c \"{CALL}\""


def attempt_dir(config: RunConfig, rollout_id: str = "r1", attempt: int = 1) -> Path:
    return config.run_dir / "attempts" / rollout_id / str(attempt)


def text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


async def run(config: RunConfig, *rollout_ids: str, task: dict[str, Any] | None = None) -> list[Rollout]:
    async with LiveGateway(max_attempts=config.harness.max_attempts) as gateway:
        for rollout_id in rollout_ids or ("r1",):
            gateway.add(rollout_id, task)
        async with controlling(config, gateway):
            return await gateway.ended()


async def test_clean_exit_is_graded_with_its_own_key(config: Config, gone: Left) -> None:
    made = config("echo hello > out; test $LEYDEN_ATTEMPT = 1 && " + CALL_MODEL)
    (rollout,) = await run(made)
    assert (rollout.state, rollout.reward, rollout.turns) == ("succeeded", 1.0, 1)
    facts = json.loads((attempt_dir(made) / "exit.json").read_text())
    assert (facts["exit_code"], facts["signal"], facts["killed"], facts["error"]) == (0, None, None, None)
    assert 0 < facts["cpu_s"] < 60 and facts["max_rss_bytes"] > 1e5


async def test_crash_and_signal_are_agent_failures_that_keep_their_reward(config: Config, gone: Left) -> None:
    (crashed,) = await run(config("exit 3"))
    assert (crashed.state, crashed.failure, crashed.exit_code, crashed.reward) == (
        "failed",
        "agent",
        3,
        1.0,
    )
    (killed,) = await run(config("kill -SEGV $$"), "r2")
    assert (killed.failure, killed.exit_code, killed.reason) == ("agent", -11, "killed by SIGSEGV")


async def test_bare_python_is_that_of_the_named_environment(config: Config, tmp_path: Path, gone: Left) -> None:
    """An interpreter finds its environment by the path it was started with, so a bare name would not do."""
    venv.create(tmp_path / "venv", symlinks=True)
    made = config(
        harness={"command": ["python", "-c", "import sys; print(sys.prefix)"], "python": f"{tmp_path}/venv/bin/python"}
    )
    (rollout,) = await run(made)
    assert rollout.exit_code == 0
    assert (attempt_dir(made) / "harness.log").read_text() == f"{tmp_path}/venv\n"


async def test_timeout_kills_the_harness_and_is_graded(config: Config, gone: Left) -> None:
    """The deadline ends it, so its group closes; what it printed stays."""
    made = config("trap '' TERM; echo a; echo b; echo started; sleep 100; sleep 100", harness={"timeout_s": 0.5})
    async with LiveGateway() as gateway:
        gateway.add("r1")
        gateway.hold_all()
        async with controlling(made, gateway):
            await wait_until(lambda: text(attempt_dir(made) / "harness.log") == "a\nb\nstarted\n")
            gateway.release("r1")
            (rollout,) = await gateway.ended()
    assert (rollout.state, rollout.failure, rollout.timed_out, rollout.reward) == (
        "failed",
        "agent",
        True,
        1.0,
    )
    assert (attempt_dir(made) / "harness.log").read_text() == "a\nb\nstarted\n"


async def test_held_time_moves_the_deadline(config: Config, gone: Left) -> None:
    async with LiveGateway() as gateway:
        gateway.add("r1")
        made = config("sleep 1.2", harness={"timeout_s": 0.5})
        async with controlling(made, gateway):
            await gateway.reached("r1", "running")
            gateway.store.rollouts.add_held("r1", 1, 3600.0)  # no change of the feed
            (rollout,) = await gateway.ended()
    assert (rollout.state, rollout.timed_out) == ("succeeded", False)


@pytest.mark.parametrize(
    "script",
    [
        "sleep 300 & exit 0",
        "setsid sleep 300 & sleep 0.1",
        "(setsid sh -c 'sleep 300 & sleep 300' &) ; sleep 0.1",
        "trap '' TERM; (trap '' TERM; setsid sh -c 'trap \"\" TERM; sleep 300' &) ; sleep 0.1",
        "for i in $(seq 300); do sleep 300 & done",
    ],
    ids=["background", "setsid", "double-fork", "ignores-term", "hundreds"],
)
async def test_nothing_of_a_harness_outlives_it(config: Config, gone: Left, script: str) -> None:
    async with LiveGateway() as gateway:
        gateway.add("r1")
        async with controlling(config(script), gateway):
            (rollout,) = await gateway.ended()
            assert [c for c in gone() if "sleep 300" in c] == []
    assert rollout.state == "succeeded"


async def test_flood_is_capped_with_its_beginning_and_end(config: Config, gone: Left) -> None:
    made = config("echo first; yes x | head -c 30000000; echo last", harness={"log_bytes": 200_000})
    (rollout,) = await run(made)
    log = (attempt_dir(made) / "harness.log").read_bytes()
    assert rollout.state == "succeeded"
    assert log.startswith(b"first\n") and log.endswith(b"last\n") and len(log) < 201_000
    dropped = json.loads((attempt_dir(made) / "exit.json").read_text())["log_dropped_bytes"]
    assert f"[leyden: {dropped} bytes left out".encode() in log
    assert dropped == 30_000_000 + len(b"first\nlast\n") - 200_000


async def test_command_that_is_missing_fails_once_as_infrastructure(
    config: Config, gone: Left, caplog: pytest.LogCaptureFixture
) -> None:
    made = config(harness={"command": ["no-such-agent"], "max_attempts": 2})
    (rollout,) = await run(made)
    assert (rollout.state, rollout.failure, rollout.attempt) == ("failed", "infrastructure", 1)
    assert rollout.reason.startswith("cannot start 'no-such-agent' in ")
    assert f"log: {attempt_dir(made, 'r1', 1)}/harness.log" in caplog.text and "rollout r1" in caplog.text


@pytest.mark.parametrize(
    ("harness", "value", "reason"),
    [
        ({"command": ["echo", "{{ task.v }}"]}, "a\0b", "harness.command[1] has a NUL character"),
        ({"command": ["echo", "{{ task.v }}"]}, "é" * 100_000, "harness.command[1] has 200000 bytes"),
        ({"command": ["echo"], "env": {"A": "{{ task.v }}"}}, "a\0b", "harness.env.A has a NUL character"),
        ({"command": ["echo"], "env": {"A": "{{ task.v }}"}}, "a" * 131_070, "harness.env.A has 131072 bytes"),
        ({"command": ["echo", *["{{ task.v }}"] * 40]}, "a" * 100_000, "harness.command and its environment have 40"),
        ({"command": ["{{ task.v }}"]}, "/etc/hostname", "cannot start '/etc/hostname' in "),
        ({"command": ["{{ task.v }}"]}, "/etc", "cannot start '/etc' in "),
        ({"command": ["{{ task.v }}"]}, "x" * 5000, "cannot start 'xxx"),
        ({"command": ["echo", "{{ task.v.ljust(99) }}"]}, "a", "harness.command[1]: the template"),
    ],
)
async def test_what_no_program_can_be_started_with_fails_once(
    config: Config, gone: Left, harness: dict[str, Any], value: str, reason: str
) -> None:
    """As infrastructure, never as the agent's failure: nothing of the agent has run."""
    (rollout,) = await run(config(harness=harness | {"max_attempts": 3}), task={"v": value})
    assert (rollout.failure, rollout.attempt) == ("infrastructure", 1)
    assert reason in rollout.reason
    assert "LEYDEN_TASK" in rollout.reason or "start" in reason or "template" in reason


async def test_bad_template_is_infrastructure_and_names_the_variable(config: Config, gone: Left) -> None:
    """A template that fails, whatever for, ends the rollout, not the run."""
    made = config(harness={"command": ["echo", "{{ task.promt }}"], "max_attempts": 1})
    (rollout,) = await run(made, task={"prompt": "hi"})
    assert rollout.failure == "infrastructure"
    assert "harness.command[1]" in rollout.reason and "promt" in rollout.reason


async def test_cancelled_rollout_is_killed_and_forgotten(config: Config, gone: Left) -> None:
    async with LiveGateway() as gateway:
        gateway.add("r1")
        gateway.add("r2")
        made = config("case $LEYDEN_ROLLOUT_ID in r1) sleep 300;; esac", controller={"concurrency": 1})
        async with controlling(made, gateway):
            await gateway.reached("r1", "running")
            gateway.cancel("r1")
            (second,) = await gateway.ended("r2")
            assert second.state == "succeeded"
            assert [c for c in gone() if "sleep 300" in c] == []
    assert not (attempt_dir(made) / "workspace").exists()


async def test_grader_crash_is_retried(config: Config, gone: Left) -> None:
    script = "test -e ../second || { touch ../second; exit 1; }; " + " ".join(
        [sys.executable, "-c", '"from leyden.client import post_reward; post_reward(0.25)"']
    )
    made = config(grader={"command": ["sh", "-c", script]})
    (rollout,) = await run(made)
    assert (rollout.state, rollout.reward, rollout.attempt) == ("succeeded", 0.25, 1)
    assert json.loads((attempt_dir(made) / "grade" / "exit.1.json").read_text())["exit_code"] == 1


async def test_grader_that_always_crashes_is_infrastructure(config: Config, gone: Left) -> None:
    made = config(grader={"command": ["sh", "-c", "echo oh no; exit 9"]}, harness={"max_attempts": 1})
    (rollout,) = await run(made)
    assert (rollout.failure, rollout.reward) == ("infrastructure", None)
    assert rollout.reason.startswith("the grader failed 2 times, last: exit 9; log: ")
    assert (attempt_dir(made) / "grade" / "grade.log").read_text() == "oh no\noh no\n"


async def test_grader_timeout_counts_as_crash(config: Config, gone: Left) -> None:
    made = config(grader={"command": ["sleep", "300"], "timeout_s": 0.3, "max_tries": 1}, harness={"max_attempts": 1})
    (rollout,) = await run(made)
    assert "the grader failed 1 times, last: timeout after" in rollout.reason


async def test_function_grader(config: Config, gone: Left, tmp_path: Path) -> None:
    (tmp_path / "my_grader.py").write_text(
        "def grade(task, workspace):\n    return float((workspace / 'answer').read_text()) * task['scale']\n"
    )
    made = config("echo 0.5 > answer", grader={"function": "my_grader:grade"}, workspace={"keep": "all"})
    (rollout,) = await run(made, task={"scale": 0.5})
    assert (rollout.state, rollout.reward) == ("succeeded", 0.25)


async def test_function_grader_that_returns_no_number_fails(config: Config, gone: Left, tmp_path: Path) -> None:
    (tmp_path / "bad_grader.py").write_text("def grade(task, workspace):\n    return 'good'\n")
    made = config(grader={"function": "bad_grader:grade", "max_tries": 1}, harness={"max_attempts": 1})
    (rollout,) = await run(made)
    assert rollout.failure == "infrastructure"
    said = "leyden.errors.GatewayError: the reward 'good' (str) is not a finite number"
    assert said in (attempt_dir(made) / "grade" / "grade.log").read_text()
    assert rollout.reason.endswith(f"; last words: {said}")


async def test_no_model_call_warns_and_names_the_variables(
    config: Config, gone: Left, caplog: pytest.LogCaptureFixture
) -> None:
    await run(config("true"))
    assert "made no model call" in caplog.text and "OPENAI_BASE_URL" in caplog.text


async def test_clean_stop_gives_rollouts_back_and_leaves_nothing(config: Config, gone: Left) -> None:
    async with LiveGateway() as gateway:
        gateway.add("r1")
        made = config("echo on; sleep 300")
        async with controlling(made, gateway):
            await gateway.reached("r1", "running")
            await appears(attempt_dir(made) / "harness.log")
        assert gone() == []
        assert gateway["r1"].state == "queued"
        assert gateway["r1"].reason.startswith("the controller was stopped")


async def test_reward_that_was_posted_before_the_grader_crashed_stands(config: Config, gone: Left) -> None:
    code = "from leyden.client import post_reward; post_reward(0.75); raise SystemExit(1)"
    (rollout,) = await run(config(grader={"command": [sys.executable, "-c", code]}))
    assert (rollout.state, rollout.reward) == ("succeeded", 0.75)


@pytest.mark.parametrize(("keep", "kept"), [("failed", [False, True]), ("all", [True, True]), ("none", [False, False])])
async def test_keep_policy(config: Config, gone: Left, keep: str, kept: list[bool]) -> None:
    made = config("test $LEYDEN_ROLLOUT_ID = good", workspace={"keep": keep})
    await run(made, "good", "bad")
    assert [(attempt_dir(made, i) / "workspace").exists() for i in ("good", "bad")] == kept


async def test_secrets_are_in_no_log(
    config: Config, gone: Left, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither keys nor the control secret reach logs, records or command lines, whatever happens."""
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("LEYDEN_SECRET", "CANARY-123")
    async with LiveGateway(max_attempts=1) as gateway:
        for rollout_id in ("ok", "crash", "hang"):
            gateway.add(rollout_id)
        gateway.hold_all()
        script = "case $LEYDEN_ROLLOUT_ID in crash) exit 1;; hang) sleep 300;; esac; env | grep -c CANARY; true"
        made = config(script, harness={"timeout_s": 0.5, "max_attempts": 1})
        async with controlling(made, gateway):
            await gateway.reached("hang", "running")
            await gateway.ended("ok", "crash")
            lines = [" ".join(p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"])]
            assert [line for line in lines if "lk-" in line] == []
            gateway.release("hang")
            await gateway.ended()
        written = b"".join(p.read_bytes() for p in made.run_dir.rglob("*") if p.is_file())
        assert b"lk-" not in written and b"CANARY" not in written
        logged = re.sub(r"&claims=\S+", "", caplog.text)  # a key without its signature opens nothing
        assert "lk-" not in logged and gateway.secret.hex() not in logged
        assert (attempt_dir(made, "ok") / "harness.log").read_text() == "0\n"


async def test_attempt_folder_is_private(config: Config, gone: Left) -> None:
    made = config("true", workspace={"keep": "all"})
    await run(made)
    folders = [attempt_dir(made), attempt_dir(made) / "workspace", made.run_dir / "launcher"]
    assert [oct(f.stat().st_mode & 0o777) for f in folders] == ["0o700"] * 3
    assert oct((attempt_dir(made) / "task.json").stat().st_mode & 0o777) == "0o600"


async def test_harness_that_kills_its_reaper_has_failed(config: Config, gone: Left) -> None:
    made = config("kill -9 $PPID; sleep 300", harness={"max_attempts": 1})
    (rollout,) = await run(made)
    assert (rollout.failure, rollout.exit_code) == ("agent", -9)
    assert rollout.reason.startswith(f"{WATCHER_KILLED} (killed by SIGKILL)")


async def test_launcher_killed_is_replaced_and_adopts(config: Config, gone: Left) -> None:
    async with LiveGateway() as gateway:
        gateway.add("r1")
        made = config("echo on; while ! test -e ../go; do sleep 0.05; done")
        async with controlling(made, gateway):
            await gateway.reached("r1", "running")
            await appears(attempt_dir(made) / "harness.log")
            (launcher,) = [p for p in psutil.process_iter() if _is_launcher(p, made)]
            launcher.send_signal(signal.SIGKILL)
            await wait_until(lambda: any(_is_launcher(p, made) and p != launcher for p in psutil.process_iter()))
            (attempt_dir(made) / "go").touch()
            (rollout,) = await gateway.ended()
            gateway.add("r2")
            await appears(attempt_dir(made, "r2") / "harness.log")
            (attempt_dir(made, "r2") / "go").touch()
            (second,) = await gateway.ended("r2")
    assert (rollout.state, rollout.attempt, rollout.reward) == ("succeeded", 1, 1.0)
    assert second.state == "succeeded"


def _is_launcher(process: psutil.Process, config: RunConfig) -> bool:
    try:
        line = " ".join(process.cmdline())
        return "leyden_launcher" in line and str(config.run_dir) in line and process.ppid() == os.getpid()
    except psutil.Error:
        return False
