import os
from pathlib import Path

from leyden.controller.last_words import MOST_CHARS, last_lines, last_words


def test_the_last_line_that_is_not_blank(tmp_path: Path) -> None:
    log = tmp_path / "harness.log"
    assert (last_words(log), last_lines(log, 3)) == ("", ())
    log.write_text("first\n" * 2000 + "Traceback\n  at x\nValueError: no such file\n\n  \n")
    assert last_words(log) == "ValueError: no such file"
    assert last_lines(log, 2) == ("  at x", "ValueError: no such file")
    log.write_bytes(b"\xff" * 10_000)
    assert len(last_words(log)) == MOST_CHARS


def test_what_a_harness_put_in_place_of_its_log_is_not_read(tmp_path: Path) -> None:
    secret, log = tmp_path / "secret", tmp_path / "harness.log"
    secret.write_text("secret")
    log.symlink_to(secret)
    assert last_words(log) == ""
    log.unlink()
    os.mkfifo(log)
    assert last_words(log) == ""
    log.unlink()
    log.mkdir()
    assert last_words(log) == ""
