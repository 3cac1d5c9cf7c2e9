"""docs/parts.svg: the packages of Leyden as they import each other, drawn from the code and from the layers."""

from __future__ import annotations

import importlib
import inspect
import textwrap
import tomllib
from collections.abc import Sequence
from html import escape
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parent.parent
WIDTH, BOX_WIDTH, BOX_HEIGHT, ROW_HEIGHT, MARGIN = 960, 220, 84, 136, 24
STYLE = """
  rect { fill: #f6f8fa; stroke: #57606a; rx: 6px }
  text { font: 12px sans-serif; fill: #24292f } .name { font-weight: bold; font-size: 15px }
  path { fill: none; stroke: #57606a; stroke-width: 1.2; marker-end: url(#head) }
  marker path { fill: #57606a; marker-end: none }
"""


def layers() -> list[list[str]]:
    """The packages of each layer, the highest first; single modules are left out."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    named = next(contract["layers"] for contract in settings["contracts"] if contract["type"] == "layers")
    rows = [[part.strip().removeprefix("leyden.") for part in layer.split("|")] for layer in named]
    packages = [[name for name in row if (ROOT / "src/leyden" / name).is_dir()] for row in rows]
    return [row for row in packages if row]


def imports(packages: Sequence[str]) -> dict[str, set[str]]:
    """What each package imports of the others. What another import implies is left out."""
    graph = grimp.build_graph("leyden")

    def direct(one: str, other: str) -> bool:
        return graph.direct_import_exists(importer=f"leyden.{one}", imported=f"leyden.{other}", as_packages=True)

    found = {one: {other for other in packages if other != one and direct(one, other)} for one in packages}
    reached: dict[str, set[str]] = {}
    for one in reversed(packages):  # a layer imports lower ones only
        reached[one] = found[one].union(*(reached[other] for other in found[one]))
    return {one: {o for o in found[one] if not any(o in reached[p] for p in found[one])} for one in packages}


def purpose(package: str) -> str:
    """The first sentence of its docstring."""
    words = inspect.getdoc(importlib.import_module(f"leyden.{package}")) or ""
    return words.partition("\n\n")[0].replace("\n", " ").partition(". ")[0].rstrip(".")


def svg() -> str:
    rows = layers()
    packages = [name for row in rows for name in row]
    height = MARGIN + ROW_HEIGHT * len(rows)
    at: dict[str, tuple[float, float]] = {}
    for level, row in enumerate(rows):
        gap = WIDTH / len(row)
        at |= {name: (gap * (i + 0.5), MARGIN + level * ROW_HEIGHT) for i, name in enumerate(row)}
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}">',
        f"<style>{STYLE}</style>",
        '<defs><marker id="head" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" '
        'orient="auto"><path d="M0 0 8 4 0 8z"/></marker></defs>',
    ]
    for one, others in imports(packages).items():
        lines += [arrow(at[one], at[other]) for other in sorted(others)]
    for name in packages:
        lines += box(name, *at[name])
    return "\n".join([*lines, "</svg>"]) + "\n"


def arrow(start: tuple[float, float], end: tuple[float, float]) -> str:
    (x, y), (to_x, to_y) = (start[0], start[1] + BOX_HEIGHT), end
    bend = (to_y - y) / 2
    return f'<path d="M{x:.0f} {y:.0f} C{x:.0f} {y + bend:.0f} {to_x:.0f} {to_y - bend:.0f} {to_x:.0f} {to_y:.0f}"/>'


def box(name: str, x: float, y: float) -> list[str]:
    lines = [f'<rect x="{x - BOX_WIDTH / 2:.0f}" y="{y:.0f}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}"/>']
    lines.append(f'<text class="name" x="{x:.0f}" y="{y + 20:.0f}" text-anchor="middle">{name}</text>')
    for i, text in enumerate(textwrap.wrap(purpose(name), 32)[:3]):
        lines.append(f'<text x="{x:.0f}" y="{y + 40 + 16 * i:.0f}" text-anchor="middle">{escape(text)}</text>')
    return lines
