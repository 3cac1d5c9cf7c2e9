"""The keeper: what it packs and unpacks, how it sees the harness go, how it talks to the gateway."""

from __future__ import annotations

import ast
import http.server
import io
import os
import shutil
import signal
import stat
import subprocess
import tarfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from leyden.controller.backends.kubernetes import keeper

MANY = 1 << 20


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    folder = tmp_path / "workspace"
    (folder / "a" / "b").mkdir(parents=True)
    (folder / "a" / "b" / "run.sh").write_text("echo é\n")
    (folder / "a" / "b" / "run.sh").chmod(0o750)
    (folder / "empty").mkdir()
    (folder / "link").symlink_to("a/b/run.sh")
    (folder / "a" / "up").symlink_to("../empty")
    return folder


def tree(folder: Path) -> dict[str, str]:
    """Each entry with its kind, its content, its target."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = f"-> {path.readlink()}"
        else:
            found[name] = "/" if path.is_dir() else path.read_text()
    return found


def archive(path: Path, *entries: tarfile.TarInfo | tuple[str, bytes]) -> str:
    with tarfile.open(path, "w:gz") as tar:
        for entry in entries:
            if isinstance(entry, tarfile.TarInfo):
                tar.addfile(entry)
            else:
                info = tarfile.TarInfo(entry[0])
                info.size = len(entry[1])
                tar.addfile(info, io.BytesIO(entry[1]))
    return str(path)


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def test_what_was_packed_comes_back(workspace: Path, tmp_path: Path) -> None:
    packed = str(tmp_path / "w.tar.gz")
    os.mkfifo(workspace / "pipe")
    assert keeper.pack(str(workspace), packed, MANY) == "packed 6 entries, 8 bytes; left out 1"
    target = tmp_path / "target"
    assert keeper.unpack(packed, str(target), MANY) == "unpacked 6 entries, 8 bytes; left out 0"
    assert tree(target) == {
        "a": "/",
        "a/b": "/",
        "a/b/run.sh": "echo é\n",
        "a/up": "-> ../empty",
        "empty": "/",
        "link": "-> a/b/run.sh",
    }
    assert stat.S_IMODE((target / "a/b/run.sh").stat().st_mode) == 0o776
    assert stat.S_IMODE((target / "a").stat().st_mode) == 0o777


@pytest.mark.parametrize(
    "entries",
    [
        [("/etc/evil", b"x")],
        [("../evil", b"x")],
        [("a/../../evil", b"x")],
        [link("out", "/tmp"), ("out/evil", b"x")],
        [link("out", "../.."), ("out/evil", b"x")],
        [link("a/out", "../../x")],
        [link("a", "b"), link("a/evil", "x")],
        [link("evil", "/leyden/files/task.json")],
        [link("evil", "/leyden/files/task.json", tarfile.LNKTYPE)],
        [link("dev", "", tarfile.CHRTYPE)],
        [link("pipe", "", tarfile.FIFOTYPE)],
        [link("a", "b/../../x")],
        [("file", b"x"), ("file/evil", b"x")],
        [link("here", "."), link("there", "here/../../x")],
    ],
)
def test_an_archive_cannot_reach_out(entries: list[tarfile.TarInfo | tuple[str, bytes]], tmp_path: Path) -> None:
    """The harness wrote it: no file outside, no link to the grader's own files, no device."""
    target = tmp_path / "deep" / "target"
    target.mkdir(parents=True)
    packed = archive(tmp_path / "w.tar.gz", *entries, ("good", b"y"))
    done = keeper.unpack(packed, str(target), MANY)
    assert (target / "good").read_text() == "y"
    assert "left out 0" not in done
    for path in target.rglob("*"):
        assert path.resolve().is_relative_to(target)
        assert stat.S_IFMT(path.lstat().st_mode) in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK)
    assert sorted(p.name for p in (tmp_path / "deep").iterdir()) == ["target"]


def test_an_entry_that_comes_twice_counts_once(tmp_path: Path) -> None:
    """A later link cannot take a file's place, nor a later file write through a link."""
    (tmp_path / "victim").write_text("old")
    packed = archive(tmp_path / "w.tar.gz", ("x", b"1"), link("x", "y"), ("x", b"2"), link("l", "x"), ("l", b"3"))
    keeper.unpack(packed, str(tmp_path / "target"), MANY)
    assert tree(tmp_path / "target") == {"l": "-> x", "x": "1"}


def test_sizes_are_bounded(workspace: Path, tmp_path: Path) -> None:
    """Packing says which setting to change; a small archive of a large file is stopped before it is written."""
    packed = str(tmp_path / "w.tar.gz")
    with pytest.raises(
        keeper.TooLargeError, match=r"the workspace is larger than 7 bytes; see gateway\.max_workspace_bytes"
    ):
        keeper.pack(str(workspace), packed, 7)
    archive(tmp_path / "w.tar.gz", ("big", b"\0" * 10_000_000))
    with pytest.raises(keeper.KeeperError, match="holds more than 1000000 bytes"):
        keeper.unpack(packed, str(tmp_path / "target"), 1_000_000)
    assert tree(tmp_path / "target") == {}


def test_a_workspace_that_is_too_large_has_its_own_exit_code(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By it the controller tells the harness's own doing from the keeper's trouble."""
    monkeypatch.setattr(keeper, "VOLUME", str(tmp_path))
    monkeypatch.setenv("LEYDEN_WORKSPACE_BYTES", "7")
    monkeypatch.setattr(keeper, "keep", lambda _, archive, most: keeper.pack(str(workspace), archive, most))
    assert keeper.main(["keep"]) == keeper.TOO_LARGE == 3
    assert capsys.readouterr().out == ("keep: the workspace is larger than 7 bytes; see gateway.max_workspace_bytes\n")
    monkeypatch.setattr(keeper, "MOST_ENTRIES", 1)
    monkeypatch.setenv("LEYDEN_WORKSPACE_BYTES", "7000000")
    assert keeper.main(["keep"]) == keeper.TOO_LARGE


def test_deep_and_closed_folders_come_back(tmp_path: Path) -> None:
    """1,500 folders in one another, one without any right, one with a path that no program can use."""
    workspace, packed, target = tmp_path / "w", tmp_path / "w.tar.gz", tmp_path / "target"
    workspace.mkdir()
    here = os.open(workspace, os.O_RDONLY)
    for depth in range(2500):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
        if depth in (0, 1499):
            os.close(os.open(f"file{depth}", os.O_WRONLY | os.O_CREAT, 0o600, dir_fd=here))
    os.close(here)
    (workspace / "closed").mkdir()
    (workspace / "closed" / "file").write_text("x")
    (workspace / "closed" / "file").chmod(0)
    (workspace / "closed").chmod(0)
    workspace.chmod(0)
    assert keeper.pack(str(workspace), str(packed), 64 * MANY) == "packed 1954 entries, 1 bytes; left out 1"
    assert keeper.unpack(str(packed), str(target), MANY) == "unpacked 1954 entries, 1 bytes; left out 0"
    assert (target / "closed" / "file").read_text() == "x"
    assert (target / Path(*["d"] * 1500) / "file1499").exists()
    subprocess.run(["rm", "-rf", workspace, target], check=True)  # too deep for pytest


def test_times_that_no_archive_holds(workspace: Path, tmp_path: Path) -> None:
    os.utime(workspace / "a" / "b" / "run.sh", (-5, -5))
    keeper.pack(str(workspace), str(tmp_path / "w.tar.gz"), MANY)
    keeper.unpack(str(tmp_path / "w.tar.gz"), str(tmp_path / "target"), MANY)
    assert (tmp_path / "target/a/b/run.sh").stat().st_mtime == 0
    odd = tarfile.TarInfo("odd")
    odd.mtime = 1e300
    keeper.unpack(archive(tmp_path / "odd.tar.gz", odd), str(tmp_path / "again"), MANY)
    assert tree(tmp_path / "again") == {"odd": ""}


def test_what_lies_on_the_disk_counts(tmp_path: Path) -> None:
    """Many small files; a sparse one by its length, since its archive is unpacked elsewhere."""
    for i in range(20):
        (tmp_path / "w").mkdir(exist_ok=True)
        (tmp_path / "w" / str(i)).write_text("x")
    with pytest.raises(keeper.TooLargeError, match="larger than 40000 bytes"):
        keeper.pack(str(tmp_path / "w"), str(tmp_path / "w.tar.gz"), 40_000)
    (tmp_path / "sparse").mkdir()
    with (tmp_path / "sparse" / "file").open("w") as file:
        file.truncate(50_000)
    with pytest.raises(keeper.TooLargeError, match="larger than 40000 bytes"):
        keeper.pack(str(tmp_path / "sparse"), str(tmp_path / "w.tar.gz"), 40_000)
    assert not (tmp_path / "w.tar.gz").exists()


def test_an_archive_that_the_gateway_finds_too_large_is_the_harness_s_doing(
    gateway: type[Gateway], tmp_path: Path
) -> None:
    (tmp_path / "w").write_bytes(b"x")
    gateway.answers[:] = [413]
    with pytest.raises(keeper.TooLargeError, match="413 no"):
        keeper.upload(str(tmp_path / "w"), time.monotonic() + 60, lambda _: None)


def test_a_damaged_archive_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "w.tar.gz").write_bytes(b"\x1f\x8b damaged")
    monkeypatch.setattr(keeper, "VOLUME", str(tmp_path))
    monkeypatch.setattr(keeper, "INPUT", str(tmp_path / "w.tar.gz"))
    assert keeper.main(["unpack"]) == 1
    assert capsys.readouterr().out.startswith("unpack: ")
    assert keeper.main(["other"]) == 1
    assert capsys.readouterr().out == "other: usage: keeper.py unpack | fetch | keep | ready\n"


@dataclass
class Look:
    """What one look finds: pid -> parent, `mounted` those of the harness's container, the id given away last, and
    whether a kubelet has begun to start the harness."""

    parents: dict[int, int]
    mounted: frozenset[int] = frozenset()
    last: int = 16
    started: bool = True


class Pod:
    """/proc and the volume of a pod, as the looks of a keeper find them one after the other; the last look stays."""

    def __init__(self, root: Path, *looks: Look) -> None:
        self.proc, self.volume, self.looks, self.naps = root / "proc", root / "volume", list(looks), 0
        self.proc.mkdir()
        (self.volume / "out").mkdir(parents=True)
        (self.volume / "out" / "last-pid").write_text("16")
        self.show()

    def show(self) -> None:
        look = self.looks[min(self.naps, len(self.looks) - 1)]
        for old in self.proc.iterdir():
            if old.name.isdigit():
                shutil.rmtree(old)
        for pid, parent in look.parents.items():
            (self.proc / str(pid)).mkdir()
            (self.proc / str(pid) / "stat").write_text(f"{pid} (a) b (c) S {parent} 1 1")
            at = "/leyden/started" if pid in look.mounted else "/var/lib/leyden/started"
            mounts = f"22 1 0:1 / / rw - overlay none rw\n23 22 0:2 /started {at} ro - ext4 /dev/vda rw\n"
            (self.proc / str(pid) / "mountinfo").write_text(mounts)
        (self.proc / "loadavg").write_text(f"0.1 0.1 0.1 1/2 {look.last}\n")
        if look.started:
            (self.volume / "started").mkdir(exist_ok=True)

    def sleep(self, _: float) -> None:
        self.naps += 1
        assert self.naps < 2000
        self.show()

    def watch(self, *, asked: float | None = None, patience_s: float = 60) -> keeper.HarnessWatch:
        asked_to_end = [] if asked is None else [time.monotonic() + asked]
        return keeper.HarnessWatch(str(self.proc), str(self.volume), asked_to_end, patience_s)


EMPTY = {1: 0, 7: 0}
BEFORE = Look(EMPTY | {5: 0, 6: 5}, started=False)
STARTING = Look(EMPTY | {5: 0, 19: 0}, last=19)
BUSY = Look(EMPTY | {5: 0, 20: 0, 21: 20}, frozenset({20, 21}), last=21)
LEFT = Look(EMPTY | {5: 0, 21: 1, 30: 0}, frozenset({21}), last=31)


@pytest.mark.parametrize(
    "looks",
    [
        [BEFORE, STARTING, BUSY, BUSY, LEFT],
        [BUSY, LEFT],
        [BEFORE, *[STARTING] * 50, BUSY, LEFT],
        [BUSY, Look(EMPTY | {33: 0}, frozenset({33})), LEFT],
        [BUSY, Look({20: 0}), Look({20: 0}), LEFT],
        [BEFORE, Look(BEFORE.parents, last=400, started=False), STARTING, BUSY, LEFT],
    ],
    ids=[
        "containers before and after it, and a child that it leaves",
        "there at the first look",
        "made slowly",
        "a command in its container",
        "without its mounts",
        "a container before it starts processes",
    ],
)
def test_the_harness_comes_and_goes(tmp_path: Path, looks: list[Look]) -> None:
    pod = Pod(tmp_path, *looks)
    assert pod.watch().until_gone(pod.sleep, lambda *_: None)
    assert pod.naps == len(looks) - 1


def test_a_harness_too_quick_to_be_seen_is_gone_after_a_while(tmp_path: Path) -> None:
    """Where ids of processes were given away since; before that it may still be on its way."""
    pod = Pod(tmp_path, BEFORE, *[Look(EMPTY)] * 20, Look(EMPTY, last=17))
    assert pod.watch(patience_s=0).until_gone(pod.sleep, lambda *_: None)
    assert pod.naps == 21


def test_the_hook_waits_for_the_keeper(tmp_path: Path) -> None:
    pod = Pod(tmp_path, Look(EMPTY, last=18))
    folder, looks = pod.volume / "out", []
    (folder / "last-pid").unlink()

    def sleep(_: float) -> None:
        looks.append((folder / "last-pid").exists())
        if len(looks) == 3:
            (folder / "watching").touch()

    keeper.ready(str(folder), str(pod.proc), sleep)
    assert looks == [False] * 3
    assert (folder / "last-pid").read_text() == "18"


def test_a_harness_that_does_not_end_is_killed(tmp_path: Path) -> None:
    """When the pod is deleted, half of the grace period is the harness's; what it left is then still saved."""
    pod, killed = Pod(tmp_path, BUSY), []

    def kill(pid: int, number: int) -> None:
        killed.append((pid, number))
        pod.looks = [LEFT]

    assert pod.watch(asked=-61.5).until_gone(pod.sleep, kill)
    assert killed == [(pid, signal.SIGKILL) for pid in (5, 7, 20, 21)]


def test_a_pod_that_ends_before_its_harness_starts(tmp_path: Path) -> None:
    pod = Pod(tmp_path, BEFORE)
    assert not pod.watch(asked=0).until_gone(pod.sleep, lambda *_: None)


class Gateway(http.server.BaseHTTPRequestHandler):
    answers: list[int]
    kept: bytes
    keys: list[str]

    def do_PUT(self) -> None:
        type(self).keys.append(f"{self.path} {self.headers['Authorization']} {self.headers['Content-Type']}")
        body = self.rfile.read(int(self.headers["Content-Length"]))
        status = type(self).answers.pop(0)
        if status == 200:
            type(self).kept = body
        self._reply(status, b"no" if status != 200 else b"{}")

    def do_GET(self) -> None:
        status = type(self).answers.pop(0)
        self._reply(status, type(self).kept, short=status == 200 and len(type(self).answers) > 0)

    def _reply(self, status: int, body: bytes, *, short: bool = False) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if short else body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Gateway]]:
    class Its(Gateway):
        answers, kept, keys = [], b"", []

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Its) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("LEYDEN_URL", f"http://127.0.0.1:{server.server_port}/")
        monkeypatch.setenv("LEYDEN_WORKSPACE_KEY", "CANARY-key")
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
        yield Its
        server.shutdown()


def test_upload_and_download(gateway: type[Gateway], workspace: Path, tmp_path: Path) -> None:
    """A gateway that is away for a moment, and an answer that breaks off, are tried again."""
    packed = str(tmp_path / "w.tar.gz")
    keeper.pack(str(workspace), packed, MANY)
    gateway.answers[:] = [503, 429, 200]
    keeper.upload(packed, time.monotonic() + 60, lambda _: None)
    assert gateway.kept == Path(packed).read_bytes()
    assert set(gateway.keys) == {"/api/workspace Bearer CANARY-key application/gzip"}
    gateway.answers[:] = [200, 200]
    keeper.download(str(tmp_path / "back"), time.monotonic() + 60, lambda _: None)
    assert (tmp_path / "back").read_bytes() == gateway.kept
    assert gateway.answers == []


@pytest.mark.parametrize(("answers", "left"), [([403, 200], [200]), ([409, 200], [200]), ([500] * 3, [500] * 2)])
def test_a_refusal_is_final_and_patience_ends(
    gateway: type[Gateway], tmp_path: Path, answers: list[int], left: list[int]
) -> None:
    (tmp_path / "w").write_bytes(b"x")
    gateway.answers[:] = answers
    status = answers[0]
    with pytest.raises(keeper.KeeperError, match=f"PUT http://127.0.0.1:.*/api/workspace: {status} no"):
        keeper.upload(str(tmp_path / "w"), time.monotonic(), lambda _: None)
    assert gateway.answers == left


def test_the_keeper_needs_nothing_but_old_python() -> None:
    """It runs alone, in whatever image is named."""
    source = Path(keeper.__file__).read_text()
    tree_ = ast.parse(source, feature_version=(3, 8))
    names = {n.split(".")[0] for node in ast.walk(tree_) if isinstance(node, ast.Import) for n in [node.names[0].name]}
    names |= {str(node.module).split(".")[0] for node in ast.walk(tree_) if isinstance(node, ast.ImportFrom)}
    allowed = {
        "__future__",
        "contextlib",
        "ctypes",
        "http",
        "itertools",
        "json",
        "os",
        "pathlib",
        "shutil",
        "signal",
        "stat",
        "sys",
        "tarfile",
        "time",
    }
    assert names <= allowed | {"typing", "urllib"}
