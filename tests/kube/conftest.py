"""Tests on a real cluster: `make kube`, or `pytest -m kube`; left out of every other run."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from leyden.controller.backends.kubernetes.api import KubernetesApi
from tests.kube.cluster import Cluster, cluster
from tests.kube.observer import Observer
from tests.kube.rootfs import leyden_layer, packages_layer

PYTHON_IMAGE = "testbed.local/leyden-python:1"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "kube" in config.option.markexpr:
        return
    left_out = [item for item in items if item.get_closest_marker("kube")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("kube")]


@pytest.fixture(scope="session")
def kube() -> Iterator[Cluster]:
    """The cluster of the session, booted once."""
    with cluster() as it:
        yield it


@pytest.fixture
def namespace(kube: Cluster) -> Iterator[str]:
    """A namespace of the test's own."""
    with kube.namespace() as name:
        yield name


@pytest.fixture
async def api(kube: Cluster, namespace: str) -> AsyncIterator[KubernetesApi]:
    async with await KubernetesApi.connect(namespace, kube.kubeconfig) as it:
        yield it


@pytest.fixture
async def observer(api: KubernetesApi) -> AsyncIterator[Observer]:
    """The changes in the namespace from now on."""
    it = Observer(api)
    await it.until(lambda: it.listed() == 2)
    yield it
    await it.close()


@pytest.fixture(scope="session")
def python_image(kube: Cluster, tmp_path_factory: pytest.TempPathFactory) -> str:
    """An image with this interpreter, Leyden as it is in the repository, and mini-swe-agent."""
    if kube.state is None:
        name = os.environ.get("LEYDEN_KUBE_PYTHON")
        return name or pytest.skip("set LEYDEN_KUBE_PYTHON to an image with Python, Leyden and mini-swe-agent")
    kube.add_image(PYTHON_IMAGE, [mini_layer(kube), leyden_layer(tmp_path_factory.mktemp("leyden-layer") / "root")])
    return PYTHON_IMAGE


def mini_layer(kube: Cluster) -> Path:
    """A root file system with this interpreter and mini-swe-agent."""
    cache = Path(kube.environment["KT_CACHE"])
    return packages_layer(cache / "images", ("mini-swe-agent",), cache / "root" / "bin" / "busybox")
