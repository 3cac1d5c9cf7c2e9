"""A real gateway for the controller's tests, with what they do to its record behind its back."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import cache
from pathlib import Path
from typing import Any

from leyden.client import control_key
from leyden.gateway.render import ModelRenderer
from leyden.records import Rollout
from leyden.store import Store
from leyden.types import RolloutState
from tests.gateway.conftest import SECRET, make_config, serving
from tests.tiny_model import make_tiny_model


@cache
def _model() -> tuple[tempfile.TemporaryDirectory[str], ModelRenderer]:
    folder = tempfile.TemporaryDirectory()
    path = make_tiny_model(Path(folder.name) / "model", weights=False)
    return folder, ModelRenderer(str(path), "qwen3", "template")


class LiveGateway:
    """`async with LiveGateway() as gateway`: serves on a loopback port. `calls` are the changes of rollouts that were
    asked for, as (verb, rollout id)."""

    secret = SECRET
    key = control_key(SECRET)

    def __init__(self, *, max_attempts: int = 3) -> None:
        self.calls: list[tuple[str, str]] = []
        self._max_attempts = max_attempts
        self._slots = 0

    async def __aenter__(self) -> LiveGateway:
        model, renderer = _model()
        async with AsyncExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            harness = {"command": ["true"], "max_attempts": self._max_attempts, "retry_backoff_s": 0}
            config = make_config(Path(folder), Path(model.name) / "model", harness=harness)
            served = await stack.enter_async_context(serving(config, renderer))
            self.url = served.url
            self._changed = served.app.state.feed.notify
            served.app = _Recording(served.app, self.calls)  # type: ignore[assignment]
            self.store = Store(config.run_dir / "store.sqlite", self._changed)
            stack.callback(self.store.close)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def add(self, rollout_id: str, task: dict[str, Any] | None = None) -> None:
        """A queued rollout under this id."""
        spec = {"kind": "train", "step": 0, "slot": self._slots, "size": 1, "task": task or {}}
        self._slots += 1
        (group,) = self.store.rollouts.create_groups([spec])
        self._write("UPDATE rollouts SET rollout_id = ? WHERE rollout_id = ?", rollout_id, group.rollouts[0].rollout_id)

    def claimed(self, rollout_id: str, controller: str = "c") -> None:
        self.store.rollouts.claim(rollout_id, controller)

    def over(self, rollout_id: str, exit_code: int) -> None:
        """Claimed, run, graded."""
        self.claimed(rollout_id)
        self.store.rollouts.exit(rollout_id, 1, exit_code=exit_code, timed_out=False, reason=None)
        self.store.rollouts.reward(rollout_id, 1, 1.0, while_running=False)
        self.store.rollouts.finish(rollout_id, 1, None)

    def cancel(self, rollout_id: str) -> None:
        self.store.rollouts.cancel(rollout_id, "cancelled")

    def hold_all(self) -> None:
        """Every attempt has been held for an hour when it begins."""
        self._write(
            "CREATE TRIGGER held AFTER INSERT ON attempts BEGIN UPDATE attempts SET held_s = 3600 "
            "WHERE rollout_id = NEW.rollout_id AND attempt = NEW.attempt; END"
        )

    def release(self, rollout_id: str) -> None:
        self._write("UPDATE attempts SET held_s = 0 WHERE rollout_id = ?", rollout_id)

    def __getitem__(self, rollout_id: str) -> Rollout:
        return self.store.rollouts.get(rollout_id)

    @property
    def rollouts(self) -> list[Rollout]:
        return self.store.rollouts.after(0, list(RolloutState), 10_000)

    async def ended(self, *rollout_ids: str, limit_s: float = 300.0) -> list[Rollout]:
        """Wait until these rollouts, or all, are final."""
        ids = rollout_ids or tuple(r.rollout_id for r in sorted(self.rollouts, key=lambda r: r.group_id))
        await self._until(lambda: all(self[one].state.terminal for one in ids), limit_s)
        return [self[one] for one in ids]

    async def reached(self, rollout_id: str, state: str, limit_s: float = 300.0) -> Rollout:
        await self._until(lambda: self[rollout_id].state == state, limit_s)
        return self[rollout_id]

    async def _until(self, condition: Callable[[], bool], limit_s: float) -> None:
        async with asyncio.timeout(limit_s):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    def _write(self, sql: str, *values: Any) -> None:
        self.store._db.execute(sql, values)
        self._changed()


class _Recording:
    """The application; what is asked of `/api/rollouts/ID/VERB` is noted."""

    def __init__(self, app: Any, calls: list[tuple[str, str]]) -> None:
        self._app, self._calls = app, calls

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        match scope.get("path", "").split("/"):
            case ["", "api", "rollouts", rollout_id, verb]:
                self._calls.append((verb, rollout_id))
        await self._app(scope, receive, send)
