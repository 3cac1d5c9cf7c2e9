"""Attempts as Jobs of a cluster, behind the controller's `Backend` protocol.

Concurrency. One event loop. `_read` takes changes of Jobs, pods and warnings into the ledger and looks at the Job that
each is about; `supervise` looks at all of them every LOOK_S, since some verdicts come with time alone. A look tells
what is new (waiting, started, ended); an end is told once, after the log has been kept. Jobs and pods are watched
apart, and a watch may be behind: an end that is not certain is told only after `_ask` has read the Job and then its
pods, and it still holds. Calls of the API server that nobody waits for (kill, delete, ask) are tasks that go on until
the server has answered.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from leyden.config import RunConfig
from leyden.controller.backends.interface import Events
from leyden.controller.backends.kubernetes.api import EVENTS, JOBS, PODS, SECRETS, KubernetesApi
from leyden.controller.backends.kubernetes.cluster_errors import (
    ClusterError,
    ClusterUnavailable,
    ObjectBeingDeleted,
    ObjectExists,
    ObjectMissing,
    QuotaExceeded,
)
from leyden.controller.backends.kubernetes.keeper_end import keeper_hangs
from leyden.controller.backends.kubernetes.ledger import Ledger
from leyden.controller.backends.kubernetes.manifest import Pods, Program, is_ours, job_name, label, manifest
from leyden.controller.backends.kubernetes.objects import Object, unix_time
from leyden.controller.backends.kubernetes.pod_logs import PodLogs
from leyden.controller.backends.kubernetes.programs import Programs, pods
from leyden.controller.backends.kubernetes.rate import MINUTE_S, CreationRate
from leyden.controller.backends.kubernetes.states import Ended, Patience, Pending, Running, Saving, Verdict, note_of
from leyden.controller.backends.kubernetes.verdict import lingers, verdict
from leyden.controller.backends.kubernetes.watch import LISTED, Selection, changes
from leyden.controller.jobs import CANCELLED, OVER_LIMIT, OWN_ENDS, TIMEOUT, Exit, grader_job, harness_job
from leyden.controller.paths import attempt_paths
from leyden.controller.plan import AttemptStatus, Phase
from leyden.errors import LaunchError
from leyden.records import Claim, Rollout
from leyden.types import RolloutState

log = logging.getLogger(__name__)
OWNER = "leyden/controller"
LOOK_S = 1.0
STRANGE_S = 300.0
CLOCK_S = 30.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 10.0


class KubernetesBackend:
    """`run` names the run in labels, `controller` is the one that attempts belong to, `url` the gateway's for pods."""

    def __init__(self, config: RunConfig, url: str, run: str, controller: str, events: Events) -> None:
        self._config = config
        self._run = run
        self._controller = controller
        self._events = events
        self._programs = Programs(config, run, config.kubernetes.gateway_url or url)
        self._ledger = Ledger()
        self._mine: dict[str, Verdict | None] = {}
        self._waited: dict[str, float] = {}
        self._deleting: set[str] = set()
        self._asked: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._rate = CreationRate(config.kubernetes.creates_per_minute, config.run_dir / "created")
        self._listed = asyncio.Event()
        self._reader: asyncio.Task[None] | None = None
        self._api: KubernetesApi
        self._pods: Pods
        self._logs: PodLogs

    @property
    def running(self) -> set[str]:
        """Ids of the run's Jobs that exist and are not being deleted. Another controller's count after STRANGE_S only:
        of a younger one the gateway may not have told yet."""
        return {job_id for job_id in self._ledger.jobs() if job_id not in self._deleting and self._is_told(job_id)}

    def _is_told(self, job_id: str) -> bool:
        job = self._ledger.job(job_id)
        return job is None or _owner(job) == self._controller or self._created_at(job_id) < time.time() - STRANGE_S

    async def open(self) -> None:
        settings = self._config.kubernetes
        self._api = await KubernetesApi.connect(settings.namespace, settings.kubeconfig, settings.context)
        self._pods = pods(settings, self._config.gateway.max_workspace_bytes, self._api.namespace)
        self._logs = PodLogs(self._api, self._config.run_dir, settings.log_lines)
        self._reader = asyncio.create_task(self._read())
        listed = asyncio.create_task(self._listed.wait())
        await asyncio.wait({self._reader, listed}, return_when=asyncio.FIRST_COMPLETED)
        listed.cancel()
        if self._reader.done():
            self._reader.result()
        self._rate.resume(self._ledger.created(time.time() - MINUTE_S))
        await self._remove_orphans()

    async def _remove_orphans(self) -> None:
        """Delete Secrets whose Job was never made, because a controller was killed in between."""
        names = {job["metadata"]["name"] for job_id in self._ledger.jobs() if (job := self._ledger.job(job_id))}
        secrets, _ = await self._api.list_all(SECRETS, labels=f"leyden/run={label(self._run)}")
        for secret in secrets:
            metadata = secret["metadata"]
            old = unix_time(metadata.get("creationTimestamp")) < time.time() - MINUTE_S
            if old and not metadata.get("ownerReferences") and metadata["name"] not in names:
                self._spawn(partial(self._api.delete_secret, metadata["name"]))

    async def supervise(self) -> None:
        assert self._reader is not None
        while not self._reader.done():
            await asyncio.wait({self._reader}, timeout=LOOK_S)
            for job_id in tuple(self._mine):
                self._look(job_id)
        self._reader.result()

    async def start_harness(self, claim: Claim) -> None:
        await self._create(await asyncio.to_thread(self._programs.harness, claim))

    async def start_grader(self, rollout: Rollout, key: str, number: int) -> None:
        paths = attempt_paths(self._config.run_dir, rollout.rollout_id, rollout.attempt)
        printed = _content(paths.harness_log)
        harness = self._mine.get(harness_job(rollout.rollout_id, rollout.attempt))
        exit_ = harness.exit if isinstance(harness, Ended) else _told_exit(rollout)
        overfull = isinstance(harness, Ended) and not harness.saved and exit_.killed == OVER_LIMIT
        await self._create(
            await asyncio.to_thread(
                self._programs.grader, rollout, key, number, printed, asdict(exit_), from_start=overfull
            )
        )

    def kill(self, job_id: str, reason: str) -> None:
        """A cancelled Job is deleted at once; any other reason ends its pod and lets the workspace be saved.

        A Job that another controller has taken over is left alone.
        """
        job = self._ledger.job(job_id)
        if job is not None and (job_id not in self._mine or _owner(job) == self._controller):
            name, uid = job["metadata"]["name"], job["metadata"]["uid"]
            if reason == CANCELLED:
                self._delete(job_id, name, uid)
            else:
                asked = time.time()
                self._ledger.kill(job_id, reason, asked)
                self._spawn(lambda: self._kill(job_id, name, reason, asked))
        if job_id in self._mine and (reason == CANCELLED or job is None):
            now = time.time()
            self._end(job_id, Exit(None, None, now, now, killed=reason))

    async def _kill(self, job_id: str, name: str, reason: str, asked: float) -> None:
        """What a pod printed goes with it, so it is read before."""
        await self._logs.keep(job_id, self._ledger.pod(job_id))
        await self._api.kill_job(name, reason, asked)

    def find(self, rollout: Rollout) -> AttemptStatus:
        rollout_id, number = rollout.rollout_id, rollout.attempt
        harness = harness_job(rollout_id, number)
        if rollout.state is not RolloutState.GRADING:
            if rollout.reward is not None and not self._exists(harness):
                return AttemptStatus(rollout_id, number, Phase.EXITED, exit=_told_exit(rollout))
            return _as_attempt(rollout, self._adopt(harness), self._created_at(harness))
        seen = self._judged(harness) if self._exists(harness) else None
        ended = seen if isinstance(seen, Ended) and seen.exit.error is None else Ended(_told_exit(rollout))
        exit_ = ended.exit
        self._mine[harness] = ended
        attempt = AttemptStatus(rollout_id, number, Phase.EXITED, started=exit_.started, exit=exit_)
        tries = [
            n for n in range(1, self._config.grader.max_tries + 1) if self._exists(grader_job(rollout_id, number, n))
        ]
        if not tries:
            return attempt
        grader = grader_job(rollout_id, number, tries[-1])
        graded = self._adopt(grader)
        if isinstance(graded, Ended):
            return replace(attempt, phase=Phase.GRADED, tries=tries[-1], grader_exit=graded.exit)
        started = graded.started if isinstance(graded, Running) else self._created_at(grader)
        waits = not isinstance(graded, Running)
        return replace(attempt, phase=Phase.GRADING, tries=tries[-1], started=started, waits=waits)

    async def forget(self, attempt: AttemptStatus, *, keep: bool) -> None:
        rollout_id, number = attempt.rollout_id, attempt.attempt
        tries = range(1, max(attempt.tries, self._config.grader.max_tries) + 1)
        for job_id in (harness_job(rollout_id, number), *(grader_job(rollout_id, number, n) for n in tries)):
            self._mine.pop(job_id, None)
            self._waited.pop(job_id, None)
            job = self._ledger.job(job_id)
            if job is not None and _owner(job) == self._controller:
                self._delete(job_id, job["metadata"]["name"], job["metadata"]["uid"])
            self._ledger.forget(job_id)
        if not keep:
            paths = attempt_paths(self._config.run_dir, rollout_id, number)
            try:
                (paths.root / "workspace.tar.gz").unlink(missing_ok=True)
            except OSError as error:
                log.warning("what %s left is not removed: %s", harness_job(rollout_id, number), error)

    def where(self, attempt: AttemptStatus) -> str:
        paths = attempt_paths(self._config.run_dir, attempt.rollout_id, attempt.attempt)
        job = self._ledger.job(attempt.job_id)
        name = f", Job {job['metadata']['name']} in namespace {self._pods.namespace}" if job else ""
        return f"log: {paths.grade_log if attempt.tries else paths.harness_log}{name}"

    async def stop(self) -> None:
        for job_id in tuple(self._mine):
            if job := self._ledger.job(job_id):
                self._delete(job_id, job["metadata"]["name"], job["metadata"]["uid"])
        self._mine.clear()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=30)

    async def close(self) -> None:
        works: list[asyncio.Task[Any]] = [*self._tasks, *([self._reader] if self._reader else [])]
        for task in works:
            task.cancel()
        await asyncio.gather(*works, return_exceptions=True)
        if self._reader is not None:
            await self._api.close()

    async def _read(self) -> None:
        selections = (
            Selection(JOBS, labels=f"leyden/run={label(self._run)}"),
            Selection(PODS, labels=f"leyden/run={label(self._run)}"),
            Selection(EVENTS, fields="type=Warning"),
        )
        unlisted = {JOBS, PODS}
        async for change in changes(self._api, selections):
            if change.event == LISTED:
                unlisted.discard(change.kind)
                if not unlisted:
                    self._listed.set()
                continue
            job_id = self._ledger.absorb(change, time.time())
            if job_id is not None:
                if self._ledger.job(job_id) is None:
                    self._deleting.discard(job_id)
                self._look(job_id)
                if job_id not in self._mine and self._ledger.is_gone(job_id):
                    self._ledger.forget(job_id)

    def _look(self, job_id: str) -> None:
        """Tell what is new about a Job of ours."""
        before = self._mine.get(job_id)
        if job_id not in self._mine or isinstance(before, Ended) or not self._exists(job_id):
            return
        now = self._judged(job_id)
        if isinstance(now, Ended) and not now.certain:
            self._ask(job_id)
            return
        self._mine[job_id] = now
        match now:
            case Pending(why):
                self._waited[job_id] = self._ledger.pod_changed(job_id)
                if now != before:
                    self._events.waiting(job_id, why)
            case Running(started) if not isinstance(before, Running):
                self._events.started(job_id, self._by_own_clock(job_id, started))
            case Ended():
                self._spawn(lambda: self._conclude(job_id, now))

    def _judged(self, job_id: str) -> Verdict:
        return verdict(self._ledger.seen(job_id), self._patience(job_id), time.time())

    def _ask(self, job_id: str) -> None:
        if job_id not in self._asked:
            self._asked.add(job_id)
            self._spawn(lambda: self._tell_what_is(job_id))

    async def _tell_what_is(self, job_id: str) -> None:
        """Read a Job and then its pods: what the Job tells of has happened to them by then. An end that still holds is
        told; so is that nothing of the Job is left."""
        labels = f"leyden/run={label(self._run)},leyden/job={label(job_id)}"
        try:
            jobs, _ = await self._api.list_all(JOBS, labels=labels)
            found, _ = await self._api.list_all(PODS, labels=labels)
            self._ledger.read(job_id, jobs, found, time.time())
            pod = self._ledger.pod(job_id)
            said = await self._logs.of_keeper(job_id, pod) if pod is not None and keeper_hangs(pod) else None
            if said is not None:
                self._ledger.hear(job_id, said)
        except ClusterUnavailable:
            raise
        except ClusterError as error:
            log.warning("%s: %s; what is known of it counts", job_id, error)
        self._asked.discard(job_id)
        if job_id not in self._mine or isinstance(self._mine[job_id], Ended):
            return
        now = self._judged(job_id) if self._exists(job_id) else _disappeared()
        if not isinstance(now, Ended):
            self._look(job_id)
            return
        self._mine[job_id] = now
        await self._conclude(job_id, now)

    def _by_own_clock(self, job_id: str, started: float) -> float:
        """When a program started. Its node says when; but not before its pod was seen to wait, and not in the future:
        then the node's clock is wrong, and now is nearer to the truth."""
        now, waited = time.time(), self._waited.pop(job_id, 0.0)
        if waited - CLOCK_S <= started <= now + CLOCK_S:
            return min(started, now)
        log.warning(
            "%s: by its node's clock it started %.0f s ago, which cannot be; compare it with the controller's",
            job_id,
            now - started,
        )
        return now

    async def _conclude(self, job_id: str, ended: Ended) -> None:
        """Keep the log, tell the end, end what else runs in the pod."""
        await self._logs.keep(job_id, self._ledger.pod(job_id))
        told = self._exit_of(job_id, ended)
        self._end(job_id, told.exit, saved=ended.saved)
        job, pod = self._ledger.job(job_id), self._ledger.pod(job_id)
        if job is not None and pod is not None and lingers(pod):
            name = job["metadata"]["name"]
            self._spawn(lambda: self._api.end_job(name, note_of(ended)))

    def _exit_of(self, job_id: str, ended: Ended) -> Ended:
        return replace(ended, exit=self._exit(job_id, ended))

    def _exit(self, job_id: str, ended: Ended) -> Exit:
        """The end of a job. Without its workspace an attempt cannot be graded, so it is void; but one that filled it
        over its limit is graded on what it began with."""
        exit_ = replace(ended.exit, note=ended.note, started=min(ended.exit.started, ended.exit.ended))
        needs_workspace = ".grade" not in job_id and not self._config.grader.harness and exit_.killed != OVER_LIMIT
        if needs_workspace and not ended.saved and exit_.error is None and exit_.killed in OWN_ENDS:
            why = ended.note or "the pod went before it was handed in"
            return replace(exit_, error=f"the workspace was lost: {why}")
        return exit_

    def _end(self, job_id: str, exit_: Exit, *, saved: bool = False) -> None:
        self._mine[job_id] = Ended(exit_, saved)
        self._events.ended(job_id, exit_)

    async def _create(self, program: Program) -> None:
        """Make the Job, or find that it is there. What may pass is waited for; raises LaunchError for the rest."""
        deadline = time.monotonic() + self._config.controller.start_timeout_s
        pause_s = FIRST_PAUSE_S
        while True:
            await self._rate.room()
            try:
                job = await self._created_or_ours(program)
                break
            except (ObjectBeingDeleted, QuotaExceeded, ClusterUnavailable) as error:
                if time.monotonic() > deadline:
                    raise LaunchError(f"the cluster took no Job for {program.job_id}: {error}") from error
                if isinstance(error, ObjectBeingDeleted):
                    program = replace(program, again=program.again + 1)
                self._events.waiting(program.job_id, str(error))
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            except ClusterError as error:
                raise LaunchError(f"the cluster refuses the Job of {program.job_id}: {error}") from error
        self._mine.setdefault(program.job_id, None)
        self._deleting.discard(program.job_id)
        log.debug("%s is Job %s", program.job_id, job["metadata"]["name"])

    async def _created_or_ours(self, program: Program) -> Object:
        made = manifest(self._pods, program)
        made.job["metadata"]["annotations"][OWNER] = self._controller
        self._mine.setdefault(program.job_id, None)
        try:
            return await self._api.create_job(made)
        except ObjectBeingDeleted:
            raise
        except ObjectExists as error:
            job = await self._api.get(JOBS, job_name(program))
            if not is_ours(job, program):
                raise LaunchError(f"a Job {job_name(program)} exists that is not of this attempt") from error
            await self._api.own_secret(job)
            return job

    def _adopt(self, job_id: str) -> Verdict:
        """How a Job stands that an earlier controller made; it is ours from now on."""
        if not self._exists(job_id):
            return self._in_doubt(job_id)
        job = self._ledger.job(job_id)
        if job is not None and _owner(job) != self._controller:
            name = job["metadata"]["name"]
            self._spawn(lambda: self._api.patch(JOBS, name, {"metadata": {"annotations": {OWNER: self._controller}}}))
        now = self._judged(job_id)
        if isinstance(now, Ended) and not now.certain:
            now = self._in_doubt(job_id)
        elif isinstance(now, Ended):
            now = self._exit_of(job_id, now)
            self._spawn(lambda: self._logs.keep(job_id, self._ledger.pod(job_id)))
        self._mine[job_id] = now
        return now

    def _in_doubt(self, job_id: str) -> Pending:
        """A Job that is ours, and whose end, if it is one, is told after the API server was asked."""
        self._mine[job_id] = waits = Pending("the cluster is asked what became of it")
        self._ask(job_id)
        return waits

    def _exists(self, job_id: str) -> bool:
        return self._ledger.job(job_id) is not None or self._ledger.pod(job_id) is not None

    def _created_at(self, job_id: str) -> float:
        job = self._ledger.job(job_id)
        return unix_time(job["metadata"].get("creationTimestamp")) if job else 0.0

    def _patience(self, job_id: str) -> Patience:
        settings = self._config.kubernetes
        return Patience(
            queue_s=self._config.controller.start_timeout_s,
            image_s=settings.image_wait_s,
            save_s=0.0 if ".grade" in job_id else settings.save_s,
        )

    def _delete(self, job_id: str, name: str, uid: str) -> None:
        if job_id not in self._deleting:
            self._deleting.add(job_id)
            self._spawn(lambda: self._api.delete_job(name, uid))

    def _spawn(self, call: Callable[[], Awaitable[Any]]) -> None:
        task = asyncio.create_task(_until_answered(call))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _as_attempt(rollout: Rollout, seen: Verdict, created: float) -> AttemptStatus:
    rollout_id, number = rollout.rollout_id, rollout.attempt
    match seen:
        case Ended(exit_):
            return AttemptStatus(rollout_id, number, Phase.EXITED, started=exit_.started, exit=exit_)
        case Running(started):
            return AttemptStatus(rollout_id, number, Phase.RUNNING, started=started)
        case Saving(exit_):
            return AttemptStatus(rollout_id, number, Phase.RUNNING, started=exit_.started)
        case Pending(why):
            return AttemptStatus(rollout_id, number, Phase.STARTING, started=created or time.time(), problem=why)


def _disappeared() -> Ended:
    now = time.time()
    return Ended(Exit(None, None, now, now, error="its Job disappeared"))


def _content(log_file: Path) -> bytes:
    """Nothing, where there is none, or none that can be read."""
    try:
        return log_file.read_bytes()
    except OSError:
        return b""


def _told_exit(rollout: Rollout) -> Exit:
    """The end of a harness whose Job is gone, as the gateway was told it; one that was rewarded ended well."""
    began = rollout.started or 0.0
    code = 0 if rollout.exit_code is None and not rollout.timed_out else rollout.exit_code
    return Exit(code, None, began, began, killed=TIMEOUT if rollout.timed_out else None)


def _owner(job: Object) -> str | None:
    owner: str | None = job["metadata"].get("annotations", {}).get(OWNER)
    return owner


async def _until_answered(call: Callable[[], Awaitable[Any]]) -> None:
    """Make a call until the API server answers; a refusal is an answer."""
    pause_s = FIRST_PAUSE_S
    while True:
        try:
            await call()
            return
        except ObjectMissing:
            return
        except ClusterUnavailable as error:
            log.info("%s; trying again", error)
        except ClusterError as error:
            log.warning("%s", error)
            return
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
