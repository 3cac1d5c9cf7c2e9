from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.tiny_model import make_tiny_model

# The same examples each time, however long they take.
settings.register_profile("leyden", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("leyden")


@pytest.fixture(scope="session")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder without weights, for whatever renders and never samples."""
    return make_tiny_model(tmp_path_factory.mktemp("tokenizer"), weights=False)


@pytest.fixture(scope="session")
def tiny_model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with random weights."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny-model"))
