"""What an agent leaves is a stranger's: it is graded as it lies there, and ends nothing but its own attempt."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from leyden.config import RunConfig
from leyden.controller import workspace
from leyden.controller.backends.leyden_launcher.json_files import FAILED
from leyden.controller.backends.leyden_launcher.removal import remove
from leyden.controller.backends.local import LocalBackend
from leyden.controller.jobs import TIMEOUT, Exit, as_ordered, read_exit
from leyden.controller.paths import attempt_paths
from leyden.records import Rollout
from tests.controller.conftest import controlling
from tests.controller.hostile import KILL_BOTH, KILLERS, LEFTOVERS, NEST, STAYS, Leftover
from tests.controller.live_gateway import LiveGateway

Config = Callable[..., RunConfig]
Left = Callable[[], list[str]]
AS_ROOT = os.getuid() == 0
SEES_TASK = [
    sys.executable,
    "-c",
    "import json, os; from leyden.client import post_reward; "
    "post_reward(json.load(open(os.environ['LEYDEN_TASK']))['answer'] + len(os.listdir('.')) / 4)",
]


def nested(folder: Path, depth: int, name: str = "d") -> None:
    folder.mkdir()
    subprocess.run([sys.executable, "-c", NEST.format(n=depth, name=name)], cwd=folder, check=True)


@pytest.fixture(autouse=True)
def _etc_stays() -> Iterator[None]:
    """Scripts put links to /etc in the way: nothing is written through one."""
    before = Path("/etc").stat().st_mtime_ns
    yield
    assert Path("/etc").stat().st_mtime_ns == before


async def two_rollouts(config: RunConfig) -> list[Rollout]:
    """The hostile one, then another in the same controller."""
    async with LiveGateway() as gateway:
        gateway.add("r1", {"answer": 7.0, "hostile": True})
        async with controlling(config, gateway):
            await gateway.ended("r1")
            gateway.add("r2", {"answer": 8.0})
            return await gateway.ended()


@pytest.mark.parametrize("hostile", [one for one in LEFTOVERS if one.possible])
async def test_what_an_agent_left_is_graded_as_it_is(config: Config, gone: Left, hostile: Leftover) -> None:
    script = f"if grep -q hostile ../task.json; then {hostile.script}; fi"
    made = config(script, grader={"command": SEES_TASK}, workspace={"keep": "none"})
    first, second = await two_rollouts(made)
    assert (first.state, first.attempt, first.reward) == ("succeeded", 1, 7.0 + hostile.files / 4)
    assert (second.state, second.attempt, second.reward) == ("succeeded", 1, 8.0)
    for rollout_id in ("r1", "r2"):
        paths = attempt_paths(made.run_dir, rollout_id, 1)
        assert paths.settled.exists() and not paths.workspace.exists()


@pytest.mark.parametrize("script", STAYS)
async def test_a_time_out_ends_what_stops_those_who_watch_it(config: Config, gone: Left, script: str) -> None:
    made = config(script, harness={"timeout_s": 1})
    async with LiveGateway() as gateway:
        gateway.add("r1")
        async with controlling(made, gateway):
            (rollout,) = await gateway.ended()
    assert (rollout.timed_out, rollout.attempt, rollout.reward) == (True, 1, 1.0)


@pytest.mark.parametrize("script", [*KILLERS, *KILL_BOTH])
async def test_who_kills_what_watches_it_has_failed_and_is_graded(config: Config, gone: Left, script: str) -> None:
    made = config(script)
    async with LiveGateway() as gateway:
        gateway.add("r1")
        async with controlling(made, gateway):
            (rollout,) = await gateway.ended("r1")
    assert (rollout.failure, rollout.attempt, rollout.reward) == ("agent", 1, 1.0)
    assert (rollout.exit_code, rollout.timed_out) == (-9, False)


def test_a_reaper_that_failed_makes_its_job_void() -> None:
    failed = Exit(None, None, 1.0, 2.0, killed=FAILED)
    assert as_ordered(failed, None) == failed


def test_what_was_ordered_counts_whatever_the_job_wrote_about_it() -> None:
    assert as_ordered(Exit(None, 9, 1.0, 2.0, killed="cancelled"), TIMEOUT) == Exit(None, 9, 1.0, 2.0, killed=TIMEOUT)


async def test_a_child_of_its_own_session_dies_also_when_launcher_and_reaper_were_killed(
    config: Config, gone: Left
) -> None:
    script = "setsid sleep 300 & sleep 0.3; kill -9 $(ps -o ppid= -p $PPID) $PPID; sleep 300"
    made = config(script, harness={"max_attempts": 1})
    async with LiveGateway(max_attempts=1) as gateway:
        gateway.add("r1")
        async with controlling(made, gateway):
            (rollout,) = await gateway.ended()
            assert [line for line in gone() if "sleep 300" in line] == []
    assert (rollout.failure, rollout.reward) == ("agent", 1.0)


def _text(content: str) -> Callable[[Path], Any]:
    return lambda path: path.write_text(content)


@pytest.mark.parametrize(
    "make",
    [
        *map(_text, ["[]", "{", '{"started": "x"}', "[" * 100_000, '{"started": 1, "ended": NaN}', "\0" * (2 << 20)]),
        Path.mkdir,
        lambda path: path.symlink_to(path),
        os.mkfifo,
    ],
)
async def test_an_exit_that_is_none_makes_a_lost_attempt(
    config: Config, gone: Left, make: Callable[[Path], Any]
) -> None:
    """Also of an earlier life of the controller, which must start all the same."""
    made = config()
    paths = attempt_paths(made.run_dir, "r1", 1)
    paths.root.mkdir(parents=True)
    make(paths.exit)
    assert read_exit(paths.root) is None
    async with LiveGateway() as gateway:
        gateway.add("r1")
        gateway.claimed("r1")
        async with controlling(made, gateway):
            (rollout,) = await gateway.ended("r1")
            gateway.add("r2")
            (second,) = await gateway.ended("r2")
    assert (rollout.attempt, rollout.reward, second.reward) == (2, 1.0, 1.0)


async def test_garbage_of_an_earlier_life_ends_no_controller(config: Config, gone: Left) -> None:
    made = config()
    jobs = made.run_dir / "launcher/jobs"
    attempts = made.run_dir / "attempts"
    for folder in (jobs / "x.1.json", jobs / "y", attempts / "bad name?" / "1", attempts / "r9" / ("1" * 200)):
        folder.mkdir(parents=True)
    (jobs / "z.1.json").write_text('{"id": "z.1", "pid": "x"}')
    (jobs / "u.1.json").write_text("[]")
    (attempts / "r8").write_text("a file")
    (attempts / "r7").mkdir()
    (attempts / "r7/1").write_text("a file")
    async with LiveGateway() as gateway:
        gateway.add("r7")
        gateway.add("r8")
        async with controlling(made, gateway):
            ended = await gateway.ended()
    assert [(r.state, r.attempt, r.reward) for r in ended] == [("succeeded", 1, 1.0)] * 2
    assert list(jobs.iterdir()) == []


@pytest.mark.parametrize("method", ["start_harness", "start_grader", "forget", "find"])
async def test_an_error_that_nobody_expected_voids_the_attempt_and_frees_its_slot(
    config: Config, gone: Left, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    calls = []
    real: Callable[..., Any] = getattr(LocalBackend, method)

    def once(self: LocalBackend, *args: Any, **more: Any) -> Any:
        calls.append(args)
        if len(calls) == 1:
            raise RecursionError(f"in {method}")
        return real(self, *args, **more)

    monkeypatch.setattr(LocalBackend, method, once)
    made = config(controller={"concurrency": 1})
    async with LiveGateway() as gateway:
        gateway.add("r1")
        if method == "find":
            gateway.claimed("r1")
        async with controlling(made, gateway):
            (first,) = await gateway.ended("r1")
            gateway.add("r2")
            (second,) = await gateway.ended("r2")
    assert (first.state, first.reward, first.attempt) == ("succeeded", 1.0, 1 if method == "forget" else 2)
    assert (second.state, second.reward) == ("succeeded", 1.0)


def test_an_attempt_whose_folder_is_a_file_is_read_and_settled(config: Config) -> None:
    made = config()
    paths = attempt_paths(made.run_dir, "r1", 1)
    paths.root.parent.mkdir(parents=True)
    paths.root.write_text("x")
    assert read_exit(paths.root) is None
    assert workspace.unsettled(made.run_dir) == [("r1", 1)]
    workspace.settle(paths)
    assert workspace.unsettled(made.run_dir) == [] and paths.root.read_text() == "x"


def test_a_folder_of_any_depth_is_removed(tmp_path: Path) -> None:
    nested(tmp_path / "w", 3000, "d" * 100)
    remove(str(tmp_path / "w"))
    assert list(tmp_path.iterdir()) == []


def test_what_a_link_names_stays(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/file").touch()
    (tmp_path / "w").mkdir()
    (tmp_path / "w/link").symlink_to(tmp_path / "outside")
    (tmp_path / "link").symlink_to(tmp_path / "outside")
    remove(str(tmp_path / "w"))
    remove(str(tmp_path / "link"))
    assert sorted(tmp_path.rglob("*")) == [tmp_path / "outside", tmp_path / "outside/file"]


MODES = """
import os, sys
sys.path.insert(0, sys.argv[1])
from removal import remove
os.mkdir("w"); os.mkdir("w/a"); os.mkdir("w/a/b"); os.mkdir("w/a/b/c"); open("w/a/b/f", "w").close()
for path in ("w/a/b/c", "w/a/b", "w/a", "w"):
    os.chmod(path, int(sys.argv[2], 8))
remove("w")
print(os.listdir("."))
"""


@pytest.mark.parametrize("mode", ["0300", "0500", "0000", "0600"])
def test_a_plain_user_removes_folders_of_any_mode(tmp_path_factory: pytest.TempPathFactory, mode: str) -> None:
    own = 65534 if AS_ROOT else os.getuid()
    folder = Path("/tmp") / f"leyden-test-{os.getpid()}-{mode}"
    folder.mkdir()
    os.chown(folder, own, -1)
    source = Path(workspace.__file__).parent / "backends/leyden_launcher/removal.py"
    shutil.copy(source, folder / "removal.py")
    (folder / "removal.py").chmod(0o644)
    try:
        answer = subprocess.run(
            ["/usr/bin/env", "python3", "-B", "-c", MODES, str(folder), mode],
            cwd=folder, capture_output=True, text=True, user=own, check=False,
        )  # fmt: skip
        assert answer.stdout == "['removal.py']\n", answer.stderr
    finally:
        remove(str(folder))
