"""An attempt and the run file -> what its Jobs run. Reads the run file's own files, touches nothing else."""

from __future__ import annotations

import io
import json
import re
import tarfile
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leyden.config import RunConfig
from leyden.controller import launch, workspace
from leyden.controller.backends.kubernetes.manifest import FILES, TEMPLATE, WORKSPACE, Pods, Program
from leyden.controller.jobs import grader_job, harness_job
from leyden.errors import ConfigError, LaunchError
from leyden.records import Claim, Rollout
from leyden.types import Json

KEEPER = Path(__file__).with_name("keeper.py")
MOST_LOG_BYTES = 256 * 2**10
_KEY = re.compile(r"lk-[agwc]-[A-Za-z0-9_-]{20,}")
_TASK, _EXIT, _LOG = "task.json", "exit.json", "harness.log"


@dataclass(frozen=True, slots=True)
class Programs:
    """`run` names the run in labels, `url` is the gateway's as pods reach it."""

    config: RunConfig
    run: str
    url: str

    def harness(self, claim: Claim) -> Program:
        """Raises LaunchError for a template that cannot be rendered, or files that are too large."""
        rollout, config = claim.rollout, self.config
        known = self._known(rollout)
        env = launch.endpoints(self.url) | self._own(rollout) | {"LEYDEN_URL": self.url}
        if config.grader.harness:
            env |= launch.reward_address(self.url)
        env |= launch.rendered_env(config, known)
        command = launch.rendered_command("harness.command", config.harness.command, known)
        return self._program(
            rollout,
            job_id=harness_job(rollout.rollout_id, rollout.attempt),
            workspace_key=claim.workspace_key,
            deadline_s=self._deadline_s(config.harness.timeout_s),
            known=self._for_template(known, command, config.kubernetes.image),
            env=env,
            keys=launch.model_keys(claim.agent_key) | {"LEYDEN_KEY": claim.agent_key},
            archive=packed_workspace(config, rollout),
            files=self._files() | {_TASK: _json(rollout.task)},
        )

    def grader(
        self, rollout: Rollout, key: str, number: int, log: bytes, exit_: Json, *, from_start: bool = False
    ) -> Program:
        """`log` and `exit_` are what is known of the harness's end. Its workspace is the one that was handed in, or
        `from_start` the one that it began with."""
        config = self.config
        known = self._known(rollout)
        env = (
            self._own(rollout)
            | launch.reward_address(self.url)
            | {
                "LEYDEN_HARNESS_LOG": f"{FILES}/{_LOG}",
                "LEYDEN_EXIT": f"{FILES}/{_EXIT}",
            }
        )
        if config.grader.function:
            command: tuple[str, ...] = ("python3", "-m", "leyden.controller.grade", config.grader.function, FILES)
        else:
            command = launch.rendered_command("grader.command", config.grader.command or [], known)
        image = config.kubernetes.grader_image or config.kubernetes.image
        return self._program(
            rollout,
            job_id=grader_job(rollout.rollout_id, rollout.attempt, number),
            workspace_key=key,
            deadline_s=self._deadline_s(config.grader.timeout_s),
            known=self._for_template(known, command, image),
            env=env,
            keys={"LEYDEN_KEY": key},
            grade=number,
            archive=packed_workspace(config, rollout) if from_start else None,
            files=self._files() | {_TASK: _json(rollout.task), _LOG: log[-MOST_LOG_BYTES:], _EXIT: _json(exit_)},
        )

    def _program(self, rollout: Rollout, **fields: Any) -> Program:
        return Program(run=self.run, rollout_id=rollout.rollout_id, attempt=rollout.attempt, url=self.url, **fields)

    def _known(self, rollout: Rollout) -> dict[str, Any]:
        """What the run file's templates may print, as it is in the pod."""
        return {
            "task": rollout.task,
            "workspace": WORKSPACE,
            "rollout_id": rollout.rollout_id,
            "model": self.config.model.name,
            "url": self.url,
            "config_dir": FILES,
            "run_dir": "/tmp",  # noqa: S108  (of a pod of its own)
        }

    def _for_template(self, known: Mapping[str, Any], command: tuple[str, ...], image: str | None) -> dict[str, Any]:
        resources = self.config.kubernetes.resources
        return {**known, "command": list(command), "image": image, "resources": resources}

    def _own(self, rollout: Rollout) -> dict[str, str]:
        return {
            "LEYDEN_ROLLOUT_ID": rollout.rollout_id,
            "LEYDEN_ATTEMPT": str(rollout.attempt),
            "LEYDEN_MODEL": self.config.model.name,
            "LEYDEN_TASK": f"{FILES}/{_TASK}",
            "LEYDEN_WORKSPACE": WORKSPACE,
        }

    def _files(self) -> dict[str, bytes]:
        found = {}
        for path in self.config.kubernetes.files:
            try:
                found[path.name] = (self.config.config_dir / path).read_bytes()
            except OSError as error:
                raise LaunchError(f"kubernetes.files: {path} cannot be read: {error.strerror}") from error
        return found

    def _deadline_s(self, timeout_s: float) -> int:
        """The cluster's own limit, the last net where no controller runs: it does not know how long a harness was held,
        so it lies far behind the controller's."""
        kubernetes, start_s = self.config.kubernetes, self.config.controller.start_timeout_s
        return int(start_s + timeout_s + kubernetes.pause_allowance_s + kubernetes.save_s) + 1


def pods(config: RunConfig, namespace: str) -> Pods:
    """How this run makes pods. Raises ConfigError for a template that cannot be read."""
    settings = config.kubernetes
    template = TEMPLATE
    if settings.template is not None:
        path = config.config_dir / settings.template
        try:
            template = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError("kubernetes.template", f"{path} cannot be read: {error}") from error
    return Pods(
        namespace=namespace,
        keeper_image=settings.keeper_image or settings.image or "",
        keeper=KEEPER.read_text(encoding="utf-8"),
        template=template,
        ttl_s=settings.ttl_s,
        grace_s=settings.save_s,
        workspace_bytes=config.gateway.max_workspace_bytes,
    )


def packed_workspace(config: RunConfig, rollout: Rollout) -> bytes:
    """The workspace that the harness begins with, as a gzipped tar."""
    with tempfile.TemporaryDirectory(prefix="leyden-") as folder:
        paths = launch.attempt_paths(Path(folder), rollout.rollout_id, rollout.attempt)
        workspace.prepare(config, rollout.rollout_id, rollout.task, paths)
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz") as archive:
            archive.add(paths.workspace, arcname=".")
        return packed.getvalue()


def redacted(log: str) -> str:
    """A log without any key of Leyden's."""
    return _KEY.sub("lk-[redacted]", log)


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")
