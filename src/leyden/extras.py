"""The optional dependencies, looked for before anything starts: `leyden[NAME]` brings those of an extra."""

from __future__ import annotations

from importlib.util import find_spec

from leyden.errors import LeydenError

EXTRAS = {
    "embedded": ("torch", "transformers", "safetensors", "tensorboard", "matplotlib"),
    "kubernetes": ("kubernetes_asyncio",),
}


def missing(extra: str) -> list[str]:
    """The packages of an extra that are not installed."""
    return [name for name in EXTRAS[extra] if find_spec(name) is None]


def need(what: str, *extras: str) -> None:
    """Raises LeydenError, in one line, if packages that `what` needs are not installed."""
    wanted = {extra: packages for extra in extras if (packages := missing(extra))}
    if wanted:
        names = ", ".join(name for packages in wanted.values() for name in packages)
        raise LeydenError(f"{what} needs {names}: pip install 'leyden[{','.join(wanted)}]'")
