"""Makes what `tests/kube` needs, once: `python -m tests.kube.set_up`.

It goes to `~/.cache/leyden/kube` (or `$KT_CACHE`). The test bed needs packages of Debian, installed here by root;
Kubernetes is built from Debian's source, which takes 9 minutes on 2 cores. With KUBECONFIG, the cluster that it names
is used and nothing is built.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

from tests.kube.cluster import TESTBED, cache
from tests.kube.images import IMAGES
from tests.set_up import NotHere, SetUpFailed, Step, say, step

PACKAGES = ("make", "rsync", "jq", "dpkg-dev", "openssl", "iproute2", "util-linux")


def set_up() -> None:
    """Raises NotHere and SetUpFailed."""
    if os.environ.get("KUBECONFIG"):
        if shutil.which("kubectl") is None:
            raise NotHere("kubectl is not on PATH, which the tests need for the cluster of KUBECONFIG")
        say(f"Kubernetes: the cluster of {os.environ['KUBECONFIG']}")
        return
    if os.geteuid() != 0:
        raise NotHere("the Kubernetes test bed needs root; or set KUBECONFIG to a cluster that tests may use")
    if shutil.which("apt-get") is None:
        raise NotHere("the Kubernetes test bed needs Debian 12; or set KUBECONFIG to a cluster that tests may use")
    with step("Kubernetes test bed", cache()) as it:
        _install_packages(it)
        it.run([TESTBED / "build"], env={**os.environ, "KT_CACHE": str(cache())})
        for image in IMAGES.values():
            image.packages()
    say(f"Kubernetes test bed: in {cache()}")


def _install_packages(it: Step) -> None:
    missing = [name for name in PACKAGES if not _installed(name)]
    if missing:
        say(f"Kubernetes test bed: installing {' '.join(missing)}")
        apt = ["apt-get", "-qq", "-o", "DPkg::Lock::Timeout=300"]
        quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        it.run([*apt, "update"], env=quiet)
        it.run([*apt, "install", "-y", "--no-install-recommends", *missing], env=quiet)


def _installed(package: str) -> bool:
    found = subprocess.run(
        ["dpkg-query", "-W", "-f", "${Status}", package], capture_output=True, text=True, check=False
    )
    return found.stdout == "install ok installed"


if __name__ == "__main__":
    try:
        set_up()
    except (NotHere, SetUpFailed) as problem:
        sys.exit(f"make kube: {problem}")
