"""Set-ups are made once and outlive interruptions; what stands for a session starts under no test's limit."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.kube import set_up as kube
from tests.set_up import NotHere, SetUpFailed, Step, install_once, python_that_runs
from tests.vllm import set_up as vllm

REPOSITORY = Path(__file__).parents[1]


def test_a_set_up_runs_once_and_again_when_it_should_hold_something_else(tmp_path: Path) -> None:
    made: list[str] = []

    def install(version: str) -> None:
        def fill(step: Step) -> None:
            made.append(version)
            step.run(["mkdir", tmp_path / "thing"])
            step.run(["sh", "-c", f"echo {version} > {tmp_path}/thing/version"])

        install_once("thing", tmp_path / "thing", [version], fill)

    for version in ("1", "1", "2", "2"):
        install(version)
    assert made == ["1", "2"]
    assert (tmp_path / "thing" / "version").read_text() == "2\n"


def test_a_set_up_that_was_interrupted_is_made_from_the_start(tmp_path: Path) -> None:
    folder = tmp_path / "thing"

    def half(step: Step) -> None:
        folder.mkdir()
        (folder / "half").touch()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        install_once("thing", folder, ["1"], half)
    install_once("thing", folder, ["1"], lambda step: step.run(["mkdir", folder]))
    assert sorted(path.name for path in folder.iterdir()) == [".installed"]


class Said(list[str]):
    """What a set-up says, and an event for the line that a test waits for."""

    def __init__(self, awaited: str) -> None:
        self.awaited, self.heard = awaited, threading.Event()

    def __call__(self, line: str) -> None:
        self.append(line)
        if self.awaited in line:
            self.heard.set()


def test_two_set_ups_at_once_are_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, made, is_in = tmp_path / "thing", [], threading.Event()
    said = Said("waiting for another set-up")
    monkeypatch.setattr("tests.set_up.say", said)

    def install(step: Step) -> None:
        folder.mkdir()
        made.append(1)
        is_in.set()
        said.heard.wait(60)

    both = [threading.Thread(target=install_once, args=("thing", folder, ["1"], install)) for _ in range(2)]
    both[0].start()
    assert is_in.wait(60)
    both[1].start()
    for thread in both:
        thread.join()
    assert said.heard.is_set() and made == [1]


def test_a_command_that_fails_shows_the_end_of_its_output(tmp_path: Path) -> None:
    def install(step: Step) -> None:
        step.run(["sh", "-c", "echo no such package; exit 3"])

    with pytest.raises(SetUpFailed, match=r"thing: sh ended with 3; .*thing\.log ends:\n(.*\n)*no such package"):
        install_once("thing", tmp_path / "thing", ["1"], install)
    assert not (tmp_path / "thing").exists()


def test_a_long_command_says_how_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = Said(" s: halfway")
    monkeypatch.setattr("tests.set_up.say", said)
    monkeypatch.setattr("tests.set_up.EVERY_S", 0.01)

    def install(step: Step) -> None:
        (tmp_path / "thing").mkdir()
        step.run(["sh", "-c", f"echo halfway; until [ -e {tmp_path}/seen ]; do sleep 0.02; done"])

    setting_up = threading.Thread(target=install_once, args=("thing", tmp_path / "thing", ["1"], install))
    setting_up.start()
    assert said.heard.wait(60)
    (tmp_path / "seen").touch()
    setting_up.join()
    assert said[-1].startswith("thing: ready in ")


def test_a_python_that_does_not_start_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As pyenv's shim of a version that is not chosen."""
    shim = tmp_path / "python3.99"
    shim.write_text("#!/bin/sh\nexit 127\n")
    shim.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert python_that_runs("3.99", here) == sys.executable
    assert python_that_runs("3.99") is None


CONFTEST = """
import time
from contextlib import contextmanager

import pytest

from tests.set_up import NotHere
from tests.standing import fixtures_used, stand

@contextmanager
def server():
    {start}
    yield 7
    print("stopped")

def pytest_collection_finish(session):
    if "server" in fixtures_used(session, "real"):
        session.config.number = stand(session, "the server", server)

@pytest.fixture
def server_number(pytestconfig):
    return pytestconfig.number

@pytest.fixture(name="server")
def _server(server_number):
    return server_number
"""
TESTS = """
import pytest

@pytest.mark.real
def test_one(server): assert server == 7

@pytest.mark.real
def test_two(server): assert server == 7

@pytest.mark.real
def test_without(): pass
"""
OTHER_TESTS = """
import pytest

@pytest.fixture
def server(): return 8

def test_with_a_server_of_its_own(server): assert server == 8
"""


def session(folder: Path, start: str, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "conftest.py").write_text(CONFTEST.format(start=start))
    (folder / "test_it.py").write_text(TESTS)
    (folder / "test_other.py").write_text(OTHER_TESTS)
    (folder / "pytest.ini").write_text("[pytest]\ntimeout = 1\nmarkers = real\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options, folder]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_a_server_stands_before_the_first_test_and_its_start_may_last(tmp_path: Path) -> None:
    done = session(tmp_path, "time.sleep(1.5)")
    assert done.returncode == 0, done.stdout
    assert "the server: starting\nthe server: ready in " in done.stdout
    assert "4 passed" in done.stdout and done.stdout.endswith("stopped\n")


def test_a_server_that_is_not_set_up_ends_the_session_with_one_line(tmp_path: Path) -> None:
    done = session(tmp_path, "raise NotHere('no such thing here')")
    assert done.returncode == 3
    assert done.stdout.count("no such thing here") == 1
    assert "passed" not in done.stdout and "error" not in done.stdout


def test_a_server_that_no_chosen_test_wants_is_not_started(tmp_path: Path) -> None:
    for option in ("--collect-only", "-kwithout", "-kof_its_own"):
        assert "starting" not in session(tmp_path, "raise NotHere('x')", option).stdout


def test_a_machine_without_a_test_bed_is_told_so_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(NotHere, match=r"^the Kubernetes test bed needs root; or set KUBECONFIG to .*$"):
        kube.set_up()
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NotHere, match=r"^the Kubernetes test bed needs Debian 12; or set KUBECONFIG to .*$"):
        kube.set_up()
    monkeypatch.setenv("KUBECONFIG", "/somewhere")
    with pytest.raises(NotHere, match=r"^kubectl is not on PATH"):
        kube.set_up()
    monkeypatch.setenv("LEYDEN_VLLM", str(tmp_path / "vllm"))
    with pytest.raises(NotHere, match=r"vllm: run `python -m tests.vllm.set_up`, as `make vllm` does$"):
        vllm.interpreter()
