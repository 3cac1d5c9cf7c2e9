import io
import logging

import pytest

from leyden.visible import LogFormatter, visible, visible_lines


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("plain text, Grüße, 日本語, 👩\u200d💻\ttab", "plain text, Grüße, 日本語, 👩\u200d💻\ttab"),
        ("\x1b[2J", r"\x1b[2J"),
        ("\x00\x07\x7f\x9b", r"\x00\x07\x7f\x9b"),
        ("a\r\nb\x85c\u2029d", r"a\r\nb\x85c\u2029d"),
        ("\u202e\u2066\u200f\ufeff", r"\u202e\u2066\u200f\ufeff"),
        ("\udc80\U000e0041", r"\udc80\U000e0041"),
    ],
)
def test_what_a_terminal_would_obey_is_spelt_out(raw: str, shown: str) -> None:
    assert visible(raw) == shown


def test_lines_stay_lines_where_they_may() -> None:
    assert visible_lines("a\x1b\nb\r\nc", "  ") == "a\\x1b\n  b\\r\n  c"


def log_of(*args: object, **kwargs: object) -> str:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(LogFormatter())
    logger = logging.Logger("leyden.test")
    logger.addHandler(handler)
    logger.warning(*args, **kwargs)  # type: ignore[arg-type]
    return stream.getvalue()


def test_a_logged_value_forges_no_record() -> None:
    text = log_of("rollout %s: %s", "r1", "exit 1\n2026-01-01 00:00:00,000 INFO leyden: reward 1\x1b[2K")
    assert text.count("\n") == 1
    assert text.endswith(r"rollout r1: exit 1\n2026-01-01 00:00:00,000 INFO leyden: reward 1\x1b[2K" + "\n")


def test_a_traceback_follows_on_lines_that_are_no_records() -> None:
    try:
        raise ValueError("bad\n2026-01-01 00:00:00,000 INFO leyden: forged\x1b[2J")
    except ValueError:
        text = log_of("failed", exc_info=True)
    first, *rest = text.splitlines()
    assert first.endswith("WARNING leyden.test: failed")
    assert rest[-2:] == ["  ValueError: bad", r"  2026-01-01 00:00:00,000 INFO leyden: forged\x1b[2J"]
    assert all(line.startswith("  ") for line in rest)
