"""What harnesses left on other machines, as archives in the run folder, for their graders."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from leyden.errors import NotFound, TooLarge, Unwritable


class Workspaces:
    """Archives `attempts/ROLLOUT/ATTEMPT/workspace.tar.gz` of at most `limit` bytes. They are never unpacked here."""

    def __init__(self, run_dir: Path, limit: int) -> None:
        self._attempts = run_dir / "attempts"
        self._limit = limit

    async def put(
        self, rollout_id: str, attempt: int, chunks: AsyncIterator[bytes], check: Callable[[], None] = lambda: None
    ) -> int:
        """Keep an archive; answers its size. A broken upload, and one that `check` refuses once it is complete, leave
        the earlier one as it was."""
        target = self._path(rollout_id, attempt)
        try:
            return await self._put(target, chunks, check)
        except OSError as error:
            raise Unwritable(f"the workspace cannot be kept under {self._attempts}: {error.strerror}") from error

    async def _put(self, target: Path, chunks: AsyncIterator[bytes], check: Callable[[], None]) -> int:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=".workspace-")
        size = 0
        try:
            with os.fdopen(descriptor, "wb") as file:
                async for chunk in chunks:
                    size += len(chunk)
                    if size > self._limit:
                        raise TooLarge(
                            f"the workspace has more than {self._limit} bytes compressed (gateway.max_workspace_bytes)"
                        )
                    file.write(chunk)
            check()
            os.replace(name, target)  # noqa: PTH105  (returns at once)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)  # noqa: PTH108
        return size

    def find(self, rollout_id: str, attempt: int) -> Path:
        path = self._path(rollout_id, attempt)
        if not path.is_file():
            raise NotFound(f"attempt {attempt} of rollout {rollout_id} has handed in no workspace")
        return path

    def remove(self, rollout_id: str, attempt: int) -> None:
        self._path(rollout_id, attempt).unlink(missing_ok=True)

    def _path(self, rollout_id: str, attempt: int) -> Path:
        return self._attempts / rollout_id / str(attempt) / "workspace.tar.gz"
