"""The checks of one run file, in order. Each has a time limit, and none ends the others.

folder, data, templates, training > renderer, template > engine > gateway, keys > harness, grader
> the gateway of gateway.url and its keys > the cluster of controller.backend: kubernetes
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from leyden.config import GatewayConfig, RunConfig
from leyden.controller import workspace
from leyden.doctor import access, cluster, engines, first_task, model, preflight
from leyden.doctor.address import GatewayAddress, address_towards, gateway_address
from leyden.doctor.chat_template import read_chat_template
from leyden.doctor.findings import Finding, Level, ok, problem, skipped, warning
from leyden.doctor.rehearsal import Rehearsal, judge_grader, judge_harness, judge_wishes, rehearsal
from leyden.errors import LeydenError
from leyden.extras import need
from leyden.gateway.render import ModelRenderer, load_renderer
from leyden.gateway.serving import check_address, check_port
from leyden.trainer.run_json import check_same_run
from leyden.trainer.tasks import read_data
from leyden.types import Json

if TYPE_CHECKING:
    from leyden.controller.backends.kubernetes.api import KubernetesApi

log = logging.getLogger(__name__)
CHECK_S = 60.0
MARGIN_S = 60.0
"""What a rehearsal may take beside harness and grader: loading preloaded modules, stopping."""


@dataclass
class Checkup:
    """`secret` is the run's, if there is one; `parent` the environment that harnesses inherit.

    `report` gets each finding as it is made, `live` the name of the check that runs. Harness and grader have
    `patience_s` together. `kept` is the folder of logs to be read, if there is one.
    """

    config: RunConfig
    secret: bytes | None
    parent: Mapping[str, str]
    patience_s: float
    report: Callable[[Finding], None]
    live: Callable[[str], None]
    findings: list[Finding] = field(default_factory=list)
    kept: Path | None = None

    @property
    def passed(self) -> bool:
        return not any(f.level is Level.PROBLEM for f in self.findings)

    async def run(self) -> None:
        with contextlib.ExitStack() as stack:
            folder = None
            async with self._checking("folder"):
                preflight.check_folder(self.config.run_dir)
                folder = stack.enter_context(private_folder(self.config.run_dir, self._keeps))
                self._add(ok("folder", f"{self.config.run_dir} can be written"))
            if folder is not None:
                await self._in(folder)

    async def _in(self, folder: Path) -> None:
        for what in preflight.unheeded(self.config):
            self._add(warning("run file", what))
        if self.config.controller.backend == "local" and self.config.controller.start:
            self._add(check_sandbox(self.config.harness.sandbox))
        task = await self._tasks(folder)
        async with self._checking("training"):
            self._add(await asyncio.to_thread(check_training, self.config))
        renderer = await self._model()
        async with self._checking("engine"):
            self._add(*await engines.check_engines(self.config, self.parent))
        if self.config.gateway.url:
            await self._gateway_in_use(self.config.gateway.url)
        else:
            async with self._checking("address"):
                self._add(check_listening(self.config.gateway, self.config.run_dir, self.secret))
        if renderer is None and self.config.engine.render == "gateway":
            self._skip("it needs the renderer", "own gateway", "harness", "grader")
        elif self.config.controller.backend == "kubernetes":
            await self._in_cluster(folder, task, renderer)
        else:
            async with (
                self._checking("own gateway", None),
                self._own_gateway(folder, renderer, GatewayAddress()) as own,
            ):
                await self._run_one(own, task, folder)

    def _keeps(self) -> bool:
        return self.kept is not None

    async def _tasks(self, folder: Path) -> Json | None:
        """The first task, if the templates take it."""
        task = None
        async with self._checking("data"):
            findings, task = first_task.check_data(self.config.data)
            self._add(*findings)
        if task is None:
            return None
        async with self._checking("templates"):
            finding = await asyncio.to_thread(first_task.check_templates, self.config, task, folder, self.parent)
            self._add(finding)
            return task if finding.level is Level.OK else None
        return None  # it took too long

    async def _model(self) -> ModelRenderer | None:
        """The renderer, where the run has one."""
        if self.config.engine.render == "engine":
            self._add(ok("renderer", "engine.render: engine; the engines turn messages into ids"))
            return None
        renderer = None
        async with self._checking("renderer"):
            renderer = await asyncio.to_thread(load_renderer, self.config.model)
            self._add(model.check_renderer(renderer, self.config.model.renderer))
        if renderer is None:
            return None
        async with self._checking("template"):
            template = await asyncio.to_thread(read_chat_template, self.config.model.path)
            if template is not None:
                self._add(model.check_template(self.config.model, renderer, template))
        return renderer

    @contextlib.asynccontextmanager
    async def _own_gateway(
        self, folder: Path, renderer: ModelRenderer | None, address: GatewayAddress
    ) -> AsyncIterator[Rehearsal]:
        """A gateway of our own, and who may call it."""
        self.live("own gateway")
        async with rehearsal(self.config, renderer, folder, self.patience_s, address) as own:
            self._add(ok("own gateway", f"one starts and answers at {own.url}"))
            self._add(access.judge_keys(await access.ask(own.url, access.REFUSALS, own.secret)))
            yield own

    async def _in_cluster(self, folder: Path, task: Json | None, renderer: ModelRenderer | None) -> None:
        """The cluster, then one pod with the run's images, then harness and grader as Jobs."""
        async with self._checking("cluster", None), await cluster.connect(self.config.kubernetes) as api:
            server = await cluster.check_server(api)
            self._add(server)
            if server.level is not Level.OK:
                return
            rights = await cluster.check_rights(api.namespace, api.allowed)
            self._add(rights)
            if rights.level is not Level.OK or task is None:
                self._skip("it needs rights and a task", "image", "reach", "pod key", "egress", "harness", "grader")
                return
            address = gateway_address(self.config, address_towards(api.server))
            async with self._own_gateway(folder, renderer, address) as own:
                if await self._pod(api, own, task):
                    await self._run_one(own, task, folder)
                else:
                    self._skip("pods cannot call the doctor's gateway", "harness", "grader")

    async def _pod(self, api: KubernetesApi, own: Rehearsal, task: Json) -> bool:
        """Whether a pod of this run starts, and reaches our gateway with a key."""
        from leyden.doctor import probing

        settings, ours = self.config.kubernetes, False
        targets = {own.pods_url: cluster.agent_key(own.secret)}
        theirs = settings.gateway_url or self.config.gateway.url
        if self.config.gateway.url and theirs and self.secret:
            targets, ours = {theirs: cluster.agent_key(self.secret), **targets}, True
        reaches = False
        async with self._checking("image", self.config.controller.start_timeout_s + MARGIN_S):
            made = probing.prepare(self.config, api.namespace, task, targets)
            probed = await probing.run_probe(
                api,
                made,
                image_wait_s=settings.image_wait_s,
                patience_s=self.patience_s,
                limit_s=self.config.controller.start_timeout_s,
            )
            self._add(cluster.judge_images(probed))
            for url in targets:
                found = cluster.judge_reach(probed, url, ours=ours and url == own.pods_url)
                self._add(*found)
                reaches = all(f.level is Level.OK for f in found)
            labels = made.job["spec"]["template"]["metadata"]["labels"]
            self._add(cluster.judge_egress(probed, await cluster.policies(api), labels))
        return reaches

    async def _run_one(self, own: Rehearsal, task: Json | None, folder: Path) -> None:
        if task is None:
            self._skip("it needs a task", "harness", "grader")
            return
        async with self._checking("harness", self.patience_s + MARGIN_S):
            seen = await own.run(task, self.patience_s)
            found = judge_harness(seen), judge_grader(seen, by_harness=self.config.grader.harness)
            self._add(*found, *judge_wishes(seen))
            if any(f.level is Level.PROBLEM for f in found):
                self.kept = folder

    async def _gateway_in_use(self, url: str) -> None:
        if self.secret is None:
            advice = f"set LEYDEN_SECRET to the secret that the gateway at {url} was started with"
            self._add(problem("gateway", f"no secret of this run: {self.config.run_dir} has none", advice))
            return
        async with self._checking("gateway"):
            answers = await access.ask(url, [access.HEALTH, access.READS], self.secret)
            finding = access.judge_gateway(url, answers)
            self._add(finding)
            if finding.level is Level.OK:
                self._add(access.judge_keys(await access.ask(url, access.REFUSALS, self.secret)))

    def _skip(self, why: str, *checks: str) -> None:
        self._add(*(skipped(check, why) for check in checks))

    def _add(self, *findings: Finding) -> None:
        for finding in findings:
            self.findings.append(finding)
            self.report(finding)

    @contextlib.asynccontextmanager
    async def _checking(self, check: str, limit_s: float | None = CHECK_S) -> AsyncIterator[None]:
        """Whatever goes wrong in here is a problem of `check`, and goes no further."""
        self.live(check)
        try:
            async with asyncio.timeout(limit_s):
                yield
        except TimeoutError:
            self._add(problem(check, f"no result within {limit_s:g} s"))
        except LeydenError as error:
            self._add(problem(check, str(error)))
        except Exception as error:
            log.debug("check %s", check, exc_info=True)
            self._add(problem(check, f"{type(error).__name__}: {error}", "`leyden -v doctor` says more"))


@contextlib.contextmanager
def private_folder(run_dir: Path, keeps: Callable[[], bool]) -> Iterator[Path]:
    """A folder in the run's own, which is made if need be. Both go again, unless `keeps` or there is more in it."""
    run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="doctor-", dir=run_dir))
    try:
        yield folder
    finally:
        if not keeps():
            workspace.remove(folder)
        with contextlib.suppress(OSError):
            run_dir.rmdir()


def check_sandbox(sandbox: str) -> Finding:
    """What an agent of this machine could do besides its task."""
    if sandbox == "none":
        can = "agents run as you: they can read your files and this run's keys, and end its programs"
        return ok("sandbox", f"none; {can}. harness.sandbox: bubblewrap closes that")
    return ok("sandbox", f"{sandbox}: agents see their workspace and the gateway")


def check_training(config: RunConfig) -> Finding:
    """Whether `leyden train` could train this run, in its own words. Raises ConfigError, TrainingError."""
    if config.engine.urls or config.engine.kind != "leyden":
        return skipped("training", "engine.urls and engine.kind are for `leyden gateway` and `leyden eval`")
    check_same_run(config, read_data(config.data))
    try:
        need("leyden train", "embedded")
    except LeydenError as error:
        return warning("training", str(error))  # this may be the machine of the gateway or the controller alone
    return ok("training", preflight.check_backend(config))


def check_listening(settings: GatewayConfig, run_dir: Path, secret: bytes | None) -> Finding:
    """Whether `leyden gateway` could listen where the run file says."""
    check_address(settings.host, secret)
    check_port(settings, run_dir)
    port = settings.port or "any free one"
    return ok("address", f"the gateway can listen on {settings.host}, port {port}")
