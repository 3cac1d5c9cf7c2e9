"""`==` of two arrays is an array, which has no truth: what holds arrays is compared by identity."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
import re

import leyden

ARRAYS = re.compile(r"\b(Ids|Tensor|NDArray|ndarray)\b")


def holds_arrays(thing: type) -> bool:
    return any(ARRAYS.search(str(field.type)) for field in dataclasses.fields(thing))


def test_no_dataclass_that_holds_arrays_compares_its_fields() -> None:
    seen, compared = set(), set()
    for module in pkgutil.walk_packages(leyden.__path__, "leyden."):
        if module.name.endswith("__main__"):
            continue
        for thing in vars(importlib.import_module(module.name)).values():
            if isinstance(thing, type) and dataclasses.is_dataclass(thing) and holds_arrays(thing):
                seen.add(thing.__name__)
                if thing.__eq__ is not object.__eq__:
                    compared.add(thing.__name__)
    assert {"Turn", "Sample", "Node", "PaddedSamples"} <= seen
    assert compared == set()
