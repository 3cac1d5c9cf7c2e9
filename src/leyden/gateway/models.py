"""The model in training and its engines."""

from __future__ import annotations

import zlib

from leyden.errors import NotFound
from leyden.store import Store
from leyden.types import Json


class Models:
    """Registered engines of the run's model, kept in the store so that a restarted gateway knows them."""

    def __init__(self, store: Store, name: str, context_tokens: int) -> None:
        self._store = store
        self.name = name
        self._limit = context_tokens
        self._model: Json | None = store.models().get(name)

    @property
    def ready(self) -> bool:
        return bool(self._model and self._model["engines"])

    @property
    def context_tokens(self) -> int:
        return min(self._limit, self._model["context_tokens"]) if self._model else self._limit

    def register(self, name: str, engines: list[str], version: int, lineage: str, context_tokens: int) -> None:
        if name != self.name:
            raise NotFound(f"there is no model {name!r} in this run; the run file names {self.name!r}")
        self._store.set_model(name, engines, version, lineage, context_tokens)
        self._model = self._store.models()[name]

    def engine(self, rollout_id: str) -> str:
        """One engine per rollout, so that its prefix cache is met again."""
        engines: list[str] = self._model["engines"] if self._model else []
        return engines[zlib.crc32(rollout_id.encode()) % len(engines)]

    def listing(self) -> list[Json]:
        return list(self._store.models().values())
