"""A whole `leyden train` or `leyden eval`: everything that runs, started in order and ended in reverse.

    lock on the run folder > gateway child > policy and engine endpoint in this process > controller child > loop

The gateway starts while this process imports PyTorch and loads the model. A child that ends stops the run at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from leyden.client import ControlClient, control_key, read_or_create_secret
from leyden.config import RunConfig
from leyden.errors import GatewayError
from leyden.trainer.display import Display, progress_line
from leyden.trainer.evaluate import EvalResult, evaluate
from leyden.trainer.folder import newest_checkpoint
from leyden.trainer.loop import Cursor, Loop, publish
from leyden.trainer.outcomes import FirstFailures
from leyden.trainer.run_json import write_run_json
from leyden.trainer.supervise import Child, Children, child_command, run_lock, wait_for_gateway
from leyden.trainer.tasks import Data, TaskSet
from leyden.types import Json

if TYPE_CHECKING:
    from leyden.trainer.embedded_run import ServedPolicy

T = TypeVar("T")
OWN_GATEWAY_RETRY_S = 10.0
DEATH_NOTICE_S = 10.0
NEVER_REACHED = 500_000_000


@dataclass(frozen=True, slots=True)
class Command:
    """How children are told what to run: the run file and the overrides of this command line."""

    run_file: Path
    overrides: tuple[str, ...] = ()
    secret: bytes | None = None


async def train(config: RunConfig, data: Data, command: Command, display: Display) -> Json:
    """Train to the last step, resuming from the newest checkpoint. Returns the summary."""
    config.run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    with run_lock(config.run_dir) as lock:
        write_run_json(config, data)
        folder = newest_checkpoint(config.run_dir)
        async with _running(config, command, display, folder, lock) as (running, client, children):
            loop = Loop(
                config,
                client,
                running.policy,
                engines=[running.url],
                data=data,
                cursor=running.cursor,
                display=display,
            )
            return await _unless_a_child_ends(loop.run(), children)


async def evaluate_once(
    config: RunConfig,
    tasks: TaskSet,
    command: Command,
    display: Display,
    *,
    folder: Path | None,
    samples: int,
    ks: Sequence[int],
) -> EvalResult:
    """pass@k of one checkpoint (None: the initial model) in the run folder of `config`; with `engine.urls`, of what
    those engines serve.
    """
    config.run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    with run_lock(config.run_dir) as lock:
        write_run_json(config, Data(tasks, None))
        async with _serving_checkpoint(config, command, display, folder, lock) as (at, client, children):
            work = evaluate(
                client,
                tasks.tasks,
                step=at.step,
                version=at.version,
                settings=config.eval.model_copy(update={"samples": samples}),
                ks=ks,
                seed=config.trainer.seed,
                on_progress=lambda progress: display.live(progress_line("evaluation", progress)),
                max_same_failures=config.trainer.max_same_failures,
                on_ended=FirstFailures(display.warn, set()),
                filed_under=None if config.gateway.url is None else step_of_its_own(),
            )
            try:
                return await _unless_a_child_ends(work, children)
            finally:
                display.clear()


def step_of_its_own() -> int:
    """A step that no training reaches and no other evaluation has: on a gateway that others use too, an evaluation
    must not meet the rollouts of another one, nor a training its validation's.
    """
    return NEVER_REACHED + secrets.randbelow(NEVER_REACHED)


@contextlib.asynccontextmanager
async def _serving_checkpoint(
    config: RunConfig, command: Command, display: Display, folder: Path | None, lock: int
) -> AsyncIterator[tuple[Cursor, ControlClient, Children]]:
    """Something to evaluate: engines that run already, at the version that the gateway knows of, or a checkpoint."""
    if config.engine.urls:
        async with (
            Children(config.run_dir / "logs", lock) as children,
            _served(config, command, children, await _start_gateway(config, command, children)) as client,
        ):
            (model,) = await _unless_a_child_ends(client.models(), children)
            yield Cursor(0, model.version), client, children
        return
    async with _running(config, command, display, folder, lock) as (running, client, children):
        at = running.cursor
        publishing = publish(client, running.policy, config.model, [running.url], at, "evaluation")
        await _unless_a_child_ends(publishing, children)
        yield at, client, children


@contextlib.asynccontextmanager
async def _running(
    config: RunConfig, command: Command, display: Display, folder: Path | None, lock: int
) -> AsyncIterator[tuple[ServedPolicy, ControlClient, Children]]:
    """Gateway, engine and controller, up and answering."""
    async with Children(config.run_dir / "logs", lock) as children:
        display.live("starting gateway and loading the model")
        gateway = await _start_gateway(config, command, children)
        backend = await asyncio.to_thread(import_module, "leyden.trainer.embedded_run")
        async with backend.embedded(config, folder) as running, _served(config, command, children, gateway) as client:
            display.clear()
            yield running, client, children


async def _start_gateway(config: RunConfig, command: Command, children: Children) -> Child | None:
    """None where the run file names one that runs."""
    return await children.start("gateway", _child("gateway", command)) if config.gateway.url is None else None


@contextlib.asynccontextmanager
async def _served(
    config: RunConfig, command: Command, children: Children, gateway: Child | None
) -> AsyncIterator[ControlClient]:
    """A client of the gateway, once that answers, and a controller beside it."""
    secret = command.secret or read_or_create_secret(config.run_dir)
    key = control_key(secret)
    url = config.gateway.url or ""
    if gateway is not None:
        url = await _unless_a_child_ends(wait_for_gateway(config.run_dir, gateway, key), children)
    retry_s = 60.0 if gateway is None else OWN_GATEWAY_RETRY_S
    async with ControlClient(url, key, retry_limit_s=retry_s) as client:
        await _unless_a_child_ends(client.models(), children)
        if config.controller.start:
            await children.start("controller", _child("controller", command))
        yield client


def _child(name: str, command: Command) -> list[str]:
    return child_command(name, command.run_file, command.overrides)


async def _unless_a_child_ends(work: Coroutine[Any, Any, T], children: Children) -> T:
    """The result of `work`, or the error that names the child that ended. `work` is cancelled then, and waited for."""
    running = asyncio.create_task(work)
    watching = asyncio.create_task(children.watch())
    try:
        await asyncio.wait({running, watching}, return_when=asyncio.FIRST_COMPLETED)
        if running.done() and not running.cancelled() and _is_a_lost_gateway(running.exception()):
            await asyncio.wait({watching}, timeout=DEATH_NOTICE_S)
        if not watching.done():
            return running.result()
        running.cancel()
        await asyncio.wait({running})
        return watching.result()
    except asyncio.CancelledError:
        running.cancel()
        await asyncio.wait({running})
        raise
    finally:
        watching.cancel()


def _is_a_lost_gateway(error: BaseException | None) -> bool:
    return isinstance(error, GatewayError) and error.status is None
