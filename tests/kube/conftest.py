"""Tests on a real cluster: `make kube`, or `pytest -m kube`; left out of every other run."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator

import pytest

from leyden.controller.backends.kubernetes.api import KubernetesApi
from tests.kube.cluster import Cluster, cluster
from tests.kube.images import IMAGES
from tests.kube.observer import Observer
from tests.standing import fixtures_used, stand

CLUSTER = pytest.StashKey[Cluster]()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "kube" in config.option.markexpr:
        return
    left_out = [item for item in items if item.get_closest_marker("kube")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("kube")]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Boots the cluster and makes the images that the chosen tests ask for."""
    used = fixtures_used(session, "kube")
    if "kube" not in used:
        return
    kube = session.config.stash[CLUSTER] = stand(session, "Kubernetes", cluster)
    for fixture in IMAGES.keys() & used if kube.state else ():
        image = IMAGES[fixture]
        stand(session, f"image {image.name}", lambda image=image: image.known_to(kube))


@pytest.fixture(scope="session")
def kube(pytestconfig: pytest.Config) -> Cluster:
    """The cluster of the session."""
    return pytestconfig.stash[CLUSTER]


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
def python_image(kube: Cluster) -> str:
    """Python, Leyden as it is in the repository, and mini-swe-agent."""
    if kube.state is None:
        name = os.environ.get("LEYDEN_KUBE_PYTHON")
        return name or pytest.skip("set LEYDEN_KUBE_PYTHON to an image with Python, Leyden and mini-swe-agent")
    return IMAGES["python_image"].name


@pytest.fixture(scope="session")
def agent_image(kube: Cluster, request: pytest.FixtureRequest) -> str:
    """Python and mini-swe-agent; in the test bed without Leyden."""
    return str(request.getfixturevalue("python_image")) if kube.state is None else IMAGES["agent_image"].name


@pytest.fixture(scope="session")
def leyden_image(kube: Cluster) -> str:
    """What deploy/Dockerfile makes, of this environment's packages."""
    return IMAGES["leyden_image"].name if kube.state else pytest.skip("deploys to a test bed only")
