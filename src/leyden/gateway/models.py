"""The model in training and its engines: which are registered, which of them work, and which one a rollout asks."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from types import MappingProxyType

from leyden.errors import EngineUnsuitable, NotFound
from leyden.gateway.metrics import Metrics
from leyden.records import EngineHealth, Model
from leyden.store import Store

log = logging.getLogger(__name__)


@dataclass(slots=True)
class EngineState:
    """`problem` says why an engine is not asked; None: it works, as far as is known, and `checked`, as it has shown.
    `unsuitable`: it answers, but as it was started it cannot serve this run; `broken`: it answers, but samples nothing.
    `failures` counts checks that failed since it last worked.
    """

    url: str
    problem: str | None = None
    checked: bool = False
    unsuitable: bool = False
    broken: bool = False
    failures: int = 0


class Models:
    """Registered engines of the run's model, kept in the store so that a restarted gateway knows them.

    Calls need not wait for a new engine to show that it works: they check it.
    """

    def __init__(self, store: Store, name: str, context_tokens: int, metrics: Metrics) -> None:
        self._store = store
        self._metrics = metrics
        self.name = name
        self._limit = context_tokens
        self._model: Model | None = store.models().get(name)
        self._engines: dict[str, EngineState] = {}
        self._keep(self._model.engines if self._model else [])

    @property
    def ready(self) -> bool:
        """Whether calls need not wait: an engine works, or none ever will."""
        return self.hopeless or any(engine.problem is None for engine in self._engines.values())

    @property
    def hopeless(self) -> bool:
        return bool(self._engines) and all(engine.unsuitable for engine in self._engines.values())

    @property
    def all_work(self) -> bool:
        return all(engine.problem is None for engine in self._engines.values())

    @property
    def urls(self) -> list[str]:
        return list(self._engines)

    @property
    def version(self) -> int:
        return self._model.version if self._model else 0

    @property
    def context_tokens(self) -> int:
        return min(self._limit, self._model.context_tokens) if self._model else self._limit

    def register(self, name: str, engines: list[str], version: int, lineage: str, context_tokens: int) -> None:
        if name != self.name:
            raise NotFound(f"there is no model {name!r} in this run; the run file names {self.name!r}")
        self._store.set_model(name, engines, version, lineage, context_tokens)
        self._model = self._store.models()[name]
        self._keep(engines)

    def adopt(self, engines: list[str], lineage: str) -> None:
        """Register engines of the run file, with the weights that were last said of the model, else version 0."""
        known = self._model or Model(self.name, (), 0, lineage, self._limit)
        self.register(self.name, engines, known.version, known.lineage, known.context_tokens)

    def choose(self, rollout_id: str, failed: Mapping[str, int] = MappingProxyType({})) -> str:
        """One engine per rollout, so that its prefix cache is met again: the one that works and draws highest, among
        those at which the call has `failed` least often. Where one goes, only its own rollouts move. Raises
        EngineUnsuitable if none can ever serve.
        """
        working = [url for url, engine in self._engines.items() if engine.problem is None]
        if not working:
            raise EngineUnsuitable(self.problems)
        if len(working) == 1:
            return working[0]
        return max(working, key=lambda url: (-failed.get(url, 0), _draw(rollout_id, url)))

    @property
    def problems(self) -> str:
        return "; ".join(str(engine.problem) for engine in self._engines.values())

    @property
    def broken(self) -> bool:
        """Whether no engine works, and one that does not is there all the same."""
        states = self._engines.values()
        return all(engine.problem is not None for engine in states) and any(engine.broken for engine in states)

    def is_broken(self, url: str) -> bool:
        engine = self._engines.get(url)
        return engine is not None and engine.broken

    def checked(self, url: str) -> bool:
        engine = self._engines.get(url)
        return engine is not None and engine.checked

    def works(self, url: str) -> bool:
        engine = self._engines.get(url)
        return engine is not None and engine.problem is None

    def up(self, url: str) -> None:
        if engine := self._engines.get(url):
            if engine.problem is not None:
                log.warning("engine %s works again", url)
            engine.problem, engine.checked, engine.failures = None, True, 0
            engine.unsuitable = engine.broken = False
            self._metrics.engine_up.labels(url).set(1)

    def down(self, url: str, problem: str, *, unsuitable: bool = False, broken: bool = False) -> int:
        """Answers how often in a row it has failed."""
        engine = self._engines.get(url)
        if engine is None:
            return 0
        if engine.problem is None or (engine.unsuitable, engine.broken) != (unsuitable, broken):
            log.error("engine %s is not asked any more: %s", url, problem)
        engine.problem, engine.checked, engine.unsuitable, engine.broken = problem, False, unsuitable, broken
        engine.failures += 1
        self._metrics.engine_up.labels(url).set(0)
        return engine.failures

    def listing(self) -> tuple[Model, ...]:
        states = tuple(EngineHealth(e.url, e.problem is None, e.problem) for e in self._engines.values())
        models = self._store.models().values()
        return tuple(replace(model, engine_states=states) if model.name == self.name else model for model in models)

    def _keep(self, urls: Sequence[str]) -> None:
        for url in self._engines.keys() - set(urls):
            self._metrics.engine_up.remove(url)
        self._engines = {url: self._engines.get(url) or EngineState(url) for url in urls}
        for url, engine in self._engines.items():
            self._metrics.engine_up.labels(url).set(engine.problem is None)


def _draw(rollout_id: str, url: str) -> bytes:
    """Rendezvous hashing: a number for each pair, equal in every gateway."""
    return blake2b(f"{rollout_id} {url}".encode(), digest_size=8).digest()
