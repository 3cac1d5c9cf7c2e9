"""The embedded backend as the loop's `Policy`, with its engine endpoint on loopback."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from leyden.algorithms.batch import Batch
from leyden.config import RunConfig
from leyden.errors import TrainingError
from leyden.trainer.embedded.policy import EmbeddedPolicy
from leyden.trainer.embedded.sampler import Sampler
from leyden.trainer.embedded.server import build_app
from leyden.trainer.folder import checkpoint_name
from leyden.trainer.loop import Cursor, Policy
from leyden.trainer.serving import serve

COUNTED_ELSEWHERE = frozenset({"samples", "tokens"})
SEED_STRIDE = 1_000_003


@dataclass(frozen=True, slots=True)
class ServedPolicy:
    """A policy, the URL of the engine that serves it, and how far its checkpoint is."""

    policy: Policy
    url: str
    cursor: Cursor


@contextlib.asynccontextmanager
async def embedded(config: RunConfig, folder: Path | None) -> AsyncIterator[ServedPolicy]:
    """Load the model, or the checkpoint in `folder`, and serve it. Not announced to any gateway."""
    policy = await asyncio.to_thread(
        EmbeddedPolicy,
        config.model,
        algorithm=config.algorithm,
        optimizer=config.optimizer,
        embedded=config.embedded,
        mini_batches=config.trainer.mini_batches,
        seed=config.trainer.seed,
    )
    cursor = Cursor()
    if folder is not None:
        state = await asyncio.to_thread(policy.load, folder)
        try:
            cursor = Cursor(int(state["step"]), int(state["version"]))
        except (KeyError, TypeError, ValueError):
            raise TrainingError(f"checkpoint {folder} does not say its step and version: {state}") from None
    sampler = policy.make_sampler(version=cursor.version, seed=config.trainer.seed * SEED_STRIDE + cursor.step)
    sampler.start()
    try:
        async with serve(build_app(sampler)) as url:
            yield ServedPolicy(_Embedded(config, policy, sampler), url, cursor)
    finally:
        await asyncio.to_thread(sampler.close)


class _Embedded:
    """Methods block; see `leyden.trainer.loop.Policy`."""

    def __init__(self, config: RunConfig, policy: EmbeddedPolicy, sampler: Sampler) -> None:
        self._config = config
        self._policy = policy
        self._sampler = sampler

    def update(self, batch: Batch) -> Mapping[str, float]:
        metrics = asdict(self._policy.update(batch, self._config.sampling.temperature))
        return {name: value for name, value in metrics.items() if name not in COUNTED_ELSEWHERE}

    def publish(self, version: int, lineage: str) -> None:
        self._policy.publish(self._sampler, version, lineage).result()

    def save(self, cursor: Cursor, best: int | None) -> None:
        self._policy.save(
            self._config.run_dir / "checkpoints",
            checkpoint_name(cursor.step),
            {"step": cursor.step, "version": cursor.version},
            keep=self._config.trainer.keep_checkpoints,
            also=best,
        )
