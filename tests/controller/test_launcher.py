"""The launcher without a controller, with a second one, and with garbage."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from leyden.controller.backends.launcher_client import socket_path
from leyden.controller.jobs import Exit
from leyden.errors import LaunchError
from tests.controller.programs import Left, Runner, targets, wait_until


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


async def test_kill_reaches_the_whole_tree_and_says_why(tmp_path: Path, gone: Left) -> None:
    async with Runner(tmp_path) as runner:
        await runner.backend.start(runner.job("a", "sh", "-c", "trap '' TERM; setsid sleep 300 & echo on; sleep 300"))
        await wait_until(lambda: (tmp_path / "a/log").exists() and (tmp_path / "a/log").read_text() == "on\n")
        runner.backend.kill("a", "timeout", 0.2)
        await wait_until(lambda: "a" in runner.ends)
        assert [line for line in gone() if "sleep 300" in line] == []
    assert runner.ends["a"].killed == "timeout"
