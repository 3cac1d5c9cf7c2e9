"""What `leyden` prints: lines, tables and JSON, on a terminal of any width, in a file or a pipe.

A table that is wider than the screen becomes one paragraph per row, so that nothing is ever cut. Text is shown as it
is: neither markup nor escape sequences in it have an effect.
"""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from leyden.visible import visible, visible_lines

PLAIN_COLUMNS = 240
UNBOUNDED = 1_000_000
TableParts = tuple[Sequence[str], Sequence[Sequence[str]], str]
"""Columns, rows and title of a table."""


class Line(NamedTuple):
    """Not rich's Text, which drops some control characters instead of showing them."""

    plain: str
    style: str = ""


class Screen:
    def __init__(self, console: Console | None = None) -> None:
        self._console = console or plain_console()

    def line(self, text: str, style: str = "") -> None:
        """One line, wrapped by the terminal alone."""
        self._console.print(Text(visible(text), style), soft_wrap=True)

    def error(self, text: str) -> None:
        """What it says may have several lines; none but the first looks like an error of Leyden's."""
        self._console.print(Text(f"error: {visible_lines(text, '  ')}", "red"), soft_wrap=True)

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[str]], title: str = "") -> None:
        """A column that is empty in every row is left out. The first column names a row."""
        shown = [[visible(cell) for cell in row] for row in rows]
        kept = [i for i in range(len(columns)) if not shown or any(row[i] for row in shown)]
        if title:
            self.line(title, "italic")
        table = Table()
        for index in kept:
            table.add_column(columns[index], no_wrap=True)
        for row in shown:
            table.add_row(*(Text(row[index]) for index in kept))
        unbounded = self._console.options.update(width=UNBOUNDED)
        if self._console.measure(table, options=unbounded).maximum <= self._console.width:
            self._console.print(table)
            return
        for row in shown:
            self._paragraph([(columns[index], row[index]) for index in kept])

    def json(self, document: Any) -> None:
        """ASCII, so that nothing of it is obeyed."""
        self._console.file.write(json.dumps(document, indent=2, ensure_ascii=True, default=str) + "\n")

    def _paragraph(self, cells: Sequence[tuple[str, str]]) -> None:
        (name, value), *rest = cells
        self.line(f"{name} {value}", "bold")
        facts = " | ".join(f"{name} {value}" for name, value in rest if value)
        width = max(20, self._console.width)
        for line in textwrap.wrap(
            facts, width, initial_indent="  ", subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        ):
            self.line(line)


def plain_console(*, stderr: bool = False) -> Console:
    """A console of the terminal's width; that of COLUMNS, or a wide one, where there is no terminal."""
    console = Console(stderr=stderr, highlight=False, markup=False, emoji=False)
    if console.is_terminal:
        return console
    columns = os.environ.get("COLUMNS", "")
    width = int(columns) if columns.isdecimal() and int(columns) else PLAIN_COLUMNS
    return Console(stderr=stderr, highlight=False, markup=False, emoji=False, width=width)
