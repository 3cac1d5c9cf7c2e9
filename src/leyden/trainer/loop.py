"""The `sync` schedule: for each step, roll out all groups, update, publish, checkpoint, evaluate.

Order of writes, and why a crash at any point loses or repeats nothing. A step s at version v:

    1 groups      created at the gateway, once per (kind, step, slot): asking again gives what is there
    2 rollouts    finish; their turns are in the gateway's store
    3 update      in memory only
    4 metrics     the line of step s, lineage included
    5 publish     the engine samples from version v + 1
    6 checkpoint  on schedule: step and version inside, renamed when complete
    7 consume     the groups of step s are done
    8 evaluate    on schedule, then summary and curve

A run starts from the newest complete checkpoint (step c, version w; 0, 0 without one) with a new lineage id,
and says so in metrics.jsonl; lines of steps after c that stand before that line are superseded. `POST
/api/recover` keeps what version w samples for now, groups of step c + 1 and of the evaluation of step c, whether
finished, running or queued, and makes consumed ones active again; groups of later steps, and those that hold a token
of a version after w, are discarded. So:

    crash before 6  step s is not in the checkpoint. Its groups are used again as they stand (s is c + 1: they give the
                    same update), or they are discarded, and the same tasks are run anew when step s comes, for the
                    tasks of a step follow from the seed alone.
    between 6 and 7 the groups of step s are still active although the checkpoint holds them: groups of steps <= c
                    are consumed at the start.
    The checkpoint of the best evaluation so far outlives `trainer.keep_checkpoints`. Which it is follows from the lines
    of evaluations that hold, so nothing else is written; one that is off the schedule of checkpoints is saved in 8.
    during 8        the evaluation of step c is missing from the lines that hold: it is run (its finished rollouts are
                    still there).

3 to 7 are finished even if the run is told to stop in the middle, and a run that stops writes a checkpoint of the
last finished step. A step without a trained token leaves the weights and the version as they are, and counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from leyden.algorithms.batch import Batch, build_batch, needs_forward
from leyden.config import EvalConfig, ModelConfig, RunConfig
from leyden.errors import TrainingError
from leyden.room import shortage
from leyden.trainer.advice import advice
from leyden.trainer.collect import Collected, Progress, collect, group_request, wait_until_terminal
from leyden.trainer.display import Display, named, progress_line, step_line
from leyden.trainer.evaluate import evaluate
from leyden.trainer.measure import measure
from leyden.trainer.metrics_log import MetricsLog, best_evaluation, current, read_metrics
from leyden.trainer.outcomes import FirstFailures
from leyden.trainer.report import write_report
from leyden.trainer.tasks import Data, tasks_for_step
from leyden.trainer.tensorboard import TensorBoard
from leyden.types import Json

if TYPE_CHECKING:
    from leyden.client import ControlClient, Group

METRICS_FILE = "metrics.jsonl"
EMPTY_REPORT_ROLLOUTS = 10
T = TypeVar("T")
Seconds = dict[str, float]


class Policy(Protocol):
    """What is trained. Methods block and are called in a worker thread, one at a time."""

    def update(self, batch: Batch) -> Mapping[str, float]:
        """One training step; returns metrics by name."""

    def publish(self, version: int, lineage: str) -> None:
        """From now on the engine samples from the current weights, which are `version` of `lineage`."""

    def save(self, cursor: Cursor, best: int | None) -> None:
        """Write a checkpoint that holds `cursor`; it is complete when this returns. Old ones go, but not that of step
        `best`."""


@dataclass(frozen=True, slots=True)
class Cursor:
    """Where a run is: `step` steps are finished and gave `version` published updates."""

    step: int = 0
    version: int = 0


@contextlib.contextmanager
def timed(seconds: Seconds, phase: str) -> Iterator[None]:
    start = time.monotonic()
    yield
    seconds[phase] = round(time.monotonic() - start, 4)


class Loop:
    """One start of a run. `engines` are the URLs that serve the policy; `cursor` is what the checkpoint holds."""

    def __init__(
        self,
        config: RunConfig,
        client: ControlClient,
        policy: Policy,
        *,
        engines: list[str],
        data: Data,
        cursor: Cursor,
        display: Display,
    ) -> None:
        self._unmet: Counter[str] = Counter()
        self._config = config
        self._client = client
        self._policy = policy
        self._engines = engines
        self._data = data
        self._cursor = cursor
        self._display = display
        self._lineage = uuid.uuid4().hex[:12]
        self._log = MetricsLog(config.run_dir / METRICS_FILE)
        self._tensorboard = TensorBoard(config.run_dir / "tensorboard", cursor.step + 1)
        self._saved_step = cursor.step
        self._updating = False
        self._empty_steps = 0
        self._first_failures = FirstFailures(display.warn, set())
        self._short = False

    async def run(self) -> Json:
        """Train to the last step; returns the summary. Cancelling it stops after the writes of the step."""
        try:
            await self._start()
            await self._evaluate_if_due()
            while self._cursor.step < self._config.trainer.steps:
                await self._step(self._cursor.step + 1)
                await self._evaluate_if_due()
            return await asyncio.to_thread(self._report)
        finally:
            self._display.clear()
            if not self._updating and self._cursor.step > self._saved_step:
                self._save()
            self._log.close()
            self._tensorboard.close()

    async def _start(self) -> None:
        at = self._cursor
        self._append("start", {"seconds": {}})
        recovery = await self._client.recover(step=at.step, version=at.version)
        done = [g.group_id for g in await self._client.groups(kind="train", state="active") if g.step <= at.step]
        if done:
            await self._client.consume(done)
        if at.step or recovery.discarded or recovery.reopened:
            self._display.line(
                f"resuming after step {at.step} at policy version {at.version}: "
                f"{len(recovery.discarded)} groups discarded, {len(recovery.reopened)} reopened"
            )
        await self._publish()

    async def _step(self, step: int) -> None:
        seconds: Seconds = {}
        with timed(seconds, "rollouts"):
            groups = await self._client.create_groups(self._requests(step))
            final = await wait_until_terminal(
                self._client,
                groups,
                self._progress(f"step {step}"),
                max_same_failures=self._config.trainer.max_same_failures,
                on_ended=self._first_failures,
            )
        with timed(seconds, "batch"):
            collected = await collect(self._client, groups, final, self._config.trainer.max_sample_tokens)
            batch = await asyncio.to_thread(build_batch, collected.groups, self._config.algorithm)
        await _uninterrupted(self._learn(step, groups, collected, batch, seconds))

    def _requests(self, step: int) -> list[Json]:
        settings, tasks = self._config.trainer, self._data.train.tasks
        chosen = tasks_for_step(
            len(tasks), step, settings.groups_per_step, seed=settings.seed, shuffle=self._config.data.shuffle
        )
        return [
            group_request("train", step, slot, size=settings.group_size, task=tasks[index])
            for slot, index in enumerate(chosen)
        ]

    async def _learn(
        self, step: int, groups: list[Group], collected: Collected, batch: Batch, seconds: Seconds
    ) -> None:
        """Writes 3 to 7 of a step. The gateway is asked before them: a step that is trained has its line."""
        unmet = await self._not_given()
        if why := nothing_to_learn(batch):
            self._cursor = Cursor(step, self._cursor.version)
            line = self._append("skip", {"why": why, **self._measure(collected, batch, {}, seconds, unmet)})
        else:
            self._display.live(f"step {step}  updating on {len(batch.samples)} samples")
            self._updating = True
            with timed(seconds, "update"):
                stats = await asyncio.to_thread(self._policy.update, batch)
            self._cursor = Cursor(step, self._cursor.version + 1)
            self._updating = False
            line = self._append("step", self._measure(collected, batch, stats, seconds, unmet))
            await self._publish()
        self._show(line)
        if step % self._config.trainer.checkpoint_every == 0 or step == self._config.trainer.steps:
            await asyncio.to_thread(self._save)
        await self._client.consume([group.group_id for group in groups])
        self._count_empty(collected, batch)

    def _measure(
        self, collected: Collected, batch: Batch, stats: Mapping[str, float], seconds: Seconds, unmet: Json
    ) -> Json:
        numbers = measure(collected, batch, stats, seconds, pass_threshold=self._config.eval.pass_threshold)
        return {**numbers, "unmet": unmet}

    async def _not_given(self) -> Json:
        """What harnesses asked for and did not get since the last step. A gateway that starts again counts from 0."""
        now = Counter(await self._client.unmet())
        since = now - self._unmet if now >= self._unmet else now
        self._unmet = now
        return dict(since)

    async def _publish(self) -> None:
        seconds: Seconds = {}
        with timed(seconds, "publish"):
            await publish(self._client, self._policy, self._config.model, self._engines, self._cursor, self._lineage)
        self._append("publish", {"seconds": seconds})

    def _save(self) -> None:
        seconds: Seconds = {}
        with timed(seconds, "checkpoint"):
            best = best_evaluation(self._lines())
            self._policy.save(self._cursor, best["step"] if best else None)
        self._saved_step = self._cursor.step
        self._append("checkpoint", {"seconds": seconds})

    def _count_empty(self, collected: Collected, batch: Batch) -> None:
        self._empty_steps = 0 if batch.samples else self._empty_steps + 1
        limit = self._config.trainer.max_empty_steps
        if self._empty_steps >= limit:
            raise TrainingError(empty_report(limit, collected, self._config.run_dir))

    async def _evaluate_if_due(self) -> None:
        at, settings = self._cursor, self._config.eval
        if self._data.validation is None or not eval_due(at.step, self._config.trainer.steps, settings):
            return
        if any(e["event"] == "eval" and e["step"] == at.step for e in current(self._lines())):
            return
        result = await evaluate(
            self._client,
            self._data.validation.tasks[: settings.tasks],
            step=at.step,
            version=at.version,
            settings=settings,
            ks=sorted({1, settings.samples}),
            seed=self._config.trainer.seed,
            on_progress=self._progress(f"validation at step {at.step}"),
            max_same_failures=self._config.trainer.max_same_failures,
            on_ended=self._first_failures,
        )
        self._append("eval", result.as_json())
        self._display.line(f"validation at step {at.step} | {result} | {result.seconds:.1f} s", "bold")
        best = best_evaluation(self._lines())
        if best and best["step"] == at.step > self._saved_step:
            await asyncio.to_thread(self._save)
        await asyncio.to_thread(self._report)

    def _progress(self, label: str) -> Callable[[Progress], None]:
        def show(progress: Progress) -> None:
            short = shortage(self._config.run_dir, self._config.controller.min_free_bytes)
            if short and not self._short:
                self._display.warn(short)
            self._short = short is not None
            self._display.live(progress_line(label, progress))

        return show

    def _append(self, event: str, data: Mapping[str, Any]) -> Json:
        at = self._cursor
        data = {**data, "step": at.step, "version": at.version}
        line = self._log.append(event, step=at.step, version=at.version, lineage=self._lineage, data=data)
        if event in ("step", "skip", "eval"):
            self._tensorboard.add(line)
        return line

    def _show(self, line: Json) -> None:
        self._display.line(step_line(line, self._config.trainer.steps))
        for warning in advice(current(self._lines())):
            self._display.warn(warning)

    def _lines(self) -> list[Json]:
        return read_metrics(self._config.run_dir / METRICS_FILE)

    def _report(self) -> Json:
        return write_report(self._config.run_dir, self._lines())


async def publish(
    client: ControlClient, policy: Policy, model: ModelConfig, engines: list[str], at: Cursor, lineage: str
) -> None:
    """The engine first, then the gateway: what the gateway announces is what is served."""
    await asyncio.to_thread(policy.publish, at.version, lineage)
    await client.put_model(
        model.name, engines=engines, version=at.version, lineage=lineage, context_tokens=model.context_tokens
    )


def eval_due(step: int, steps: int, settings: EvalConfig) -> bool:
    """Whether an evaluation belongs after `step` of `steps` (0: before the first)."""
    if step == 0:
        return settings.at_start
    return (settings.every > 0 and step % settings.every == 0) or (step == steps and settings.at_end)


def nothing_to_learn(batch: Batch) -> str | None:
    """Why an update would change nothing it should, or None."""
    if not batch.samples:
        return "no rollout has a trained token"
    if not any(needs_forward(sample, batch.config) for sample in batch.samples):
        return "every advantage is 0"
    return None


def empty_report(limit: int, collected: Collected, run_dir: Path) -> str:
    """The error after `limit` steps in a row without a trained token: counts, and each rollout with its reason."""
    shown = [f"  {rollout}: {why}" for rollout, why in list(collected.reasons.items())[:EMPTY_REPORT_ROLLOUTS]]
    more = len(collected.reasons) - len(shown)
    return "\n".join(
        [
            f"no trained token in {limit} steps in a row (trainer.max_empty_steps): "
            f"{named(collected.excluded) or 'every sample is over trainer.max_sample_tokens'}. "
            f"The harness's own output is in {run_dir}/attempts/ROLLOUT/ATTEMPT/harness.log",
            *shown,
            *([f"  and {more} more"] if more > 0 else []),
        ]
    )


async def _uninterrupted(work: Coroutine[Any, Any, T]) -> T:
    """Finish `work` even if the caller is cancelled meanwhile; the cancellation then goes on."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error from None
        raise
