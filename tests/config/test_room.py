from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from leyden import room


def test_what_is_free_what_is_asked_for_and_the_key_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=500_000_000))
    assert room.shortage(tmp_path, 500_000_000) is None
    assert room.shortage(tmp_path, 0) is None
    message = room.shortage(tmp_path, 2_000_000_000) or ""
    assert message.startswith(f"{tmp_path} has 0.50 GB free and controller.min_free_bytes asks for 2.00 GB: no rollout")


def test_a_folder_that_is_not_there_is_not_short(tmp_path: Path) -> None:
    assert room.shortage(tmp_path / "none", 10**30) is None
