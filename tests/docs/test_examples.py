"""The examples in docstrings say what is so."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

import leyden

ROOT = Path(leyden.__file__).parent
MODULES = sorted(
    "leyden." + ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in ROOT.rglob("*.py")
    if ">>>" in path.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("name", MODULES)
def test_examples_of_docstrings(name: str) -> None:
    ran = doctest.testmod(importlib.import_module(name))
    assert ran.attempted > 0
    assert ran.failed == 0
