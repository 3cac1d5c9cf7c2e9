"""YAML 1.2's core schema, read by PyYAML, which by itself reads YAML 1.1.

`off`, `12:30` and `2024-01-01` are text; `1e-3` is a number; a key given twice is an error, and so is `010`, which is
eight in YAML 1.1 and ten in YAML 1.2.
"""

from __future__ import annotations

import re
from typing import Any

import yaml


def load(text: str) -> Any:
    """The one document in `text`. Raises yaml.YAMLError, which names line and column."""
    return yaml.load(text, _Loader)  # noqa: S506  (a SafeLoader)


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012  (PyYAML's own)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for position, key in enumerate(keys):
            if any(key.value == earlier.value for earlier in keys[:position]):
                raise yaml.constructor.ConstructorError(None, None, f"key {key.value!r} is given twice", key.start_mark)
        return super().construct_mapping(node, deep)

    def construct_integer(self, node: yaml.ScalarNode) -> int:
        text = str(self.construct_scalar(node))
        digits = text.lstrip("+-")
        if len(digits) > 1 and digits.isdigit() and digits.startswith("0"):
            plain = digits.lstrip("0") or "0"
            said = f"{text} is octal in YAML 1.1 and decimal in YAML 1.2: write {plain}, or 0o... for octal; quote text"
            raise yaml.constructor.ConstructorError(None, None, said, node.start_mark)
        return int(text, 0)

    def construct_real(self, node: yaml.ScalarNode) -> float:
        return float(str(self.construct_scalar(node)).lower().replace(".inf", "inf").replace(".nan", "nan"))


def _resolve(tag: str, pattern: str, first: str) -> None:
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(pattern), list(first))


_resolve("null", r"^(null|Null|NULL|~|)$", "nN~")
_Loader.yaml_implicit_resolvers.setdefault("", []).append(("tag:yaml.org,2002:null", re.compile(r"^$")))
_resolve("bool", r"^(true|True|TRUE|false|False|FALSE)$", "tTfF")
_resolve("int", r"^([-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$", "-+0123456789")
_resolve(
    "float",
    r"^([-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))$",
    "-+.0123456789",
)
_resolve("merge", r"^<<$", "<")
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_integer)
_Loader.add_constructor("tag:yaml.org,2002:float", _Loader.construct_real)
