"""Tests on a real vLLM: `make vllm`, or `pytest -m vllm`; left out of every other run."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from leyden.gateway.render import ModelRenderer
from tests.standing import fixtures_used, stand
from tests.vllm.model import Reference, make_model
from tests.vllm.server import Vllm, serving_vllm
from tests.vllm.set_up import interpreter


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "vllm" in config.option.markexpr:
        return
    left_out = [item for item in items if item.get_closest_marker("vllm")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("vllm")]


@dataclass(frozen=True)
class Weights:
    """Two sets of weights for one model. The server starts with the first."""

    first: Path
    second: Path


@dataclass(frozen=True)
class Standing:
    weights: Weights
    vllm: Vllm


STANDING = pytest.StashKey[Standing]()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Starts one server for all tests, since it takes a minute."""
    if fixtures_used(session, "vllm") & {"vllm", "weights"}:
        session.config.stash[STANDING] = stand(session, "vLLM", server)


@contextmanager
def server() -> Iterator[Standing]:
    """Raises NotHere and SetUpFailed."""
    python = interpreter()
    with tempfile.TemporaryDirectory(prefix="leyden-vllm-", ignore_cleanup_errors=True) as scratch:
        folder = Path(scratch)
        weights = Weights(make_model(folder / "first", 0), make_model(folder / "second", 1))
        with serving_vllm(python, weights.first, folder / "vllm.log") as url:
            yield Standing(weights, Vllm(url))


@pytest.fixture(scope="session")
def weights(pytestconfig: pytest.Config) -> Weights:
    return pytestconfig.stash[STANDING].weights


@pytest.fixture(scope="session")
def vllm(pytestconfig: pytest.Config) -> Vllm:
    return pytestconfig.stash[STANDING].vllm


@pytest.fixture(scope="session")
def renderer(weights: Weights) -> ModelRenderer:
    return ModelRenderer(str(weights.first), "qwen3", "template")


@pytest.fixture(scope="session")
def first(weights: Weights) -> Reference:
    return Reference(weights.first)


@pytest.fixture(scope="session")
def second(weights: Weights) -> Reference:
    return Reference(weights.second)
