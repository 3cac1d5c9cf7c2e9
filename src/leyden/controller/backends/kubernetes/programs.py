"""An attempt and the run file -> what its Jobs run. Reads the run file's own files, touches nothing else."""

from __future__ import annotations

import io
import json
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leyden.config import KubernetesConfig, RunConfig, WorkspaceConfig
from leyden.controller import workspace
from leyden.controller.backends.kubernetes.manifest import FILES, TEMPLATE, WORKSPACE, Pods, Program
from leyden.controller.jobs import grader_job, harness_job
from leyden.controller.launch import Invocation, Invocations, Place, RunFacts
from leyden.controller.paths import attempt_paths
from leyden.errors import ConfigError, LaunchError
from leyden.records import Claim, Rollout
from leyden.types import Json

KEEPER = Path(__file__).with_name("keeper.py")
MOST_LOG_BYTES = 256 * 2**10
_TASK, _EXIT, _LOG = "task.json", "exit.json", "harness.log"
_PLACE = Place(Path(WORKSPACE), *(Path(FILES, name) for name in (_TASK, _LOG, _EXIT)))
_FUNCTION_RUNNER = ("python3", "-m", "leyden.controller.grade")


@dataclass(frozen=True, slots=True)
class Programs:
    """`run` names the run in labels, `url` is the gateway's as pods reach it."""

    config: RunConfig
    run: str
    url: str

    def harness(self, claim: Claim) -> Program:
        """Raises LaunchError for a template that cannot be rendered, or files that are too large."""
        rollout, config = claim.rollout, self.config
        started = self._invocations.of_harness(rollout, claim.agent_key, _PLACE)
        return self._program(
            rollout,
            started,
            config.kubernetes.image,
            job_id=harness_job(rollout.rollout_id, rollout.attempt),
            workspace_key=claim.workspace_key,
            deadline_s=self._deadline_s(config.harness.timeout_s),
            archive=packed_workspace(config.workspace, RunFacts.of(config), rollout),
            files=self._files() | {_TASK: _json(rollout.task)},
        )

    def grader(
        self, rollout: Rollout, key: str, number: int, log: bytes, exit_: Json, *, from_start: bool = False
    ) -> Program:
        """`log` and `exit_` are what is known of the harness's end. Its workspace is the one that was handed in, or
        `from_start` the one that it began with."""
        config = self.config
        started = self._invocations.of_grader(rollout, key, _PLACE)
        return self._program(
            rollout,
            started,
            config.kubernetes.grader_image or config.kubernetes.image,
            job_id=grader_job(rollout.rollout_id, rollout.attempt, number),
            workspace_key=key,
            deadline_s=self._deadline_s(config.grader.timeout_s),
            grade=number,
            archive=packed_workspace(config.workspace, RunFacts.of(config), rollout) if from_start else None,
            files=self._files() | {_TASK: _json(rollout.task), _LOG: log[-MOST_LOG_BYTES:], _EXIT: _json(exit_)},
        )

    @property
    def _invocations(self) -> Invocations:
        run = RunFacts(Path("/tmp"), Path(FILES), self.config.model.name)  # noqa: S108  (of a pod of its own)
        return Invocations(run, self.config.harness, self.config.grader, self.url, _FUNCTION_RUNNER)

    def _program(self, rollout: Rollout, started: Invocation, image: str | None, **fields: Any) -> Program:
        job = {"command": list(started.argv), "image": image, "resources": self.config.kubernetes.resources}
        return Program(
            run=self.run,
            rollout_id=rollout.rollout_id,
            attempt=rollout.attempt,
            url=self.url,
            known={**started.known, **job},
            env={**started.own, **started.given},
            keys={name: key for name, key in started.keys.items() if name not in started.given},
            **fields,
        )

    def _files(self) -> dict[str, bytes]:
        found = {}
        for path in self.config.kubernetes.files:
            try:
                found[path.name] = path.read_bytes()
            except OSError as error:
                raise LaunchError(f"kubernetes.files: {path} cannot be read: {error.strerror}") from error
        return found

    def _deadline_s(self, timeout_s: float) -> int:
        """The cluster's own limit, the last net where no controller runs: it does not know how long a harness was held,
        so it lies far behind the controller's."""
        kubernetes, start_s = self.config.kubernetes, self.config.controller.start_timeout_s
        return int(start_s + timeout_s + kubernetes.pause_allowance_s + kubernetes.save_s) + 1


def pods(settings: KubernetesConfig, workspace_bytes: int, namespace: str) -> Pods:
    """How this run makes pods. Raises ConfigError for a template that cannot be read."""
    template = TEMPLATE
    if settings.template is not None:
        try:
            template = settings.template.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError("kubernetes.template", f"{settings.template} cannot be read: {error}") from error
    return Pods(
        namespace=namespace,
        keeper_image=settings.keeper_image or settings.image or "",
        keeper=KEEPER.read_text(encoding="utf-8"),
        template=template,
        ttl_s=settings.ttl_s,
        grace_s=settings.save_s,
        workspace_bytes=workspace_bytes,
    )


def packed_workspace(settings: WorkspaceConfig, run: RunFacts, rollout: Rollout) -> bytes:
    """The workspace that the harness begins with, as a gzipped tar."""
    with tempfile.TemporaryDirectory(prefix="leyden-") as folder:
        paths = attempt_paths(Path(folder), rollout.rollout_id, rollout.attempt)
        workspace.prepare(settings, run, rollout, paths)
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz") as archive:
            archive.add(paths.workspace, arcname=".")
        return packed.getvalue()


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")
