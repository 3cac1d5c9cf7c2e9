"""kill -9 of the controller, of the launcher, of both: no run is lost or doubled, nothing is left behind."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from leyden.config import RunConfig
from leyden.controller.backends import launcher_client
from leyden.controller.backends.launcher_client import LauncherClient, LauncherSettings, socket_path
from leyden.controller.backends.leyden_launcher import late
from leyden.controller.jobs import Exit, Job
from leyden.errors import LaunchError
from tests.controller.conftest import controlling
from tests.controller.live_gateway import LiveGateway

Config = Callable[..., RunConfig]
Left = Callable[[], list[str]]

PROGRAM = """
import asyncio, logging, pathlib, sys
from leyden.config import RunConfig
from leyden.controller.reconcile import run_controller
logging.basicConfig(level="INFO")
config = RunConfig.model_validate_json(pathlib.Path(sys.argv[1]).read_text())
asyncio.run(run_controller(config, sys.argv[2], sys.stdin.readline().strip(), "c", stop=asyncio.Event()))
"""


def start_controller(config: RunConfig, gateway: LiveGateway) -> subprocess.Popen[bytes]:
    """A controller as a process of its own, in the test's folder."""
    path = config.config_dir / "config.json"
    path.write_text(config.model_dump_json())
    with (config.config_dir / "controller.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(path), gateway.url],
            stdin=subprocess.PIPE,
            stderr=log,
            cwd=config.config_dir,
        )
    assert process.stdin is not None
    with process.stdin as key:
        key.write(gateway.key.encode() + b"\n")
    return process


def kill9(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def starts(config: RunConfig) -> dict[str, int]:
    """How often each attempt's harness was started; the harness itself appends a line."""
    return {
        f"{p.parent.parent.name}/{p.parent.name}": len(p.read_text().splitlines())
        for p in config.run_dir.glob("attempts/*/*/starts")
    }


async def wait_until(condition: Callable[[], bool], limit_s: float = 100.0) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110  (processes and files send no event)
            await asyncio.sleep(0.02)


async def appears(path: Path) -> None:
    await wait_until(path.exists)


async def test_restarted_controller_adopts_what_runs_and_what_ended(config: Config, gone: Left) -> None:
    """Kill -9 with 3 live agents: each ends once, none runs a second time."""
    made = config("echo x >> ../starts; while ! test -e ../go; do sleep 0.02; done")
    async with LiveGateway() as gateway:
        for i in range(3):
            gateway.add(f"r{i}")
        first = start_controller(made, gateway)
        for i in range(3):
            await appears(made.run_dir / f"attempts/r{i}/1/starts")
        kill9(first)
        (made.run_dir / "attempts/r0/1/go").touch()  # ends while no controller is there
        await appears(made.run_dir / "attempts/r0/1/exit.json")
        second = start_controller(made, gateway)
        (first_ended,) = await gateway.ended("r0")
        for i in (1, 2):
            (made.run_dir / f"attempts/r{i}/1/go").touch()
        rollouts = await gateway.ended()
        kill9(second)
        async with controlling(made, gateway):
            pass
    assert first_ended.state == "succeeded"
    assert [(r.state, r.attempt, r.reward) for r in rollouts] == [("succeeded", 1, 1.0)] * 3
    assert starts(made) == {"r0/1": 1, "r1/1": 1, "r2/1": 1}


async def test_deadline_holds_over_a_restart(config: Config, gone: Left) -> None:
    made = config("echo x >> ../starts; sleep 300", harness={"timeout_s": 2})
    async with LiveGateway() as gateway:
        gateway.add("r1")
        first = start_controller(made, gateway)
        await appears(made.run_dir / "attempts/r1/1/starts")
        kill9(first)
        async with controlling(made, gateway):
            (rollout,) = await gateway.ended()
    assert (rollout.timed_out, rollout.attempt) == (True, 1)
    facts = json.loads((made.run_dir / "attempts/r1/1/exit.json").read_text())
    assert facts["killed"] == "timeout" and facts["ended"] - facts["started"] >= 1.9


async def test_claim_without_a_start_is_given_back(config: Config, gone: Left) -> None:
    made = config("echo x >> ../starts")
    async with LiveGateway() as gateway:
        gateway.add("r1")
        gateway.claimed("r1")
        gateway.add("theirs")
        gateway.claimed("theirs", "another")
        async with controlling(made, gateway):
            (rollout,) = await gateway.ended("r1")
            assert gateway["theirs"].state == "running"
    assert (rollout.state, rollout.attempt) == ("succeeded", 2)
    assert starts(made) == {"r1/2": 1}


@pytest.mark.slow
async def test_kills_at_any_moment_neither_lose_nor_double_a_run(config: Config, gone: Left) -> None:
    made = config(
        "echo x >> ../starts; sleep 0.1",
        harness={"max_attempts": 50},
        controller={"concurrency": 4},
        grader={"command": ["sh", "-c", _grader("echo x >> ../graded")]},
    )
    rng = random.Random(3)
    async with LiveGateway(max_attempts=50) as gateway:
        for i in range(16):
            gateway.add(f"r{i}")
        ended = asyncio.create_task(gateway.ended(limit_s=500))
        while not ended.done():
            process = start_controller(made, gateway)
            calls = len(gateway.calls) + rng.randrange(1, 12)
            await wait_until(lambda calls=calls: len(gateway.calls) >= calls or ended.done())  # type: ignore[misc]
            await asyncio.sleep(rng.random() * 0.05)
            if rng.random() < 0.3:
                for launcher in launchers(made):
                    launcher.kill()
            kill9(process)
        rollouts = await ended
        async with controlling(made, gateway):
            pass
    assert [r.state for r in rollouts] == ["succeeded"] * 16
    assert set(starts(made).values()) == {1}
    assert {f"{r.rollout_id}/{r.attempt}" for r in rollouts} <= set(starts(made))


def _grader(first: str) -> str:
    return f"{first}; exec {sys.executable} -c 'from leyden.client import post_reward; post_reward(1.0)'"


def launchers(config: RunConfig) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if str(config.run_dir) in " ".join(process.cmdline()) and "leyden_launcher" in process.cmdline()[1]:
                found.append(process)
    return [p for p in found if not any(q.pid == p.ppid() for q in found)]


# The launcher without a controller


class Runner:
    """A backend on a folder of its own that waits for the ends of jobs."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder = folder
        self.ends: dict[str, Exit] = {}
        self.changed = asyncio.Event()
        (folder / "state").mkdir(mode=0o700, parents=True, exist_ok=True)
        environment = dict(os.environ) | settings.pop("environment", {})
        known = {"python": sys.executable, "preload": (), "orphan_grace_s": 60.0} | settings
        self.backend = LauncherClient(
            LauncherSettings(folder / "state", folder / "launcher.log", environment=environment, **known), self.on_end
        )

    def on_end(self, job_id: str, exit_: Exit) -> None:
        assert job_id not in self.ends
        self.ends[job_id] = exit_
        self.changed.set()

    async def __aenter__(self) -> Runner:
        await self.backend.open()
        self.task = asyncio.create_task(self.backend.supervise())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.backend.stop()
        await self.task

    def job(self, name: str, *argv: str, fork: bool = False, learn: bool = False, **env: str) -> Job:
        directory = self.folder / name
        directory.mkdir(exist_ok=True)
        environment = dict(os.environ) | env
        return Job(name, directory, argv, directory, environment, directory / "log", 1 << 20, fork, learn)

    async def run(self, name: str, *argv: str, **options: Any) -> tuple[Exit, str]:
        job = self.job(name, *argv, **options)
        await self.backend.start(job)
        async with asyncio.timeout(100):
            while name not in self.ends:
                self.changed.clear()
                await self.changed.wait()
        return self.ends[name], job.log.read_text()


async def test_launcher_without_controller_ends_with_all_it_started(tmp_path: Path, gone: Left) -> None:
    runner = Runner(tmp_path, orphan_grace_s=0.3)
    await runner.backend.open()
    supervise = asyncio.create_task(runner.backend.supervise())
    await runner.backend.start(runner.job("a", "sh", "-c", "setsid sleep 300 & sleep 300"))
    await runner.backend.close()
    await supervise
    await wait_until(lambda: gone() == [])
    assert Exit.from_json(json.loads((tmp_path / "a/exit.json").read_text())).killed == "orphaned"


async def test_reapers_end_when_no_launcher_comes_back(tmp_path: Path, gone: Left) -> None:
    runner = Runner(tmp_path, orphan_grace_s=0.3)
    await runner.backend.open()
    supervise = asyncio.create_task(runner.backend.supervise())
    await runner.backend.start(runner.job("a", "sh", "-c", "setsid sleep 300 & sleep 300"))
    await wait_until(lambda: any("sleep 300" in line for line in gone()))
    supervise.cancel()
    os.kill(runner.backend._pid, signal.SIGKILL)
    await wait_until(lambda: gone() == [])
    assert Exit.from_json(json.loads((tmp_path / "a/exit.json").read_text())).killed == "orphaned"
    os.waitpid(runner.backend._pid, 0)  # noqa: ASYNC222  (killed above)
    await runner.backend.close()


async def test_an_id_runs_once_whoever_asks(tmp_path: Path, gone: Left) -> None:
    async with Runner(tmp_path) as runner:
        job = runner.job("a", "sh", "-c", "echo x >> starts; sleep 0.2")
        first, second = await asyncio.gather(
            runner.backend.start(job), runner.backend.start(job), return_exceptions=True
        )
        await wait_until(lambda: "a" in runner.ends)
        runner.ends.clear()
        await runner.backend.start(job)  # ended before: the same end again
        await wait_until(lambda: "a" in runner.ends)
    assert first == second
    assert (tmp_path / "a/starts").read_text() == "x\n"
    assert runner.ends["a"].exit_code == 0


async def test_garbage_on_the_socket_does_no_harm(tmp_path: Path, gone: Left) -> None:
    async with Runner(tmp_path) as runner:
        _, writer = await asyncio.open_unix_connection(socket_path(tmp_path / "state"))
        writer.write(b"GET / HTTP/1.1\n\n")
        await writer.drain()
        assert (await runner.run("a", "true"))[0].exit_code == 0
        writer.close()


async def test_second_backend_takes_over(tmp_path: Path, gone: Left) -> None:
    first = Runner(tmp_path)
    await first.backend.open()
    await first.backend.close()
    async with Runner(tmp_path) as second:
        assert second.backend._pid == first.backend._pid
        assert (await second.run("a", "true"))[0].exit_code == 0


def test_long_run_folder_gets_a_short_private_socket(tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 120)
    path = socket_path(deep)
    assert len(os.fsencode(path)) < 100 and path.parent.stat().st_mode & 0o077 == 0
    path.parent.chmod(0o755)
    with pytest.raises(LaunchError, match="is not a private folder of this user"):
        socket_path(deep)
    path.parent.rmdir()
    assert socket_path(tmp_path) == tmp_path / "socket" or len(str(tmp_path)) > 90


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder whose path leaves room for a socket's; it is empty again at the end."""
    with tempfile.TemporaryDirectory(prefix="ly-") as folder:
        yield Path(folder)
        assert list(Path(folder).iterdir()) == []


async def test_long_run_folder_runs(tmp_path: Path, short: Path, gone: Left, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of its socket stays in the temporary folder."""
    folder = tmp_path / ("x" * 120)
    monkeypatch.setattr(tempfile, "tempdir", str(short))
    async with Runner(folder) as runner:
        assert (await runner.run("a", "true"))[0].exit_code == 0


# Preload and fork


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


def targets(pid: int) -> list[str]:
    """What the descriptors of a process refer to."""
    found = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.append(str(path.readlink()))
    return found


async def test_neither_launcher_nor_job_gets_the_descriptors_of_the_starter(tmp_path: Path, gone: Left) -> None:
    descriptors = os.pipe()
    try:
        for fd in descriptors:
            os.set_inheritable(fd, True)
        theirs = f"pipe:[{os.fstat(descriptors[0]).st_ino}]"
        assert theirs in targets(os.getpid())
        async with Runner(tmp_path, preload=("json",)) as runner:
            launchers_own = targets(runner.backend._pid)
            _, text = await runner.run("a", "sh", "-c", "ls -l /proc/self/fd")
    finally:
        for fd in descriptors:
            os.close(fd)
    assert theirs not in launchers_own and theirs not in text
    assert "/dev/null" in launchers_own and "/dev/null" in text


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


async def test_kill_reaches_the_whole_tree_and_says_why(tmp_path: Path, gone: Left) -> None:
    async with Runner(tmp_path) as runner:
        await runner.backend.start(runner.job("a", "sh", "-c", "trap '' TERM; setsid sleep 300 & echo on; sleep 300"))
        await wait_until(lambda: (tmp_path / "a/log").exists() and (tmp_path / "a/log").read_text() == "on\n")
        runner.backend.kill("a", "timeout", 0.2)
        await wait_until(lambda: "a" in runner.ends)
        assert [line for line in gone() if "sleep 300" in line] == []
    assert runner.ends["a"].killed == "timeout"


@pytest.mark.parametrize(("keep", "kept"), [("none", [False, False]), ("failed", [False, True]), ("all", [True, True])])
async def test_what_a_killed_controller_left_is_cleaned_up_by_the_policy(
    config: Config, gone: Left, keep: str, kept: list[bool]
) -> None:
    """Ended, but the controller was killed before it removed the workspaces; a live attempt's stays."""
    made = config("while ! test -e ../go; do sleep 0.02; done", workspace={"keep": keep})
    async with LiveGateway() as gateway:
        for name, exit_code in (("good", 0), ("bad", 1)):
            gateway.add(name)
            gateway.over(name, exit_code)
            (made.run_dir / "attempts" / name / "1" / "workspace").mkdir(parents=True)
            (made.run_dir / "attempts" / name / "1" / "settled").touch()  # an agent can say so as well
        gateway.add("live")
        folder = made.run_dir / "attempts"
        async with controlling(made, gateway):
            for name in ("good", "bad"):
                await appears(made.run_dir / "settled" / f"{name}.1")
            await appears(folder / "live" / "1" / "workspace")
            assert [(folder / name / "1" / "workspace").exists() for name in ("good", "bad")] == kept
            (folder / "live" / "1" / "go").touch()
            await gateway.ended("live")
            await appears(made.run_dir / "settled/live.1")
