"""The code blocks of the pages, and the commands in them.

The first word after the fence is the language. The rest is the file that the block is, or `needs ...`: why no test
runs it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import dropwhile
from pathlib import Path
from textwrap import dedent

REPOSITORY = Path(__file__).parents[2]
PAGES = tuple(
    path
    for pattern in ("*.md", "docs/*.md", "examples/*/*.md", "tests/*/*/README.md")
    for path in sorted(REPOSITORY.glob(pattern))
)
FENCED = re.compile(r"^( *)```(.*)\n((?:.*\n)*?)\1```$", re.MULTILINE)
NEEDS = "needs "
ASSIGNED = re.compile(r"[A-Z_]+=.*")
ENDS = frozenset({"&&", "||", "|", ";", "&", "(", ")"})


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    rest: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def needs(self) -> str:
        """Why it is not run; empty if it is."""
        return self.rest.removeprefix(NEEDS) if self.rest.startswith(NEEDS) else ""

    @property
    def file(self) -> str:
        """The file that it is, from the page's folder; empty if it is none."""
        return "" if self.needs else self.rest


def page_blocks(path: Path) -> list[Block]:
    text, name = path.read_text(), path.relative_to(REPOSITORY).as_posix()
    found = []
    for match in FENCED.finditer(text):
        language, _, rest = match[2].partition(" ")
        line = text.count("\n", 0, match.start()) + 1
        found.append(Block(name, line, language, rest.strip(), dedent(match[3])))
    return found


def without_blocks(path: Path) -> str:
    return FENCED.sub("", path.read_text())


def commands(text: str) -> Iterator[list[str]]:
    """The words of each simple command of a shell's text; `$(...)` is one word."""
    whole = re.sub(r"\$\([^()]*\)", "SUBSTITUTED", text.replace("\\\n", " ").replace("|\n", "| "))
    for line in whole.splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if word not in ENDS:
                words.append(word)
            elif words:
                yield list(dropwhile(ASSIGNED.fullmatch, words))
                words = []
