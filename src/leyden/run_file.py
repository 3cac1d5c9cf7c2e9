"""The run file: one YAML document, checked as `config` says. An unknown key, a wrong type or an impossible combination
is refused with its key path, its value and the nearest valid key.
"""

from __future__ import annotations

import difflib
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from leyden import yaml12
from leyden.config import RunConfig, Section
from leyden.errors import ConfigError

AnySection = TypeVar("AnySection", bound=Section)


def load(path: Path, overrides: list[str] | None = None) -> RunConfig:
    """Read a run file, apply `key.sub=value` overrides (values are YAML), check, and make paths absolute.

    Raises ConfigError naming the key path, the value, the limit and the nearest valid key.
    """
    try:
        document = yaml12.load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError("", f"cannot read run file {path}: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError("", f"{path} is not YAML: {error}") from error
    if not isinstance(document, dict):
        raise ConfigError("", f"{path} holds {type(document).__name__}, not a mapping of settings")
    for override in overrides or []:
        _apply_override(document, override)
    return absolute(parse(document), path.resolve().parent)


def parse(document: dict[str, Any]) -> RunConfig:
    """Check a document that is already in memory. Raises ConfigError."""
    if "config_dir" in document:
        raise ConfigError("config_dir", "is the run file's own folder and cannot be set")
    try:
        # JSON, because pydantic's strict mode takes paths and tuples from JSON but not from Python values.
        return RunConfig.model_validate_json(json.dumps(_plain(document)))
    except ValidationError as error:
        raise _explain(error) from None


def dump(config: RunConfig) -> dict[str, Any]:
    """The settings as a run file would say them."""
    return config.model_dump(mode="json", exclude={"config_dir"})


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


def _apply_override(document: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ConfigError("", f"override {override!r} is not of the form key.sub=value")
    try:
        value = yaml12.load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(key, f"{text!r} is not a YAML value: {error}") from None
    *parents, last = key.split(".")
    node = document
    for name in parents:
        child = node.setdefault(name, {})
        if not isinstance(child, dict):
            raise ConfigError(key, f"{name!r} holds {child!r}, which has no keys of its own")
        node = child
    node[last] = value


def absolute(config: RunConfig, base: Path) -> RunConfig:
    """Every path of the run file, as an absolute one: `~` is the home folder, a relative path starts at `base`."""
    config = _with_absolute_paths(config, base, "").model_copy(update={"config_dir": base})
    model, harness, workspace = config.model, config.harness, config.workspace
    if is_local(model.path) or (base / model.path).is_dir():
        model = model.model_copy(update={"path": str(_under(base, model.path, "model.path"))})
    if harness.python is not None and os.sep in harness.python:
        python = str(_under(base, harness.python, "harness.python"))
        harness = harness.model_copy(update={"python": python})
    if workspace.template is not None and workspace.template.startswith("~"):
        template = str(_home(workspace.template, "workspace.template"))
        workspace = workspace.model_copy(update={"template": template})
    return config.model_copy(update={"model": model, "harness": harness, "workspace": workspace})


def is_local(model_path: str) -> bool:
    """Whether a model's path can only be a folder: a hub id is `name` or `organisation/name`."""
    return model_path.startswith((".", "/", "~")) or model_path.count("/") > 1


def _with_absolute_paths(section: AnySection, base: Path, prefix: str) -> AnySection:
    changed: dict[str, Any] = {}
    for name in type(section).model_fields:
        value, key = getattr(section, name), prefix + name
        if isinstance(value, Section):
            changed[name] = _with_absolute_paths(value, base, f"{key}.")
        elif isinstance(value, Path):
            changed[name] = _under(base, value, key)
        elif isinstance(value, list) and any(isinstance(item, Path) for item in value):
            changed[name] = [_under(base, item, key) for item in value]
    return section.model_copy(update=changed)


def _under(base: Path, path: str | Path, key: str) -> Path:
    return Path(os.path.normpath(base / _home(path, key)))


def _home(path: str | Path, key: str) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ConfigError(
            key, f"{os.fspath(path)!r}: no such user has a home folder here; write ./~ for a name"
        ) from None


def _explain(error: ValidationError) -> ConfigError:
    """The first problem of a pydantic report, as one sentence that names the fix."""
    first = error.errors(include_url=False)[0]
    location = [str(part) for part in first["loc"]]
    path, value = ".".join(location), first["input"]
    if first["type"] == "extra_forbidden":
        return ConfigError(path, f"unknown key (value {value!r}); {_nearest(location)}")
    if first["type"] == "missing":
        return ConfigError(path, "is required and missing")
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error":
        return ConfigError(path, message)
    return ConfigError(path, f"{value!r} is refused: {message}")


def _nearest(location: list[str]) -> str:
    """What may have been meant by an unknown key: one of the same section, else one of another."""
    valid = _keys_at(location[:-1])
    if near := difflib.get_close_matches(location[-1], valid, n=1, cutoff=0.6):
        return f"did you mean {near[0]!r}?"
    elsewhere = {key.rpartition(".")[2]: key for key in _all_keys(RunConfig, "")}
    if near := difflib.get_close_matches(location[-1], elsewhere, n=1, cutoff=0.8):
        return f"did you mean {elsewhere[near[0]]!r}?"
    near = difflib.get_close_matches(location[-1], valid, n=1, cutoff=0.3)
    return f"{f'did you mean {near[0]!r}? ' if near else ''}valid keys are {', '.join(sorted(valid))}"


def _all_keys(section: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, field in section.model_fields.items():
        nested = _section_of(field.annotation)
        if nested is not None:
            yield from _all_keys(nested, f"{prefix}{name}.")
        elif name != "config_dir":
            yield prefix + name


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
