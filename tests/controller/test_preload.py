"""Preloaded modules, and jobs as forks of them."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

import pytest

from leyden.controller.backends import launcher_client
from leyden.controller.backends.leyden_launcher import late
from leyden.errors import LaunchError
from tests.controller.programs import Left, Runner, wait_until


async def test_console_script_runs_in_a_fork_of_the_preloaded_interpreter(tmp_path: Path, gone: Left) -> None:
    """mini's own console script: the same text as from a fresh process, without its imports."""
    quiet = {"MSWEA_SILENT_STARTUP": "1", "MSWEA_CONFIGURED": "true", "MSWEA_GLOBAL_CONFIG_DIR": str(tmp_path)}
    quiet |= {"TERM": "dumb", "COLUMNS": "100"}
    async with Runner(tmp_path, preload=("minisweagent.run.mini",), environment=quiet) as runner:
        forked, text = await runner.run("forked", "mini", "--help", fork=True, **quiet)
        fresh, expected = await runner.run("fresh", "mini", "--help", **quiet)
    assert (forked.exit_code, fresh.exit_code) == (0, 0)
    assert "Usage: mini [OPTIONS]" in text
    assert text.split("Usage")[1] == expected.split("Usage")[1]
    assert forked.cpu_s is not None and fresh.cpu_s is not None and forked.cpu_s < fresh.cpu_s


async def test_fork_is_like_a_fresh_interpreter(tmp_path: Path, gone: Left) -> None:
    script = tmp_path / "agent.py"
    script.write_text(
        "import atexit, os, sys, threading, time\n"
        "print(sys.argv[1:], __name__, os.environ.get('ONLY'), 'HOME' in os.environ, os.getcwd() == sys.argv[1])\n"
        "print(sys.stdin.read() == '', 'beside' in sys.modules or __import__('beside').X)\n"
        "atexit.register(print, 'atexit')\n"
        "threading.Thread(target=lambda: (time.sleep(0.1), print('thread'))).start()\n"
        "sys.exit('sorry')\n"
    )
    (tmp_path / "beside.py").write_text("X = 7\n")
    async with Runner(tmp_path, preload=("json",)) as runner:
        exit_, text = await runner.run("a", "python", str(script), str(tmp_path / "a"), fork=True, ONLY="here")
        crash, trace = await runner.run("b", "python", "-c", "1/0", fork=True)
    assert exit_.exit_code == 1 and crash.exit_code == 1 and "ZeroDivisionError" in trace
    lines = text.splitlines()
    assert lines.count("sorry") == 1
    lines.remove("sorry")
    assert lines == [f"['{tmp_path / 'a'}'] __main__ here True True", "True 7", "thread", "atexit"]


async def test_late_imports_of_the_first_job_are_preloaded_for_the_next(tmp_path: Path, gone: Left) -> None:
    (tmp_path / "late_dangerous.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    )
    (tmp_path / "late_good.py").write_text("X = 1\n")
    script = tmp_path / "agent.py"
    script.write_text(
        "import sys\n"
        "print('late_good' in sys.modules, 'late_dangerous' in sys.modules)\n"
        "import late_good, late_dangerous\n"
    )
    path = {"PYTHONPATH": str(tmp_path)}
    async with Runner(tmp_path, preload=("json",), environment=path) as runner:
        _, first = await runner.run("a", "python", str(script), fork=True, learn=True, **path)
        await wait_until(lambda: "imported" in (tmp_path / "launcher.log").read_text())
        _, second = await runner.run("b", "python", str(script), fork=True, learn=True, **path)
    assert (first, second) == ("False False\n", "True False\n")


async def test_models_that_the_first_job_used_are_built_for_the_next(tmp_path: Path, gone: Left) -> None:
    (tmp_path / "sdk.py").write_text(
        "from __future__ import annotations\n"
        "from pydantic import BaseModel\n"
        "class Lazy(BaseModel, defer_build=True):\n"
        "    name: Text\n"
        "class Used(Lazy): done: list[Text] = []\n"
        "class Unused(Lazy): pass\n"
        "Text = str\n"
    )
    script = tmp_path / "agent.py"
    script.write_text(
        "import sdk\n"
        "print(sdk.Used.__pydantic_complete__, sdk.Unused.__pydantic_complete__)\n"
        "print(sdk.Used(name='a', done=['b']).model_dump())\n"
    )
    path = {"PYTHONPATH": str(tmp_path)}
    async with Runner(tmp_path, preload=("sdk",), environment=path) as runner:
        _, first = await runner.run("a", "python", str(script), fork=True, learn=True, **path)
        await wait_until(lambda: "and built 1 models" in (tmp_path / "launcher.log").read_text())
        _, second = await runner.run("b", "python", str(script), fork=True, learn=True, **path)
    said = "{'name': 'a', 'done': ['b']}\n"
    assert (first, second) == (f"False False\n{said}", f"True False\n{said}")


@pytest.mark.parametrize("report", ["7", "[1]", '{"imports": 3, "models": [{}]}', '{"imports": ["no_such"], "x": 1}'])
def test_a_report_that_a_job_has_forged_does_no_harm(report: str) -> None:
    assert late.take_in(json.loads(report))["models"] == []


async def test_preload_that_fails_or_leaves_a_thread_is_refused(tmp_path: Path, gone: Left) -> None:
    (tmp_path / "starts_thread.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True, name='ticker').start()\n"
    )
    for module, message in [
        ("no_such_module", "harness.preload: no_such_module cannot be imported: ModuleNotFoundError"),
        ("starts_thread", r"harness.preload: 1 thread\(s\) \(ticker\) alive after importing"),
    ]:
        runner = Runner(tmp_path / f"run-{module}", preload=(module,), environment={"PYTHONPATH": str(tmp_path)})
        with pytest.raises(LaunchError, match=message):
            await runner.backend.open()


async def test_nothing_that_a_preloaded_module_started_is_left(
    tmp_path: Path, gone: Left, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = "import subprocess, time\nCHILD = subprocess.Popen(['setsid', 'sh', '-c', 'sleep 300 & wait'], cwd={!r})\n"
    group = "import subprocess, time\nCHILD = subprocess.Popen(['sleep', '300'], cwd={!r})\n"
    (tmp_path / "starts_process.py").write_text(start.format(str(tmp_path)))
    (tmp_path / "starts_and_fails.py").write_text(start.format(str(tmp_path)) + "raise ValueError('no')\n")
    (tmp_path / "starts_and_hangs.py").write_text(group.format(str(tmp_path)) + "time.sleep(300)\n")
    environment = {"PYTHONPATH": str(tmp_path)}
    async with Runner(tmp_path, preload=("starts_process",), environment=environment):
        await wait_until(lambda: "sleep 300" in gone())
    assert gone() == []
    with pytest.raises(LaunchError, match="starts_and_fails cannot be imported: ValueError: no"):
        await Runner(tmp_path, preload=("starts_and_fails",), environment=environment).backend.open()
    assert gone() == []
    monkeypatch.setattr(launcher_client, "START_LIMIT_S", 1.0)
    with pytest.raises(LaunchError, match="not ready after 1 s"):
        await Runner(tmp_path, preload=("starts_and_hangs",), environment=environment).backend.open()
    await wait_until(lambda: gone() == [])


async def test_a_forked_job_finds_the_module_path_of_a_fresh_interpreter(tmp_path: Path, gone: Left) -> None:
    script = tmp_path / "agent.py"
    script.write_text("import sys\nprint(sys.path)\nprint([n for n in sys.modules if 'launcher' in n])\n")
    async with Runner(tmp_path, preload=("json",)) as runner:
        _, fresh = await runner.run("a", sys.executable, str(script))
        _, forked = await runner.run("b", sys.executable, str(script), fork=True, learn=True)
        await wait_until((tmp_path / "state/late.json").exists)
    assert forked.splitlines()[0] == fresh.splitlines()[0]
    names = ast.literal_eval(forked.splitlines()[1])
    assert names and all(name.partition(".")[0] == "leyden_launcher" for name in names)
    assert "launcher" not in (tmp_path / "state/late.json").read_text()
