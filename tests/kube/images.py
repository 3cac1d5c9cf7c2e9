"""The images that tests run in the test bed, by the fixture that gives their name."""

from __future__ import annotations

import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.kube.cluster import Cluster, cache
from tests.kube.rootfs import LEFT_OUT, REPOSITORY, leyden_layer, packages_layer

WITHOUT_TRAINING = frozenset({"torch", "transformers", "pandas", "datasets", "botocore", "boto3"})


@dataclass(frozen=True)
class Image:
    """This interpreter, packages of this environment and, unless it is the harness's own, Leyden as it is here."""

    name: str
    roots: tuple[str, ...]
    left_out: frozenset[str] = LEFT_OUT
    with_leyden: bool = True

    def packages(self) -> Path:
        """The lower layer, a tar file that is made once."""
        return packages_layer(cache() / "images", self.roots, cache() / "root" / "bin" / "busybox", self.left_out)

    @contextmanager
    def known_to(self, kube: Cluster) -> Iterator[str]:
        with tempfile.TemporaryDirectory(prefix="leyden-layer-") as folder:
            leyden = [leyden_layer(Path(folder, "root"))] if self.with_leyden else []
            kube.add_image(self.name, [self.packages(), *leyden])
        yield self.name


def _required() -> tuple[str, ...]:
    """What deploy/Dockerfile installs: all that Leyden requires, with Kubernetes."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    roots = [*project["dependencies"], *project["optional-dependencies"]["kubernetes"]]
    return tuple(root.partition(">")[0].partition("=")[0] for root in roots)


IMAGES = {
    "python_image": Image("testbed.local/leyden-python:1", ("mini-swe-agent",)),
    "agent_image": Image("testbed.local/agent:1", ("mini-swe-agent",), with_leyden=False),
    "leyden_image": Image("testbed.local/leyden:1", _required(), WITHOUT_TRAINING),
}
