r"""Text of strangers on a terminal or in a log: shown, never obeyed.

What tasks, models, tools, harnesses and graders say may hold escape sequences, marks that turn the reading direction,
or line ends that forge a line of a log. `visible` spells all of these out. It is called where text leaves: in
`trainer.display.Display`, `cli.screen.Screen` and `LogFormatter`, and nowhere else.
"""

from __future__ import annotations

import logging
import re
from types import TracebackType

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_OBEYED = re.compile(
    "[\x00-\x08\x0a-\x1f\x7f-\x9f"  # C0 but the tab, C1
    "\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"  # directions, lines, what has no width
    "\ud800-\udfff\U000e0000-\U000e007f]"  # halves that no terminal can be sent, tags
)


def visible(text: str) -> str:
    r"""One line, in which what a terminal would obey is spelt out.

    >>> print(visible("a\x1b[2J\nb"))
    a\x1b[2J\nb
    """
    return _OBEYED.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def visible_lines(text: str, indent: str = "") -> str:
    """`visible` for each line of a text that may have several; all but the first begin with `indent`."""
    return f"\n{indent}".join(map(visible, text.split("\n")))


class LogFormatter(logging.Formatter):
    """A record is one line; a traceback follows on lines that cannot be taken for records."""

    def __init__(self) -> None:
        super().__init__(LOG_FORMAT)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        record.message = visible(record.message)
        return super().formatMessage(record)

    def formatException(  # noqa: N802
        self, ei: tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]
    ) -> str:
        return "  " + visible_lines(super().formatException(ei), "  ")

    def formatStack(self, stack_info: str) -> str:  # noqa: N802
        return "  " + visible_lines(stack_info, "  ")
