"""What the containers of a pod printed."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from pathlib import Path

from leyden.controller.backends.kubernetes.api import KubernetesApi
from leyden.controller.backends.kubernetes.cluster_errors import ClusterError
from leyden.controller.backends.kubernetes.keeper_end import KEEPER
from leyden.controller.backends.kubernetes.objects import Object
from leyden.controller.paths import attempt_paths

log = logging.getLogger(__name__)
MOST_LOG_BYTES = 2**20
NO_LOG = "unable to retrieve container logs"  # a kubelet says so with status 200
_KEY = re.compile(r"lk-[agwc]-[A-Za-z0-9_-]{20,}")


@dataclass(frozen=True, slots=True)
class PodLogs:
    """Reads the logs of pods; keeps the last `lines` of each job in its attempt's folder of `run_dir`."""

    api: KubernetesApi
    run_dir: Path
    lines: int

    async def keep(self, job_id: str, pod: Object | None) -> None:
        """Write what the harness or grader printed, without keys. A log that cannot be kept is only a warning."""
        attempt, _, grader = job_id.partition(".grade")
        rollout_id, _, number = attempt.rpartition(".")
        paths = attempt_paths(self.run_dir, rollout_id, int(number))
        target = paths.grade_log if grader else paths.harness_log
        printed, read = "the pod was gone before its log was read\n", False
        if pod is not None:
            try:
                container = "grader" if grader else "harness"
                printed = await self._read(pod, container, self.lines)
                read = not printed.startswith(NO_LOG)
            except ClusterError as error:
                printed = f"the log could not be read: {error}\n"
        try:
            if read or not target.exists():
                target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                target.write_text(redacted(printed), encoding="utf-8", errors="replace")
        except OSError as error:
            log.warning("the log of %s is not kept: %s", job_id, error)

    async def of_keeper(self, job_id: str, pod: Object) -> str | None:
        """The last lines that the keeper printed; None where they cannot be read."""
        try:
            said = await self._read(pod, KEEPER, 100)
        except ClusterError as error:
            log.warning("%s: what its keeper printed could not be read: %s", job_id, error)
            return None
        return None if said.startswith(NO_LOG) else said

    async def _read(self, pod: Object, container: str, lines: int) -> str:
        name = pod["metadata"]["name"]
        return await self.api.log(name, container, tail_lines=lines, limit_bytes=MOST_LOG_BYTES)


def redacted(log: str) -> str:
    """A log without any key of Leyden's."""
    return _KEY.sub("lk-[redacted]", log)
