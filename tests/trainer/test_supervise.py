"""Lock, children and their ends, with small Python programs as children."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from leyden.errors import TrainingError
from leyden.trainer.supervise import Children, child_command, died, run_lock, wait_for_gateway

UNTIL_EOF = "import sys; sys.stdin.read(); print('end of file')"


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_child_command():
    assert child_command("gateway", Path("run.yaml"), ["a.b=1"]) == [
        sys.executable, "-m", "leyden", "gateway", "run.yaml", "a.b=1", "--with-parent",
    ]  # fmt: skip


def test_a_second_trainer_is_refused_with_the_pid(tmp_path):
    refused = pytest.raises(TrainingError, match=rf"another `leyden train` \(pid {os.getpid()}\)")
    with run_lock(tmp_path), refused, run_lock(tmp_path):
        pass
    with run_lock(tmp_path):
        pass


def test_children_of_a_killed_trainer_are_waited_for(tmp_path):
    """The trainer is gone without a word; its child still holds the second lock for a moment."""
    let_go = tmp_path / "let go"
    lingering = f"import pathlib, time\nwhile not pathlib.Path({str(let_go)!r}).exists(): time.sleep(0.01)"
    program = textwrap.dedent(
        f"""
        import os, subprocess, sys
        from pathlib import Path
        from leyden.trainer.supervise import run_lock
        with run_lock(Path({str(tmp_path)!r})) as fd:
            subprocess.Popen([sys.executable, "-c", {lingering!r}], stdin=subprocess.PIPE, pass_fds=(fd,))
            os._exit(9)
        """
    )
    subprocess.run(python(program), check=False)
    with (
        pytest.raises(TrainingError, match="processes of an earlier run still hold"),
        run_lock(tmp_path, 0.0),
    ):
        pass
    let_go.touch()
    with run_lock(tmp_path, 100.0):
        pass


async def test_children_end_by_end_of_file_and_log(tmp_path):
    async with Children(tmp_path / "logs") as children:
        child = await children.start("gateway", python(UNTIL_EOF))
    assert child.process.returncode == 0
    assert (tmp_path / "logs/gateway.log").read_text() == "end of file\n"


async def test_a_dead_child_is_named_with_status_and_log(tmp_path):
    async with Children(tmp_path / "logs") as children:
        await children.start("gateway", python(UNTIL_EOF))
        await children.start("controller", python("import sys; print('no space left'); sys.exit(3)"))
        with pytest.raises(TrainingError) as caught:
            await asyncio.wait_for(children.watch(), 100)
    assert str(caught.value) == (
        f"the controller ended with exit status 3; its log is {tmp_path}/logs/controller.log "
        "(last line: no space left). The same command resumes"
    )


async def test_a_killed_child_is_named_with_its_signal(tmp_path):
    async with Children(tmp_path / "logs") as children:
        child = await children.start("gateway", python("import os; os.kill(os.getpid(), 9)"))
        await child.process.wait()
    assert str(died(child)).startswith("the gateway was killed by signal 9; its log is")


async def test_waiting_for_a_gateway_that_dies(tmp_path):
    (tmp_path / "gateway.json").write_text('{"url": "http://127.0.0.1:1", "pid": 1}')
    async with Children(tmp_path / "logs") as children:
        child = await children.start("gateway", python("raise SystemExit(2)"))
        with pytest.raises(TrainingError, match="the gateway ended with exit status 2"):
            await wait_for_gateway(tmp_path, child, "key")


async def test_a_gateway_that_never_listens(tmp_path):
    async with Children(tmp_path / "logs") as children:
        child = await children.start("gateway", python(UNTIL_EOF))
        with pytest.raises(TrainingError, match="did not listen within 0 s"):
            await wait_for_gateway(tmp_path, child, "key", limit_s=0.0)
