"""What stands for a whole session of tests: it is started before the first test, under no test's limit.

If it does not start, the session ends there, with one message instead of an error for each test.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import TypeVar

import pytest

from tests.set_up import NotHere, SetUpFailed, say

T = TypeVar("T")
NOT_SET_UP = 3


def fixtures_used(session: pytest.Session, mark: str) -> frozenset[str]:
    """Names of the fixtures that the chosen tests with this mark ask for; none if tests are only listed."""
    if session.config.option.collectonly:
        return frozenset()
    marked = [item for item in session.items if item.get_closest_marker(mark)]
    return frozenset(name for item in marked for name in getattr(item, "fixturenames", ()))


def stand(session: pytest.Session, what: str, start: Callable[[], AbstractContextManager[T]]) -> T:
    """Enter the context now, and leave it when the session ends."""
    stack = ExitStack()
    session.config.add_cleanup(stack.close)
    began = time.monotonic()
    with session.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        say(f"{what}: starting")
        try:
            value = stack.enter_context(start())
        except (NotHere, SetUpFailed) as problem:
            pytest.exit(f"{what}: {problem}", returncode=NOT_SET_UP)
        say(f"{what}: ready in {time.monotonic() - began:.0f} s")
    return value
