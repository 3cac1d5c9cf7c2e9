"""The run file: one YAML document, checked as `config` says. An unknown key, a wrong type or an impossible combination
is refused with its key path, its value and the nearest valid key.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import re
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from leyden.config import RunConfig
from leyden.errors import ConfigError


def load(path: Path, overrides: list[str] | None = None) -> RunConfig:
    """Read a run file, apply `key.sub=value` overrides (values are YAML), check, and make paths absolute.

    Raises ConfigError naming the key path, the value, the limit and the nearest valid key.
    """
    try:
        document = _yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError("", f"cannot read run file {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError("", f"{path} is not YAML: {error}") from error
    if not isinstance(document, dict):
        raise ConfigError("", f"{path} holds {type(document).__name__}, not a mapping of settings")
    for override in overrides or []:
        _apply_override(document, override)
    return _absolute(parse(document), path.resolve().parent)


def parse(document: dict[str, Any]) -> RunConfig:
    """Check a document that is already in memory. Raises ConfigError."""
    if "config_dir" in document:
        raise ConfigError("config_dir", "is the run file's own folder and cannot be set")
    try:
        # JSON, because pydantic's strict mode takes paths and tuples from JSON but not from Python values.
        return RunConfig.model_validate_json(json.dumps(_plain(document)))
    except ValidationError as error:
        raise _explain(error) from None


def _plain(value: Any, path: str = "") -> Any:
    """`value` if JSON can say it exactly. Raises ConfigError with the key path of what it cannot."""
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise ConfigError(f"{path}.{key}".lstrip("."), f"key {key!r} is not a string; quote it")
        return {key: _plain(item, f"{path}.{key}".lstrip(".")) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item, f"{path}.{index}".lstrip(".")) for index, item in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(path, f"{value} is refused: give a finite number")
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise ConfigError(path, f"{value!r} is {type(value).__name__}, which no setting takes; quote it")


class _Loader(yaml.SafeLoader):
    """YAML as the run file means it: 1e-3 is a number (YAML 1.2), and a key given twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for position, key in enumerate(keys):
            if any(key.value == earlier.value for earlier in keys[:position]):
                raise yaml.constructor.ConstructorError(None, None, f"key {key.value!r} is given twice", key.start_mark)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$"),
    list("-+.0123456789"),
)


def _yaml(text: str) -> Any:
    return yaml.load(text, _Loader)  # noqa: S506  (a SafeLoader)


def _apply_override(document: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ConfigError("", f"override {override!r} is not of the form key.sub=value")
    try:
        value = _yaml(text)
    except yaml.YAMLError as error:
        raise ConfigError(key, f"{text!r} is not a YAML value: {error}") from None
    *parents, last = key.split(".")
    node = document
    for name in parents:
        child = node.setdefault(name, {})
        if not isinstance(child, dict):
            raise ConfigError(key, f"{name!r} holds {child!r}, which has no keys of its own")
        node = child
    node[last] = value


def _absolute(config: RunConfig, base: Path) -> RunConfig:
    def under_base(path: Path) -> Path:
        return Path(os.path.normpath(base / path))

    data = config.data.model_copy(
        update={
            "train": under_base(config.data.train),
            "validation": config.data.validation and under_base(config.data.validation),
        }
    )
    local_model = under_base(Path(config.model.path))
    model = config.model.model_copy(update={"path": str(local_model)}) if local_model.is_dir() else config.model
    return config.model_copy(
        update={"run_dir": under_base(config.run_dir), "data": data, "model": model, "config_dir": base}
    )


def _explain(error: ValidationError) -> ConfigError:
    """The first problem of a pydantic report, as one sentence that names the fix."""
    first = error.errors(include_url=False)[0]
    location = [str(part) for part in first["loc"]]
    path, value = ".".join(location), first["input"]
    if first["type"] == "extra_forbidden":
        valid = _keys_at(location[:-1])
        near = difflib.get_close_matches(location[-1], valid, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]!r}?" if near else f"; valid keys are {', '.join(sorted(valid))}"
        return ConfigError(path, f"unknown key (value {value!r}){hint}")
    if first["type"] == "missing":
        return ConfigError(path, "is required and missing")
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error":
        return ConfigError(path, message)
    return ConfigError(path, f"{value!r} is refused: {message}")


def _keys_at(location: list[str]) -> list[str]:
    section: type[BaseModel] = RunConfig
    for name in location:
        field = section.model_fields.get(name)
        nested = _section_of(field.annotation) if field else None
        if nested is None:
            return []
        section = nested
    return [name for name in section.model_fields if name != "config_dir"]


def _section_of(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (Union, UnionType):
        return next((s for s in map(_section_of, get_args(annotation)) if s), None)
    return None
