"""Where tables go: the terminal at its width, or a file or pipe at one that holds them."""

from __future__ import annotations

from rich.console import Console

PLAIN_COLUMNS = 240


def screen() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PLAIN_COLUMNS)
