"""Limits of an attempt: by cgroup v1 or v2 where this user may make groups, by looking at the disk everywhere."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from leyden.config import RunConfig
from leyden.controller.backends.leyden_launcher import cgroups
from leyden.controller.backends.leyden_launcher.disk import DiskWatch, unlinked, used
from leyden.controller.backends.leyden_launcher.removal import remove
from leyden.errors import LaunchError
from tests.controller.conftest import GRADER, controlling
from tests.controller.live_gateway import LiveGateway
from tests.controller.programs import Runner, kill9, launchers, start_controller, wait_until
from tests.controller.test_runs import attempt_dir, run
from tests.controller.test_sandbox import needs_bwrap

Config = Callable[..., RunConfig]
Left = Callable[[], list[str]]
MIB = 2**20
ALL = {"memory_bytes": 64 * MIB, "cpus": 1.5, "pids": 40}
GROUPS = Path("/sys/fs/cgroup")
EAT = f"{sys.executable} -c 'x = bytearray(400 << 20)'"


def groups_possible(tmp: str = "/leyden-probe") -> bool:
    groups = cgroups.Cgroups(tmp)
    problem = groups.open(ALL)
    groups.close()
    return problem is None


needs_groups = pytest.mark.skipif(not groups_possible(), reason="no cgroup can be made here")


def groups_of(config: RunConfig) -> list[str]:
    """The folders of the run's control groups, in all hierarchies."""
    name = cgroups.Cgroups(str(config.run_dir / "launcher")).name
    return [path for path, _, _ in os.walk(GROUPS) if name in path]


# Decisions, from texts


V1_MOUNTS = """\
30 25 0:26 / /sys/fs/cgroup ro,nosuid - tmpfs tmpfs ro,mode=755
31 30 0:27 / /sys/fs/cgroup/systemd rw shared:9 - cgroup cgroup rw,xattr,name=systemd
32 30 0:28 / /sys/fs/cgroup/cpu,cpuacct rw shared:10 - cgroup cgroup rw,cpu,cpuacct
33 30 0:29 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory
34 30 0:30 /docker/abc /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids
35 30 0:31 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw
"""
V1_OWN = """\
5:pids:/docker/abc/inner
4:memory:/user.slice/me
3:cpu,cpuacct:/
1:name=systemd:/user.slice
0::/user.slice
"""


def test_v1_groups_are_found_below_the_own_ones() -> None:
    """Also where a hierarchy is mounted from a folder in it, as in containers."""
    assert cgroups.find(V1_MOUNTS, V1_OWN) == {
        "cpu": (1, "/sys/fs/cgroup/cpu,cpuacct"),
        "memory": (1, "/sys/fs/cgroup/memory/user.slice/me"),
        "pids": (1, "/sys/fs/cgroup/pids/inner"),
    }


def test_settings_of_both_versions() -> None:
    limits = {"memory_bytes": 1000, "cpus": 0.25, "pids": 7, "workspace_bytes": 5}
    assert cgroups.controllers(limits) == ["memory", "cpu", "pids"]
    assert cgroups.settings(limits, "memory", 1) == [
        ("memory.limit_in_bytes", "1000"),
        ("memory.memsw.limit_in_bytes", "1000"),
    ]
    assert cgroups.settings(limits, "cpu", 1) == [("cpu.cfs_period_us", "100000"), ("cpu.cfs_quota_us", "25000")]
    assert cgroups.settings(limits, "pids", 1) == cgroups.settings(limits, "pids", 2) == [("pids.max", "7")]
    assert cgroups.settings(limits, "memory", 2) == [("memory.max", "1000"), ("memory.swap.max", "0")]
    assert cgroups.settings(limits, "cpu", 2) == [("cpu.max", "25000 100000")]


# Version 2, on a folder that looks like it


class V2:
    """A folder in place of a v2 hierarchy: files take what is written, folders go with their files."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch, *, controllers: str = "cpu memory pids") -> None:
        self.own = root / "cgroup" / "user.slice" / "run.scope"
        self.own.mkdir(parents=True)
        (self.own / "cgroup.controllers").write_text(controllers + "\n")
        (self.own / "cgroup.procs").write_text("")
        (self.own.parent / "cgroup.procs").write_text("")
        self.proc = root / "proc"
        self.proc.mkdir()
        (self.proc / "cgroup").write_text("0::/user.slice/run.scope\n")
        (self.proc / "mountinfo").write_text(f"30 25 0:26 / {root}/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw\n")
        remove = os.rmdir

        def rmdir(path: str) -> None:
            for entry in Path(path).iterdir():
                if entry.is_file():
                    entry.unlink()
            remove(path)

        monkeypatch.setattr(os, "rmdir", rmdir)
        self.groups = cgroups.Cgroups("/run/launcher", str(self.proc))

    @property
    def run(self) -> Path:
        return self.own / self.groups.name


def test_v2_group_of_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    v2 = V2(tmp_path, monkeypatch)
    assert v2.groups.open(ALL) is None
    assert (v2.own / "cgroup.subtree_control").read_text() == "+memory +cpu +pids"
    assert (v2.run / "cgroup.subtree_control").read_text() == "+memory +cpu +pids"
    group = v2.groups.group("r1.1", ALL)
    assert list(group.folders) == [str(v2.run / "r1.1")]
    group.make()
    group.join()
    written = {path.name: path.read_text() for path in (v2.run / "r1.1").iterdir()}
    assert written == {
        "memory.max": str(64 * MIB),
        "cpu.max": "150000 100000",
        "pids.max": "40",
        "cgroup.procs": "0",
    }
    (v2.run / "r1.1" / "memory.events").write_text("low 0\nhigh 0\nmax 12\noom 1\noom_kill 2\n")
    (v2.run / "r1.1" / "pids.events").write_text("max 3\n")
    assert group.events() == (
        f"OOMKilled: over harness.limits.memory_bytes {64 * MIB}; forks were refused at harness.limits.pids 40"
    )
    (v2.run / "r1.1" / "cgroup.kill").write_text("")
    cgroups.kill(list(group.folders))
    assert (v2.run / "r1.1" / "cgroup.kill").read_text() == "1"
    v2.groups.group("r2.1", ALL).make()
    v2.groups.sweep({"r2.1"})
    assert [path.name for path in v2.run.iterdir() if path.is_dir()] == ["r2.1"]
    v2.groups.sweep(set())
    v2.groups.close()
    assert not v2.run.exists()


def test_v2_swap_is_off_where_it_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    v2 = V2(tmp_path, monkeypatch)
    v2.groups.open({"memory_bytes": MIB})
    folder = v2.run / "r1.1"
    folder.mkdir()
    (folder / "memory.swap.max").write_text("max")
    v2.groups.group("r1.1", {"memory_bytes": MIB}).make()
    assert ((folder / "memory.max").read_text(), (folder / "memory.swap.max").read_text()) == (str(MIB), "0")


@pytest.mark.parametrize("delegated", [True, False])
def test_v2_group_with_processes_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, delegated: bool) -> None:
    """The kernel says EBUSY: a delegated group's processes move below it, another's are left alone."""
    v2 = V2(tmp_path, monkeypatch)
    (v2.own / "cgroup.procs").write_text("17\n23\n")
    write, moved = cgroups._write, []

    def like_the_kernel(folder: str, file: str, value: str) -> None:
        if folder.endswith(cgroups.MAIN):
            moved.append(value)
        elif folder == str(v2.own) and not moved:
            raise OSError(16, "Device or resource busy", f"{folder}/{file}")
        write(folder, file, value)

    monkeypatch.setattr(cgroups, "_write", like_the_kernel)
    monkeypatch.setattr(os, "listxattr", lambda path: ["user.delegate"] if delegated else [])
    monkeypatch.setattr(os, "getuid", lambda: 0)
    problem = v2.groups.open({"pids": 5})
    if delegated:
        assert (problem, moved) == (None, ["17", "23"])
        assert (v2.own / "cgroup.subtree_control").read_text() == "+pids"
    else:
        assert moved == []
        assert problem == f"harness.limits: {v2.own}/cgroup.subtree_control: Device or resource busy. {cgroups.HELP}"


def test_missing_controller_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    v2 = V2(tmp_path, monkeypatch, controllers="memory pids")
    assert v2.groups.open(ALL) == (
        f"harness.limits: no cgroup controller for cpu here (there is memory, pids). {cgroups.HELP}"
    )
    assert "systemd-run --user --scope -p Delegate=yes" in cgroups.HELP


# Limits that cannot be kept


async def test_limits_that_cannot_be_kept_are_an_error_at_the_start(tmp_path: Path, gone: Left) -> None:
    """The kernel refuses this number, as it refuses everything to users without rights."""
    with pytest.raises(LaunchError, match=r"harness\.limits: .* Leyden needs a cgroup of its own") as caught:
        await Runner(tmp_path, limits={"pids": -5}).backend.open()
    assert "or leave harness.limits out" in str(caught.value)


# For real


@needs_groups
async def test_memory_over_the_limit_is_the_agents_failure_and_graded(config: Config, gone: Left) -> None:
    made = config(f"exec {EAT}", harness={"limits": {"memory_bytes": 150 * MIB}})
    (rollout,) = await run(made)
    assert (rollout.state, rollout.failure, rollout.attempt) == ("failed", "agent", 1)
    assert rollout.reason == f"OOMKilled: over harness.limits.memory_bytes {150 * MIB} (killed by SIGKILL)"
    assert (rollout.exit_code, rollout.reward) == (-9, 1.0)
    assert groups_of(made) == []


@needs_groups
async def test_a_child_over_the_limit_is_a_warning_if_the_harness_goes_on(
    config: Config, gone: Left, caplog: pytest.LogCaptureFixture
) -> None:
    made = config(f"{EAT}; exit 0", harness={"limits": {"memory_bytes": 150 * MIB}})
    (rollout,) = await run(made)
    assert (rollout.state, rollout.reason, rollout.reward) == ("succeeded", None, 1.0)
    assert f"rollout r1 attempt 1: OOMKilled: over harness.limits.memory_bytes {150 * MIB} (exit 0)" in caplog.text


@needs_groups
async def test_hundreds_of_children_under_a_limit(config: Config, gone: Left) -> None:
    made = config("for i in $(seq 300); do sleep 300 & done; echo $i", harness={"limits": {"pids": 40}})
    (rollout,) = await run(made)
    assert (rollout.failure, rollout.reward) == ("agent", 1.0)
    assert rollout.reason.startswith("forks were refused at harness.limits.pids 40 (exit ")
    assert groups_of(made) == []


@needs_groups
@pytest.mark.parametrize("sandbox", ["none", pytest.param("bubblewrap", marks=needs_bwrap)])
async def test_a_fork_bomb_under_a_limit_ends_with_its_time(config: Config, gone: Left, sandbox: str) -> None:
    """Every process forks for ever, and takes no signal that it can ignore."""
    loop = "while True:\n try: os.fork()\n except OSError: pass"
    bomb = f"import os, signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n{loop}"
    harness = {"limits": {"pids": 60}, "timeout_s": 2, "sandbox": sandbox}
    made = config(f"exec {sys.executable} -c '{bomb}'", harness=harness)
    (rollout,) = await run(made)
    assert (rollout.timed_out, rollout.attempt, rollout.reward) == (True, 1, 1.0)
    assert groups_of(made) == []


@needs_groups
async def test_the_harness_is_in_its_group_from_the_first_instruction(config: Config, gone: Left) -> None:
    """All limits at once, the harness and its grader each in a group of its own, in a fork as well."""
    show = "import pathlib; print(pathlib.Path('/proc/self/cgroup').read_text())"
    made = config(
        harness={"command": ["python", "{{ config_dir }}/show.py"], "preload": ["json"], "limits": ALL},
        grader={"command": ["sh", "-c", "cat /proc/self/cgroup >&2; exit 1"], "max_tries": 1},
    )
    (made.config_dir / "show.py").write_text(show)
    await run(made)
    name = cgroups.Cgroups(str(made.run_dir / "launcher")).name
    controllers = {
        log: {line.split(":")[1] for line in text.splitlines() if f"/{name}/{job}" in line}
        for log, job in (("harness.log", "r1.1"), ("grade/grade.log", "r1.1.grade1"))
        for text in [(attempt_dir(made) / log).read_text()]
    }
    version1 = {"memory", "cpu", "pids"}
    assert list(controllers.values()) in ([version1, version1], [{""}, {""}])


@needs_groups
async def test_a_forked_harness_obeys_as_well(config: Config, gone: Left) -> None:
    made = config(
        harness={
            "command": ["python", "{{ config_dir }}/eat.py"],
            "preload": ["json"],
            "limits": {"memory_bytes": 150 * MIB, "pids": 5},
        }
    )
    (made.config_dir / "eat.py").write_text(
        "import os, time\n"
        "try:\n"
        "    for _ in range(20):\n"
        "        os.fork() or time.sleep(300)\n"
        "except BlockingIOError as error:\n"
        "    print(error.strerror, flush=True)\n"
        "x = bytearray(400 << 20)\n"
    )
    (rollout,) = await run(made)
    assert (attempt_dir(made) / "harness.log").read_text() == "Resource temporarily unavailable\n"
    assert rollout.reason.startswith("OOMKilled: over harness.limits.memory_bytes") and rollout.failure == "agent"
    assert "forks were refused at harness.limits.pids 5" in rollout.reason


@needs_groups
async def test_groups_go_after_any_kill(config: Config, gone: Left) -> None:
    """Controller, launcher and reaper killed at once: the next launcher ends the job by its group."""
    made = config(
        "test $LEYDEN_ATTEMPT = 2 || { echo x >> ../starts; (setsid sleep 300 &); sleep 300; }",
        harness={"limits": {"pids": 50}},
    )
    async with LiveGateway() as gateway:
        gateway.add("r1")
        first = start_controller(made, gateway)
        await wait_until((attempt_dir(made) / "starts").exists)
        await wait_until(lambda: any(path.endswith("r1.1") for path in groups_of(made)))
        kill9(first)
        for launcher in launchers(made):
            for reaper in launcher.children():
                launcher.send_signal(signal.SIGSTOP)
                reaper.kill()
            launcher.kill()
        async with controlling(made, gateway):
            (rollout,) = await gateway.ended()
    assert (rollout.state, rollout.attempt) == ("succeeded", 2)
    assert groups_of(made) == []


async def test_workspace_over_its_limit_is_the_agents_failure_and_graded(config: Config, gone: Left) -> None:
    script = "mkdir deep; head -c 3000000 /dev/zero > deep/big; trap 'exit 0' TERM; while :; do sleep 0.1; done"
    made = config(script, harness={"limits": {"workspace_bytes": 1_000_000}})
    (rollout,) = await run(made)
    assert (rollout.state, rollout.failure, rollout.reward) == ("failed", "agent", 1.0)
    assert rollout.reason.startswith("over harness.limits.workspace_bytes 1000000 (")
    facts = json.loads((attempt_dir(made) / "exit.json").read_text())
    assert (facts["killed"], facts["signal"], facts["error"]) == ("limit", 9, None)


def test_used_counts_blocks_below_a_folder(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    empty = used(tmp_path)
    (tmp_path / "a" / "b" / "file").write_bytes(b"x" * 100_000)
    (tmp_path / "loop").symlink_to(tmp_path)
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(2**40)
    assert 100_000 <= used(tmp_path) - empty < 120_000
    assert used(tmp_path / "gone") == 0


def test_used_counts_what_lies_deeper_than_a_path_is_long(tmp_path: Path) -> None:
    code = (
        f"import os\nfor _ in range(60):\n os.mkdir('{'d' * 200}'); os.chdir('{'d' * 200}')\n"
        "open('f', 'wb').write(bytes(1 << 20))"
    )
    (tmp_path / "w").mkdir()
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path / "w", check=True)
    assert used(str(tmp_path / "w")) >= 1 << 20
    remove(str(tmp_path / "w"))


def test_a_file_without_a_name_counts_while_it_is_open(tmp_path: Path) -> None:
    with (tmp_path / "f").open("wb") as file:
        file.write(bytes(1 << 20))
        file.flush()
        assert unlinked([os.getpid()], [str(tmp_path)]) == 0
        (tmp_path / "f").unlink()
        assert unlinked([os.getpid()], [str(tmp_path)]) >= 1 << 20
    assert unlinked([os.getpid()], [str(tmp_path)]) == 0


async def test_an_open_file_without_a_name_is_over_the_limit_too(config: Config, gone: Left) -> None:
    hidden = "exec 3> f; rm f; head -c 3000000 /dev/zero >&3; sleep 300"
    (rollout,) = await run(config(hidden, harness={"limits": {"workspace_bytes": 1_000_000}}))
    assert (rollout.state, rollout.failure, rollout.reward) == ("failed", "agent", 1.0)


async def test_a_grader_may_write_as_much_as_the_harness_beside_what_it_found(config: Config, gone: Left) -> None:
    """A harness that ends just over its limit, before anybody looked, is graded on that."""
    grades = ["sh", "-c", f"head -c 500000 /dev/zero > g; sleep 2.5; exec {shlex.join(GRADER)}"]
    made = config(
        "head -c 2000000 /dev/zero > f", harness={"limits": {"workspace_bytes": 1_000_000}}, grader={"command": grades}
    )
    (rollout,) = await run(made)
    assert (rollout.attempt, rollout.reward) == (1, 1.0)


def test_disk_is_not_looked_at_before_its_time(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 10_000)
    watch = DiskWatch([str(tmp_path)], 5)
    assert watch.due is not None
    watch.due += 60
    assert watch.over() is None
    watch.due = 0.0
    assert (watch.over() or "").startswith("over harness.limits.workspace_bytes 5 (")
    assert DiskWatch([str(tmp_path)], None).due is None
