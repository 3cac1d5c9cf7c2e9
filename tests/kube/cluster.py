"""A Kubernetes cluster for tests: the test bed of `testbed/`, or the one that KUBECONFIG names."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import tempfile
import time
import urllib.request
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import set_up

TESTBED = Path(__file__).parent / "testbed"
BUSYBOX = "testbed.local/busybox:1"
MOST_TESTBEDS = 8
FAST = "/dev/shm"
FAST_BYTES = 4 * 2**30


@dataclass(frozen=True, slots=True)
class Cluster:
    """What tests know of a cluster.

    `host` is the address at which pods reach servers of this machine. `state` is the test bed's folder, None for
    a cluster that was given. `busybox` is an image with a shell.
    """

    kubeconfig: Path
    host: str
    busybox: str
    state: Path | None
    environment: dict[str, str]

    def kubectl(self, *arguments: str, stdin: str | None = None, check: bool = True) -> str:
        done = subprocess.run(
            ["kubectl", *arguments],
            check=False,
            env=self.environment,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=120,
        )
        if check and done.returncode:
            raise AssertionError(f"kubectl {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout

    def get(self, *arguments: str) -> Any:
        return json.loads(self.kubectl("get", *arguments, "-o", "json"))

    def apply(self, *objects: dict[str, Any], namespace: str) -> None:
        document = {"apiVersion": "v1", "kind": "List", "items": list(objects)}
        self.kubectl("apply", "-n", namespace, "-f", "-", stdin=json.dumps(document))

    @contextmanager
    def namespace(self) -> Iterator[str]:
        name = f"leyden-{uuid.uuid4().hex[:8]}"
        self.kubectl("create", "namespace", name)
        try:
            self._wait_for_pods(name)
            yield name
        finally:
            self.kubectl("delete", "namespace", name, "--wait=false")

    def _wait_for_pods(self, namespace: str) -> None:
        """Until pods may be made in a new namespace: its service account comes a moment later."""
        spec = {"containers": [{"name": "probe", "image": self.busybox}]}
        pod = json.dumps({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "probe"}, "spec": spec})
        end = time.monotonic() + 30
        while not self.kubectl("create", "-n", namespace, "--dry-run=server", "-f", "-", stdin=pod, check=False):
            assert time.monotonic() < end, f"no pod can be made in {namespace}"
            time.sleep(0.1)

    def add_image(self, name: str, layers: Sequence[Path]) -> None:
        """Make an image of folders or tar files, lowest first, known to the test bed's node."""
        self.script("image", name, *map(str, layers))

    def kill(self, name: str) -> None:
        """End a part of the test bed, `apiserver` for instance; `up` starts it again."""
        assert self.state is not None
        pid = int((self.state / "pid" / name).read_text().split()[0])
        os.kill(pid, 9)

    def up(self) -> None:
        """Start what is missing of the test bed."""
        self.script("up")

    def forget_versions(self) -> None:
        """Make every resource version so far too old to watch from: etcd forgets, and the API server begins anew."""
        revision = self._etcd("range", key="AA==")["header"]["revision"]
        self._etcd("compaction", revision=revision, physical=True)
        self.kill("apiserver")
        self.up()

    def _etcd(self, call: str, **body: Any) -> Any:
        url = f"http://127.0.0.1:{self.environment['KT_ETCD_PORT']}/v3/kv/{call}"
        with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode())) as answer:
            return json.load(answer)

    def script(self, name: str, *arguments: str) -> None:
        _run([str(TESTBED / name), *arguments], self.environment)


@contextmanager
def cluster() -> Iterator[Cluster]:
    """The cluster that KUBECONFIG names, else a test bed in a private folder, gone at the end.

    With KUBECONFIG, LEYDEN_KUBE_HOST is this machine's address as pods see it. Raises NotHere and SetUpFailed.
    """
    given = os.environ.get("KUBECONFIG")
    if given:
        host = os.environ.get("LEYDEN_KUBE_HOST", "")
        image = os.environ.get("LEYDEN_KUBE_BUSYBOX", "busybox:1.36")
        yield Cluster(Path(given), host, image, None, dict(os.environ))
        return
    if not (cache() / "bin" / "kubelet").exists():
        raise set_up.NotHere(f"nothing in {cache()}: run `python -m tests.kube.set_up`, as `make kube` does")
    with _slot() as number:
        state = Path(tempfile.mkdtemp(prefix="leyden-kube-", dir=_fast_folder()))
        environment = _environment(state, number)
        with _guard(environment, state):
            _run([str(TESTBED / "up")], environment)
            yield Cluster(state / "admin.kubeconfig", f"10.213.{number}.1", BUSYBOX, state, environment)


def cache() -> Path:
    """What all test beds share: binaries, unpacked packages, layers of images."""
    return Path(os.environ.get("KT_CACHE") or set_up.cache() / "kube")


def _environment(state: Path, number: int) -> dict[str, str]:
    return {
        **os.environ,
        "KT_CACHE": str(cache()),
        "KT_STATE": str(state),
        "KT_BRIDGE": f"kt{number}",
        "KT_POD_NET": f"10.213.{number}",
        "KT_SVC_NET": f"10.214.{number}",
        "KT_ETCD_PORT": str(12379 + 2 * number),
        "KUBECONFIG": str(state / "admin.kubeconfig"),
        "PATH": f"{cache() / 'bin'}:{os.environ['PATH']}",
    }


def _fast_folder() -> str | None:
    """Memory, if there is enough: unpacking an image of 25,000 files on a disk takes half a minute."""
    if not Path(FAST).is_dir() or shutil.disk_usage(FAST).free < FAST_BYTES:
        return None
    return FAST


@contextmanager
def _slot() -> Iterator[int]:
    """A number of its own for each test bed of this machine: of its bridge, addresses and ports."""
    for number in range(1, MOST_TESTBEDS + 1):
        with Path(tempfile.gettempdir(), f"leyden-kube-{number}.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            if not Path(f"/sys/class/net/kt{number}").exists():
                yield number
                return
    raise set_up.NotHere(f"all {MOST_TESTBEDS} test beds are taken: ip link show type bridge")


@contextmanager
def _guard(environment: dict[str, str], state: Path) -> Iterator[None]:
    """Stops the test bed at the end, also when this process is killed: then the guard's input ends."""
    command = f"cat >/dev/null; exec '{TESTBED / 'down'}' --wipe"
    with subprocess.Popen(["sh", "-c", command], stdin=subprocess.PIPE, env=environment, start_new_session=True) as it:
        try:
            yield
        finally:
            assert it.stdin is not None
            it.stdin.close()
            it.wait()
            shutil.rmtree(state, ignore_errors=True)


def _run(command: list[str], environment: dict[str, str]) -> None:
    done = subprocess.run(
        command, check=False, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        raise set_up.SetUpFailed(f"{command[0]}: {done.stdout.strip()}")
