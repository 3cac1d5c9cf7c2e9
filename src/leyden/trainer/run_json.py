"""run.json: what a run folder was started with, and that a later start is the same run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from leyden import __version__
from leyden.config import RunConfig
from leyden.errors import TrainingError
from leyden.trainer.report import write_atomically
from leyden.trainer.tasks import Data
from leyden.types import Json

FIXED = (
    ("data", "train"),
    ("config", "data", "shuffle"),
    ("config", "trainer", "seed"),
    ("config", "trainer", "groups_per_step"),
    ("config", "trainer", "group_size"),
    ("config", "model", "path"),
)


def write_run_json(config: RunConfig, data: Data) -> None:
    """Write the resolved configuration and the data's hashes. Raises what `check_same_run` does."""
    check_same_run(config, data)
    write_atomically(config.run_dir / "run.json", orjson.dumps(_run_json(config, data), option=orjson.OPT_INDENT_2))


def check_same_run(config: RunConfig, data: Data) -> None:
    """Raises TrainingError if the run folder was started with another seed, data or group layout: a resume would repeat
    or skip tasks.
    """
    path = config.run_dir / "run.json"
    if not path.exists():
        return
    try:
        before = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise TrainingError(f"{path} cannot be read ({error}); choose another run_dir, or restore it") from None
    now = _run_json(config, data)
    for keys in FIXED:
        old, new = _at(before, keys), _at(now, keys)
        if old != new:
            what = "data.train (sha256)" if keys[0] == "data" else ".".join(keys[1:])
            raise TrainingError(
                f"{config.run_dir} was started with another {what}: {old!r}, now {new!r}; a resume would not be the "
                "same run. Set it back, or choose another run_dir"
            )


def _run_json(config: RunConfig, data: Data) -> Json:
    return {
        "version": __version__,
        "config": config.model_dump(mode="json"),
        "data": {"train": data.train.sha256, "validation": data.validation and data.validation.sha256},
    }


def _at(document: Json, path: Sequence[str]) -> Any:
    value: Any = document
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value
