"""What a run folder holds, read without changing it: no gateway is started, nothing is migrated or marked."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Protocol

import orjson

from leyden.client import ControlClient, Rollout, control_key, read_or_create_secret
from leyden.config import RunConfig
from leyden.errors import ConfigError
from leyden.run_file import parse
from leyden.store import Rollouts, Turns, looking
from leyden.types import RolloutState, Turn


class Record(Protocol):
    """The part of `client.ControlClient` that only reads."""

    async def rollouts(
        self, *, after: int = 0, states: Iterable[RolloutState] = (), limit: int = 1000, tasks: bool = True
    ) -> tuple[list[Rollout], int]: ...

    async def rollout(self, rollout_id: str) -> Rollout: ...

    async def turns(self, rollout_ids: Iterable[str]) -> list[Turn]: ...


class StoredRecord:
    """A `Record` that is read from the store, of a gateway that runs or that does not."""

    def __init__(self, rollouts: Rollouts, turns: Turns) -> None:
        self._rollouts = rollouts
        self._turns = turns

    async def rollouts(
        self, *, after: int = 0, states: Iterable[RolloutState] = (), limit: int = 1000, tasks: bool = True
    ) -> tuple[list[Rollout], int]:
        rows = self._rollouts.after(after, list(states) or list(RolloutState), limit, tasks=tasks)
        return rows, rows[-1].change if rows else after

    async def rollout(self, rollout_id: str) -> Rollout:
        return self._rollouts.get(rollout_id)

    async def turns(self, rollout_ids: Iterable[str]) -> list[Turn]:
        return list(self._turns.of_rollouts(list(rollout_ids)))


def read_run(run_dir: Path) -> RunConfig:
    """The settings that a run was last started with."""
    path = run_dir / "run.json"
    try:
        settings = orjson.loads(path.read_bytes())["config"]
    except OSError:
        raise ConfigError("RUN_DIR", f"{run_dir} is not the folder of a run: it has no run.json") from None
    except (orjson.JSONDecodeError, KeyError, TypeError):
        raise ConfigError("RUN_DIR", f"{path} is damaged") from None
    settings.pop("config_dir", None)
    return parse(settings).model_copy(update={"run_dir": run_dir.resolve()})


@contextlib.asynccontextmanager
async def record_of(run_dir: Path, config: RunConfig, secret: bytes | None) -> AsyncIterator[Record]:
    """The store of the run folder; where its gateway keeps it elsewhere (`gateway.url`), that gateway is asked.

    Raises ConfigError if there is neither, StoreError if the store cannot be read.
    """
    path = run_dir / "store.sqlite"
    if path.exists():
        with looking(path) as connection:
            yield StoredRecord(Rollouts(connection, lambda: None), Turns(connection))
    elif config.gateway.url:
        async with ControlClient(config.gateway.url, control_key(secret or read_or_create_secret(run_dir))) as client:
            yield client
    else:
        raise ConfigError("RUN_DIR", f"{run_dir} has no store.sqlite: its gateway never started")
