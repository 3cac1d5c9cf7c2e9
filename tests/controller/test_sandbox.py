"""Bubblewrap for real: what a harness and its grader see, reach and leave; the arguments by their values."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from leyden.client import Rollout
from leyden.config import RunConfig
from leyden.controller.backends import sandbox
from leyden.controller.backends.launcher_client import LauncherClient
from leyden.controller.backends.local import sandbox_view
from leyden.controller.backends.sandbox import View, inner_url, mounts, outermost, private, wrap
from leyden.controller.jobs import Job
from leyden.errors import ConfigError
from leyden.gateway.render import ModelRenderer
from leyden.run_file import parse
from leyden.types import RolloutState
from tests.controller.conftest import controlling
from tests.controller.live_gateway import LiveGateway
from tests.controller.programs import wait_until
from tests.controller.test_runs import attempt_dir, text
from tests.controller.test_runs import run as run_fake
from tests.controller.test_with_gateway import MINI_CONFIG, run
from tests.gateway.conftest import ScriptedEngine, make_config, serving

Config = Callable[..., RunConfig]
Left = Callable[[], list[str]]
SANDBOX = {"sandbox": "bubblewrap"}


def works() -> bool:
    try:
        sandbox._try(shutil.which("bwrap") or "no-bwrap")
    except ConfigError:
        return False
    return True


needs_bwrap = pytest.mark.skipif(not works(), reason="bubblewrap is not installed or cannot make a sandbox here")


# The arguments


def job(folder: Path, **changes: Any) -> Job:
    known: dict[str, Any] = {
        "job_id": "r.1", "directory": folder, "argv": ("agent", "--go"), "cwd": folder / "workspace",
        "env": {"HOME": "/home/me", "XDG_CACHE_HOME": "/home/me/.cache", "PATH": "/usr/bin"}, "log": folder / "log",
        "log_bytes": 1000, "fork": True, "learn": True, "folders": (folder / "workspace",),
        "files": (folder / "task.json",),
    }  # fmt: skip
    return Job(**(known | changes))


def view(run_dir: Path, **changes: Any) -> View:
    known: dict[str, Any] = {
        "bwrap": "/usr/bin/bwrap", "python": "/venv/bin/python", "run_dir": run_dir, "gateway": ("10.0.0.1", 8000),
        "readable": (Path("/venv"),), "grader_readable": (), "hidden": (),
    }  # fmt: skip
    return View(**(known | changes))


def test_the_wrapped_job() -> None:
    folder = Path("/runs/1/attempts/r/1")
    made = wrap(
        job(folder), view(Path("/runs/1")), "http://127.0.0.1:8000", folder / "tmp", readable=[Path("/venv")], given=()
    )
    assert made.argv[0] == "/usr/bin/bwrap"
    end = made.argv[made.argv.index("--") + 1 :]
    assert end == ("/venv/bin/python", "-I", "-S", str(sandbox.FIRST_PROGRAM), "8000", "agent", "--go")
    assert made.env == {"HOME": "/tmp", "TMPDIR": "/tmp", "PATH": "/usr/bin"}
    assert (made.fork, made.learn, made.forward) == (False, False, ("10.0.0.1", 8000))
    assert made.folders == (folder / "workspace", folder / "tmp")
    for flag in ("--unshare-net", "--unshare-pid", "--unshare-user", "--die-with-parent"):
        assert flag in made.argv
    kept = wrap(job(folder), view(Path("/runs/1")), "http://127.0.0.1:1", folder / "tmp", readable=[], given=["HOME"])
    assert kept.env["HOME"] == "/home/me"


def test_a_run_folder_inside_a_readable_one_is_hidden_before_the_workspace_is_shown() -> None:
    run_dir = Path("/project/run")
    folder = run_dir / "attempts/r/1"
    found = mounts(job(folder), view(run_dir), folder / "tmp", [Path("/project")])
    order = [found.index(str(p)) for p in (Path("/project"), run_dir, folder / "workspace", folder / "task.json")]
    assert order == sorted(order)
    assert found[order[1] - 1] == "--tmpfs" and found[order[2] - 1] == "--bind" and found[order[3] - 1] == "--ro-bind"
    assert found[-6:] == ["--remount-ro", str(run_dir), "--remount-ro", "/", "--chdir", str(folder / "workspace")]
    assert "--tmpfs" not in mounts(job(folder), view(run_dir), folder / "tmp", [Path("/elsewhere")])


def test_small_decisions(tmp_path: Path) -> None:
    assert inner_url("http://gateway.example:9000") == "http://127.0.0.1:9000"
    assert inner_url("http://127.0.0.1") == "http://127.0.0.1:8080"  # nobody may listen on port 80 there
    paths = [Path("/usr/lib/x"), Path("/srv/a/b"), Path("/srv/a"), Path("/srv/ab")]
    assert outermost(paths) == (Path("/srv/a"), Path("/srv/ab"))
    (tmp_path / "folder").mkdir(mode=0o755)
    for name, mode in (("shadow", 0o640), ("hosts", 0o644), ("folder/key", 0o600), ("folder/cert", 0o644)):
        (tmp_path / name).touch()
        (tmp_path / name).chmod(mode)
    (tmp_path / "private").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("shadow")
    assert private(tmp_path) == [tmp_path / "folder/key", tmp_path / "private", tmp_path / "shadow"]


def test_no_bubblewrap_says_how_to_install_it(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match=r"harness\.sandbox: bubblewrap is not installed.*apt-get install bubblewrap"):
        sandbox_view(config(harness=SANDBOX), sys.executable, "http://127.0.0.1:1")


def test_bubblewrap_that_cannot_work_says_why(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'No permissions to create new namespace' >&2; exit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(ConfigError, match="No permissions to create new namespace; it needs user namespaces"):
        sandbox_view(config(harness=SANDBOX), sys.executable, "http://127.0.0.1:1")


@needs_bwrap
def test_what_cannot_be_sandboxed_is_refused(config: Config) -> None:
    with pytest.raises(ConfigError, match="a forked interpreter is outside the sandbox already"):
        config(harness=SANDBOX | {"preload": ["json"]})
    with pytest.raises(ConfigError, match=r"must be http://host:port; it is 'https://gateway\.example'"):
        sandbox_view(config(harness=SANDBOX), sys.executable, "https://gateway.example")
    with pytest.raises(ConfigError, match=r"harness\.readable: .*/nothing does not exist"):
        made = config(harness=SANDBOX | {"readable": ["nothing"]})
        sandbox_view(made, sys.executable, "http://127.0.0.1:1")


# For real


@pytest.fixture
def elsewhere() -> Iterator[int]:
    """The port of a server that is not the gateway."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


async def told(made: RunConfig, tmp_path: Path) -> str:
    """What the harness of one rollout printed."""
    await run_fake(made)
    return (attempt_dir(made) / "harness.log").read_text()


@needs_bwrap
async def test_no_address_but_the_gateway(config: Config, gone: Left, tmp_path: Path, elsewhere: int) -> None:
    """Also not where another server of this machine listens, nor a route out; the gateway answers."""
    code = f"""
import os, socket, urllib.request as u
for address in (("127.0.0.1", {elsewhere}), ("192.0.2.1", 80)):
    try:
        socket.create_connection(address, 5)
        print("connected")
    except OSError as error:
        print(error.strerror)
print(u.urlopen(os.environ["LEYDEN_URL"] + "/health").read())
print([line.split(":")[0].strip() for line in open("/proc/net/dev").read().splitlines()[2:]])
"""
    made = config(harness=SANDBOX | {"command": ["python", "-c", code]})
    assert (await told(made, tmp_path)).splitlines() == [
        "Connection refused",
        "Network is unreachable",
        """b'{"status":"ok"}'""",
        "['lo']",
    ]


WRITES = """
echo mine > here; echo mine > /tmp/there; cat here
for path in /usr/x /etc/x /x /run/x; do touch $path 2>/dev/null && echo wrote $path; done
cat {folder}/secret {folder}/run/secret /etc/shadow /root/.bashrc 2>/dev/null
touch {folder}/x; ls /; echo; id -u; cat $LEYDEN_TASK; echo; touch $LEYDEN_TASK 2>/dev/null && echo wrote task
"""


@needs_bwrap
async def test_the_workspace_is_the_one_folder_to_write(config: Config, gone: Left, tmp_path: Path) -> None:
    """Besides a /tmp of its own; this test's folder lies below the machine's /tmp."""
    made = config(WRITES.format(folder=tmp_path), harness=SANDBOX, workspace={"keep": "all"})
    made.run_dir.mkdir()
    for folder in (tmp_path, made.run_dir):
        (folder / "secret").write_text("CANARY-123")
    first, *names, nothing, uid, task = (await told(made, tmp_path)).splitlines()
    assert (first, nothing, uid, task) == ("mine", "", str(os.getuid()), "{}")
    assert {"usr", "etc", "proc", "dev", "tmp"} <= set(names) and not {"home", "var", "sys", "mnt"} & set(names)
    assert (attempt_dir(made) / "workspace" / "here").read_text() == "mine\n"
    for path in (attempt_dir(made) / "tmp", tmp_path / "x", tmp_path.parents[2] / "there"):
        assert not path.exists()


OPENS = """
import os, stat
def opens(path):
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY))
        return True
    except OSError:
        return False
for top in ("/proc", "/sys", "/dev"):
    for folder, folders, files in os.walk(top):
        folders[:] = [f for f in folders if not f.isdigit() and f not in ("self", "thread-self")]
        for path in (os.path.join(folder, name) for name in files):
            if not stat.S_ISLNK(os.lstat(path).st_mode) and opens(path):
                print(path)
        try:
            os.mkdir(os.path.join(folder, "made"))
            print(folder)
            os.rmdir(os.path.join(folder, "made"))
        except OSError:
            pass
for path in ("/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/proc/1/mem", "/proc/sys/vm/drop_caches"):
    assert not opens(path), path
for path in ("/dev/stdout", "/dev/shm/own"):
    open(path, "w").close()
"""


@needs_bwrap
async def test_nothing_of_the_kernel_s_can_be_opened_for_writing(config: Config, gone: Left, tmp_path: Path) -> None:
    """Whoever has started Leyden: all of /proc but the folders of the sandbox's own processes, /sys and /dev."""
    devices = {f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom", "tty", "console", "ptmx")}
    made = config(harness=SANDBOX | {"command": ["python", "-c", OPENS]}, workspace={"keep": "all"})
    found = set((await told(made, tmp_path)).splitlines())
    assert found - devices - {"/dev/pts/ptmx"} == {"/dev/shm"}


@needs_bwrap
async def test_processes_of_others_are_not_there(config: Config, gone: Left, tmp_path: Path) -> None:
    """Its parent in there is the sandbox's first process, which it can neither end nor look into."""
    script = "cat /proc/[0-9]*/comm > seen; sort seen; kill -9 $PPID; cat /proc/$PPID/environ; sleep 0.2; echo alive"
    printed = (await told(config(script, harness=SANDBOX), tmp_path)).splitlines()
    assert printed == ["python", "sh", "cat: /proc/1/environ: Permission denied", "alive"]


@needs_bwrap
@pytest.mark.parametrize(
    ("script", "code", "reason"),
    [
        ("kill -SEGV $$", -11, "killed by SIGSEGV"),
        ("kill -9 $$", -9, "killed by SIGKILL"),
        ("exit 137", 137, "exit 137"),
        ("sh -c 'kill -9 $$'; exit $?", 137, "exit 137; last words: Killed"),
        ("(sleep 0.05; kill -9 $$) & exec sleep 300", -9, "killed by SIGKILL"),
    ],
)
async def test_a_death_by_signal_is_told_as_without_a_sandbox(
    config: Config, gone: Left, script: str, code: int, reason: str
) -> None:
    for rollout_id, sandboxed in (("in", SANDBOX), ("out", {})):
        (rollout,) = await run_fake(config(script, harness=sandboxed), rollout_id)
        assert (rollout.failure, rollout.exit_code, rollout.reason) == ("agent", code, reason), rollout_id


@needs_bwrap
async def test_a_harness_that_is_told_to_end_has_its_grace(
    config: Config, gone: Left, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM reaches the harness, not what holds its sandbox."""
    monkeypatch.setattr(LauncherClient.kill, "__defaults__", (60.0,))
    made = config("trap 'echo told; exit 0' TERM; echo on; sleep 300 & wait", harness=SANDBOX)
    log = attempt_dir(made) / "harness.log"
    async with LiveGateway() as gateway:
        gateway.add("r1")
        async with controlling(made, gateway):
            await wait_until(lambda: "on" in text(log))
            gateway.cancel("r1")
            await wait_until(lambda: "told" in text(log))


@needs_bwrap
async def test_nothing_of_a_sandbox_outlives_it(config: Config, gone: Left) -> None:
    """Neither at the deadline nor where the reaper itself is killed; a crash keeps its exit code."""
    made = config("trap '' TERM; echo on; setsid sleep 300 & sleep 300", harness=SANDBOX | {"timeout_s": 0.5})
    async with LiveGateway() as gateway:
        gateway.add("r1")
        gateway.hold_all()
        async with controlling(made, gateway):
            await wait_until(lambda: "on" in text(attempt_dir(made) / "harness.log"))
            gateway.release("r1")
            (rollout,) = await gateway.ended()
    assert (rollout.timed_out, rollout.failure, rollout.reward) == (True, "agent", 1.0)
    (rollout,) = await run_fake(config("exit 3", harness=SANDBOX), "r2")
    assert (rollout.exit_code, rollout.failure) == (3, "agent")
    async with LiveGateway(max_attempts=1) as gateway:
        gateway.add("r3")
        made = config("echo on; setsid sleep 300 & sleep 300", harness=SANDBOX | {"max_attempts": 1})
        async with controlling(made, gateway):
            await wait_until(lambda: "on" in text(attempt_dir(made, "r3") / "harness.log"))
            (bwrap,) = _outer_bwraps(str(attempt_dir(made, "r3")))
            psutil.Process(bwrap.ppid()).send_signal(signal.SIGKILL)
            (rollout,) = await gateway.ended()
            assert [line for line in gone() if "sleep 300" in line] == []
    assert rollout.failure == "agent"


def _outer_bwraps(words: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.name() == "bwrap" and words in " ".join(process.cmdline()):
                found.append(process)
    return [p for p in found if p.ppid() not in {q.pid for q in found}]


@needs_bwrap
async def test_a_command_that_is_missing_is_infrastructure(config: Config, gone: Left) -> None:
    made = config(harness=SANDBOX | {"command": ["no-such-agent"], "max_attempts": 1})
    (rollout,) = await run_fake(made)
    assert rollout.failure == "infrastructure"
    assert rollout.reason.startswith("cannot start 'no-such-agent' in the sandbox: No such file or directory")


@needs_bwrap
async def test_a_sandbox_that_cannot_be_made_is_infrastructure(
    config: Config, gone: Left, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "ISOLATION", (*sandbox.ISOLATION, "--ro-bind", "/no-such-folder", "/x"))
    made = config(harness=SANDBOX | {"max_attempts": 1})
    monkeypatch.setattr(sandbox, "_try", lambda bwrap: None)
    (rollout,) = await run_fake(made)
    assert rollout.failure == "infrastructure"
    assert rollout.reason.startswith("the sandbox could not be made; bwrap's reason is in the log")
    assert "no-such-folder" in (attempt_dir(made) / "harness.log").read_text()


@needs_bwrap
async def test_the_grader_is_in_a_sandbox_of_its_own(
    config: Config, gone: Left, tmp_path: Path, elsewhere: int
) -> None:
    """It finds the harness's workspace, log and exit, not its /tmp; it reports through the gateway's port."""
    (tmp_path / "grading.py").write_text(
        "import os, pathlib, socket\n"
        "def grade(task, workspace):\n"
        "    assert (workspace / 'answer').read_text() == 'yes'\n"
        "    assert not pathlib.Path('/tmp/planted').exists()\n"
        "    assert 'printed' in pathlib.Path(os.environ['LEYDEN_HARNESS_LOG']).read_text()\n"
        "    assert '\"exit_code\": 0' in pathlib.Path(os.environ['LEYDEN_EXIT']).read_text()\n"
        f"    assert socket.socket().connect_ex(('127.0.0.1', {elsewhere})) != 0\n"
        f"    assert not pathlib.Path({str(tmp_path)!r}, 'run', 'secret').exists()\n"
        "    return 0.25\n"
    )
    made = config(
        "echo printed; printf yes > answer; touch /tmp/planted",
        harness=SANDBOX,
        grader={"function": "grading:grade", "max_tries": 1},
        workspace={"keep": "all"},
    )
    made.run_dir.mkdir()
    (made.run_dir / "secret").touch()
    (rollout,) = await run_fake(made)
    assert (rollout.state, rollout.reward) == ("succeeded", 0.25), text(attempt_dir(made) / "grade/grade.log")
    assert not (attempt_dir(made) / "grade" / "tmp").exists()


@needs_bwrap
async def test_limits_hold_in_the_sandbox(config: Config, gone: Left) -> None:
    made = config(
        "head -c 3000000 /dev/zero > /tmp/big; sleep 300", harness=SANDBOX | {"limits": {"workspace_bytes": 1_000_000}}
    )
    (rollout,) = await run_fake(made)
    assert rollout.reason.startswith("over harness.limits.workspace_bytes 1000000 (3")


OPENAI = """
import json, openai, os
client = openai.OpenAI()
reply = client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "hi"}])
print(reply.choices[0].message.content)
stream = client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "ho"}], stream=True)
print("".join(c.choices[0].delta.content or "" for c in stream if c.choices))
"""


@needs_bwrap
@pytest.mark.slow
async def test_the_openai_sdk_through_the_real_gateway(tmp_path: Path, tokenizer_path: Path, gone: Left) -> None:
    (tmp_path / "agent.py").write_text(OPENAI)
    config = make_config(
        tmp_path,
        tokenizer_path,
        harness=SANDBOX | {"command": ["python", "{{ config_dir }}/agent.py"], "readable": ["agent.py"]},
        grader={"command": [sys.executable, "-c", "from leyden.client import post_reward; post_reward(1)"]},
    )
    renderer = ModelRenderer(str(tokenizer_path), "qwen3", "template")
    async with serving(config, renderer, engine=ScriptedEngine(renderer, ["one", "two"])) as gateway:
        (rollout,) = await run(gateway, config, 1, {})
    log = _log(config, rollout)
    assert (rollout.state, rollout.turns, rollout.reward) == (RolloutState.SUCCEEDED, 2, 1.0), log
    assert log == "one\ntwo\n"


@needs_bwrap
@pytest.mark.slow
async def test_mini_in_the_sandbox(tmp_path: Path, tokenizer_path: Path, gone: Left) -> None:
    (tmp_path / "mini.yaml").write_text(MINI_CONFIG)
    config = make_config(
        tmp_path,
        tokenizer_path,
        harness=SANDBOX | {
            "command": [
                "mini", "--config={{ config_dir }}/mini.yaml", "--task={{ task.prompt }}", "--yolo",
                "--exit-immediately", "--output={{ workspace }}/trajectory.json",
            ],
            "env": {
                "LITELLM_LOCAL_MODEL_COST_MAP": "True",
                "MSWEA_CONFIGURED": "true",
                "MSWEA_GLOBAL_CONFIG_DIR": "/tmp/mini",
                "MSWEA_SILENT_STARTUP": "1",
            },
            "readable": ["mini.yaml"],
        },
        grader={"command": ["sh", "-c", f"test -e made && {sys.executable} -c '{POST}'"]},
    )  # fmt: skip
    renderer = ModelRenderer(str(tokenizer_path), "qwen3", "template")
    replies = ["```bash\ntouch made\n```", "```bash\necho COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\n```"]
    async with serving(config, renderer, engine=ScriptedEngine(renderer, list(replies))) as gateway:
        (rollout,) = await run(gateway, config, 1, {"prompt": "make it"})
    assert (rollout.state, rollout.turns, rollout.reward) == (RolloutState.SUCCEEDED, 2, 1.0), _log(config, rollout)


POST = "from leyden.client import post_reward; post_reward(1)"


def _log(config: RunConfig, rollout: Rollout) -> str:
    return (config.run_dir / "attempts" / rollout.rollout_id / "1" / "harness.log").read_text()


def test_readable_paths_are_a_setting() -> None:
    made = parse(
        {"run_dir": "r", "model": {"path": "m"}, "data": {"train": "t"}, "grader": {"command": ["true"]},
         "harness": {"command": ["true"], "sandbox": "bubblewrap", "readable": ["agents", "/srv/data"]}}
    )  # fmt: skip
    assert made.harness.readable == [Path("agents"), Path("/srv/data")]
