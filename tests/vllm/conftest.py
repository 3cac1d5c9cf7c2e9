"""Tests on a real vLLM: `make vllm`, or `pytest -m vllm`; left out of every other run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from leyden.gateway.render import ModelRenderer
from tests.vllm.install import NotHere, python
from tests.vllm.model import Reference, make_model
from tests.vllm.server import Vllm, serving_vllm


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


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    folder = tmp_path_factory.mktemp("qwen3")
    return Weights(make_model(folder / "first", 0), make_model(folder / "second", 1))


@pytest.fixture(scope="session")
def vllm(weights: Weights, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vllm]:
    """One server for all tests, since it takes a minute to start."""
    try:
        interpreter = python()
    except NotHere as missing:
        pytest.skip(str(missing))
    with serving_vllm(interpreter, weights.first, tmp_path_factory.mktemp("vllm") / "vllm.log") as url:
        yield Vllm(url)


@pytest.fixture(scope="session")
def renderer(weights: Weights) -> ModelRenderer:
    return ModelRenderer(str(weights.first), "qwen3", "template")


@pytest.fixture(scope="session")
def first(weights: Weights) -> Reference:
    return Reference(weights.first)


@pytest.fixture(scope="session")
def second(weights: Weights) -> Reference:
    return Reference(weights.second)
