"""The data: JSON-lines tasks, and which of them a step trains.

`tasks_for_step` is a pure function of (seed, step), so the data cursor of a run is its step number: a resumed run
repeats and skips nothing. The order is sorted by a hash and does not depend on the version of any library.
"""

from __future__ import annotations

import codecs
import hashlib
from dataclasses import dataclass
from pathlib import Path

import orjson

from leyden.config import DataConfig
from leyden.errors import ConfigError
from leyden.protocols.checks import big_integer
from leyden.types import Json


@dataclass(frozen=True, slots=True)
class TaskSet:
    """The tasks of one file in file order. `sha256` is that of the file's bytes."""

    path: Path
    tasks: tuple[Json, ...]
    sha256: str

    def __len__(self) -> int:
        return len(self.tasks)


def read_tasks(path: Path, key: str = "data.train") -> TaskSet:
    """Read a JSON-lines file; blank lines are skipped.

    Raises ConfigError with `key` and file:line for a line that is not a JSON object, and for a file without tasks.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ConfigError(key, f"cannot read {path}: {error.strerror}") from error
    tasks = []
    for number, line in enumerate(raw.removeprefix(codecs.BOM_UTF8).split(b"\n"), start=1):
        if not line.strip():
            continue
        tasks.append(parse_task(line, key, f"{path}:{number}"))
    if not tasks:
        raise ConfigError(key, f"{path} holds no task; give at least one JSON object, one a line")
    return TaskSet(path, tuple(tasks), hashlib.sha256(raw).hexdigest())


@dataclass(frozen=True, slots=True)
class Data:
    train: TaskSet
    validation: TaskSet | None


def read_data(config: DataConfig) -> Data:
    """Raises ConfigError with file and line for what is not a task."""
    train = read_tasks(config.train, "data.train")
    return Data(train, None if config.validation is None else read_tasks(config.validation, "data.validation"))


def parse_task(text: str | bytes, key: str, where: str) -> Json:
    """One task. Raises ConfigError with `key` and `where` for what is no JSON object, or would not be kept exactly."""
    try:
        task = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise ConfigError(key, f"{where}: not JSON ({error})") from None
    if integer := big_integer(text):
        raise ConfigError(key, f"{where}: the integer {integer:.40} has more than 64 bits; quote it as text")
    if not isinstance(task, dict):
        raise ConfigError(key, f"{where}: a task is a JSON object, not {type(task).__name__}")
    return task


def epoch_order(count: int, seed: int, epoch: int) -> list[int]:
    """A permutation of `range(count)`: indices sorted by the hash of (seed, epoch, index)."""

    def rank(index: int) -> bytes:
        return hashlib.sha256(f"{seed}/{epoch}/{index}".encode()).digest()

    return sorted(range(count), key=rank)


def tasks_for_step(count: int, step: int, groups_per_step: int, *, seed: int, shuffle: bool) -> list[int]:
    """Indices of the tasks of `step` (counted from 1), one per group.

    Steps read the concatenation of all epochs' orders in slices of `groups_per_step`, so each epoch holds
    each task exactly once and a step may reach over the end of one.
    """
    first = (step - 1) * groups_per_step
    orders: dict[int, list[int]] = {}
    chosen = []
    for position in range(first, first + groups_per_step):
        epoch, offset = divmod(position, count)
        if epoch not in orders:
            orders[epoch] = epoch_order(count, seed, epoch) if shuffle else list(range(count))
        chosen.append(orders[epoch][offset])
    return chosen
