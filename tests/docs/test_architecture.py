"""The pages that name files and functions of the code name ones that are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.blocks import REPOSITORY

SOURCE = REPOSITORY / "src/leyden"
FOLDERS = sorted(path.name for path in SOURCE.iterdir() if (path / "__init__.py").exists())
NAMED = re.compile(rf"`((?:{'|'.join(FOLDERS)})/[\w/]+)(?:\.(\w+))?(?:\.(\w+))?`")


def names(page: str) -> list[tuple[str, str, str]]:
    return sorted(set(NAMED.findall((REPOSITORY / "docs" / page).read_text(encoding="utf-8"))))


def module(path: str) -> Path:
    folder = SOURCE / path
    return folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")


@pytest.mark.parametrize("page", ["architecture.md", "glossary.md"])
def test_what_a_page_names_is_there(page: str) -> None:
    assert names(page)
    missing = [path for path, *_ in names(page) if not (SOURCE / path).is_dir() and not module(path).exists()]
    assert missing == []
    for path, *defined in names(page):
        for name in filter(None, defined):
            text = module(path).read_text(encoding="utf-8")
            assert re.search(rf"^(?: *(?:async )?def|class) {name}\b|^ *{name}\b.*=", text, re.MULTILINE), (path, name)
