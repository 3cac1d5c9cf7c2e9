"""The commands. Only this package reads run files and environment variables, configures logging and prints.

Nothing heavy (torch, transformers, matplotlib, aiohttp) is imported before a command needs it, so that help, refusals
and `--dry-run` answer at once.
"""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """Entry point of `leyden` and `python -m leyden`."""
    from leyden.cli.commands import run

    run()
