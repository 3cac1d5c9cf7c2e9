"""What the control API does: groups, rollouts, rewards, events, models, turns."""

from __future__ import annotations

import asyncio
import hashlib
import time
from dataclasses import dataclass, replace

from starlette.responses import FileResponse, Response

from leyden.client import encode, mint
from leyden.config import RunConfig, engine_url
from leyden.errors import Conflict, Unprocessable, Unwritable
from leyden.gateway.admission import Admission
from leyden.gateway.attempt_ends import AttemptEnds
from leyden.gateway.control_bodies import (
    CancelBody,
    ClaimBody,
    ControlCall,
    CreateGroups,
    EventBody,
    ExitBody,
    FailureBody,
    FinishBody,
    GroupQuery,
    ModelBody,
    Recover,
    RewardBody,
    RolloutIds,
    RolloutQuery,
    TakeOverBody,
    VoidBody,
)
from leyden.gateway.feed import Feed
from leyden.gateway.health_checks import Watch
from leyden.gateway.metrics import Metrics
from leyden.gateway.models import Models
from leyden.gateway.turn import TurnService
from leyden.gateway.workspaces import Workspaces
from leyden.records import (
    Claim,
    ControllerList,
    Done,
    EventLog,
    EventReceipt,
    ExitReceipt,
    Groups,
    Paused,
    Recovery,
    RewardReceipt,
    Rollout,
    RolloutPage,
    ServedModels,
    Unmet,
    WorkspaceReceipt,
)
from leyden.store import Store
from leyden.types import Claims, RolloutState, Scope

LONGEST_POLL_S = 60.0
MOST_ROLLOUTS = 5000
KEY_GRACE_S = 24 * 3600.0
ARROW, GZIP = "application/vnd.apache.arrow.stream", "application/gzip"


@dataclass(frozen=True, slots=True)
class ControlApi:
    """The handlers. Each answers a record or a response; its return type is the schema of the answer."""

    config: RunConfig
    secret: bytes
    store: Store
    turns: TurnService
    admission: Admission
    models: Models
    watch: Watch
    feed: Feed
    metrics: Metrics

    async def create_groups(self, call: ControlCall) -> Groups:
        body: CreateGroups = call.body
        return Groups(self.store.rollouts.create_groups([spec.model_dump() for spec in body.groups]))

    async def list_groups(self, call: ControlCall) -> Groups:
        query: GroupQuery = call.query
        return Groups(self.store.rollouts.groups(kind=query.kind, step=query.step, state=query.state))

    async def consume(self, call: ControlCall) -> Done:
        self.store.rollouts.consume(call.body.group_ids)
        return Done()

    async def recover(self, call: ControlCall) -> Recovery:
        body: Recover = call.body
        recovery = self.store.rollouts.recover(body.step, body.version)
        self.turns.attempts.drop_ended()
        return recovery

    async def list_rollouts(self, call: ControlCall) -> RolloutPage:
        """Long-poll: answers at once when there is a change after the cursor, else at the next one or in the end."""
        query: RolloutQuery = call.query
        limit = min(query.limit, MOST_ROLLOUTS)
        states = [name for name in query.states.split(",") if name] or [state.value for state in RolloutState]
        deadline = time.monotonic() + min(query.wait_s, LONGEST_POLL_S)
        if query.controller:
            self.store.controllers.renew(query.controller)
        while True:
            newest = self.store.rollouts.cursor()
            rows = self.store.rollouts.after(query.after, states, limit, tasks=query.tasks == "1")
            left = deadline - time.monotonic()
            if rows or left <= 0 or self.feed.closed:
                cursor = rows[-1].change if len(rows) == limit else max(newest, query.after)
                return RolloutPage(tuple(self._with_hold(row) for row in rows), cursor)
            await self.feed.wait(left)

    async def get_rollout(self, call: ControlCall) -> Rollout:
        return self._with_hold(self.store.rollouts.get(call.rollout_id))

    def _with_hold(self, rollout: Rollout) -> Rollout:
        """With the hold that goes on; a controller that is told less kills the harness."""
        held_s = rollout.held_s + self.turns.attempts.held_now(rollout.rollout_id, rollout.attempt)
        return replace(rollout, held_s=held_s)

    async def claim(self, call: ControlCall) -> Claim:
        body: ClaimBody = call.body
        self.store.controllers.renew(body.controller)
        rollout = self.store.rollouts.claim(call.rollout_id, body.controller)
        lifetime_s = self.config.controller.start_timeout_s + self.config.harness.timeout_s
        return Claim(
            rollout,
            agent_key=self._key(Scope.AGENT, rollout, lifetime_s),
            workspace_key=self._key(Scope.WORKSPACE, rollout, lifetime_s),
        )

    async def list_controllers(self, _call: ControlCall) -> ControllerList:
        return ControllerList(self.store.controllers.listing(), self._run_name())

    def _run_name(self) -> str:
        """The run folder's name, and a digest by which two runs with folders of one name differ."""
        return f"{self.config.run_dir.name}-{hashlib.sha256(b'run' + self.secret).hexdigest()[:8]}"

    async def take_over(self, call: ControlCall) -> Rollout:
        body: TakeOverBody = call.body
        self.store.controllers.renew(body.controller)
        return self.store.rollouts.take_over(call.rollout_id, body.attempt, body.controller)

    async def exit(self, call: ControlCall) -> ExitReceipt:
        body: ExitBody = call.body
        ends = self._ends()
        if why := ends.unscored(call.rollout_id, body.attempt):
            return ExitReceipt(ends.void(call.rollout_id, body.attempt, why))
        rollout = ends.exit(call.rollout_id, body)
        lifetime_s = self.config.controller.start_timeout_s + self.config.grader.timeout_s
        return ExitReceipt(rollout, self._key(Scope.GRADER, rollout, lifetime_s))

    async def finish(self, call: ControlCall) -> Rollout:
        body: FinishBody = call.body
        return self._ends().finish(call.rollout_id, body.attempt, body.reason)

    async def infrastructure(self, call: ControlCall) -> Rollout:
        body: VoidBody = call.body
        return self._ends().void(call.rollout_id, body.attempt, body.reason, final=body.final)

    async def give_back(self, call: ControlCall) -> Rollout:
        body: FailureBody = call.body
        return self._ends().give_back(call.rollout_id, body.attempt, body.reason)

    async def cancel(self, call: ControlCall) -> Rollout:
        body: CancelBody = call.body
        return self._ends().cancel(call.rollout_id, body.reason)

    def _ends(self) -> AttemptEnds:
        return AttemptEnds(self.config, self.store, self.turns.attempts, self._workspaces())

    async def reward(self, call: ControlCall) -> RewardReceipt:
        body: RewardBody = call.body
        rollout_id, attempt = _subject(call.claims, body.rollout_id, body.attempt)
        by_harness = self.config.grader.harness
        try:
            self.store.rollouts.reward(rollout_id, attempt, body.value, while_running=by_harness)
        except Unwritable as error:
            self.turns.attempts.refuse(rollout_id, attempt, str(error))
            raise
        return RewardReceipt(body.value)

    async def put_workspace(self, call: ControlCall) -> WorkspaceReceipt:
        """What the harness left, as a gzipped tar, while its attempt is the running one. The last one that was complete
        before the exit counts."""
        claims = call.claims

        def check() -> None:
            rollout = self.store.rollouts.get(claims.rollout_id)
            if (rollout.state, rollout.attempt) != (RolloutState.RUNNING, claims.attempt):
                raise Conflict(f"attempt {claims.attempt} of rollout {claims.rollout_id} is not running any more")

        check()
        size = await self._workspaces().put(claims.rollout_id, claims.attempt, call.request.stream(), check)
        return WorkspaceReceipt(size)

    async def get_workspace(self, call: ControlCall) -> Response:
        claims = call.claims
        rollout = self.store.rollouts.get(claims.rollout_id)
        graded = rollout.state is RolloutState.GRADING and rollout.reward is None
        if not graded or rollout.attempt != claims.attempt:
            what = f"attempt {claims.attempt} of rollout {claims.rollout_id}"
            raise Conflict(f"{what} is not being graded any more")
        path = self._workspaces().find(claims.rollout_id, claims.attempt)
        return FileResponse(path, media_type=GZIP)

    def _workspaces(self) -> Workspaces:
        return Workspaces(self.config.run_dir, self.config.gateway.max_workspace_bytes)

    async def add_event(self, call: ControlCall) -> EventReceipt:
        body: EventBody = call.body
        by_agent = call.claims.scope is Scope.AGENT
        named = call.claims.rollout_id if by_agent else body.rollout_id
        current = self.store.rollouts.get(named or "").attempt if body.attempt is None else body.attempt
        rollout_id, attempt = _subject(call.claims, named, current)
        return EventReceipt(self.store.turns.add_event(rollout_id, attempt, body.kind, body.data, running=by_agent))

    async def list_events(self, call: ControlCall) -> EventLog:
        return EventLog(tuple(self.store.turns.events(call.query.rollout_id)))

    async def put_model(self, call: ControlCall) -> Done:
        body: ModelBody = call.body
        try:
            engines = [engine_url(engine) for engine in body.engines]
        except ValueError as error:
            raise Unprocessable(f"engines: {error}", param="engines") from error
        self.models.register(call.request.path_params["name"], engines, body.version, body.lineage, body.context_tokens)
        self.watch.registered()
        return Done()

    async def list_models(self, _call: ControlCall) -> ServedModels:
        return ServedModels(self.models.listing(), self.admission.paused)

    async def pause(self, _call: ControlCall) -> Paused:
        await self.admission.pause()
        return Paused(True)

    async def resume(self, _call: ControlCall) -> Paused:
        self.admission.resume()
        return Paused(False)

    async def read_turns(self, call: ControlCall) -> Response:
        body: RolloutIds = call.body

        def read() -> bytes:
            with self.store.turns_reader() as turns:
                return encode(turns.of_rollouts(body.rollout_ids))

        return Response(await asyncio.to_thread(read), media_type=ARROW)

    async def list_unmet(self, _call: ControlCall) -> Unmet:
        """What harnesses asked for and did not get since the gateway started, in how many calls."""
        return Unmet(dict(self.turns.wishes.calls))

    async def read_metrics(self, _call: ControlCall) -> Response:
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4")

    def _key(self, scope: Scope, rollout: Rollout, lifetime_s: float) -> str:
        expires = time.time() + lifetime_s + KEY_GRACE_S
        return mint(self.secret, Claims(scope, rollout.rollout_id, rollout.attempt, expires))


def _subject(claims: Claims, rollout_id: str | None, attempt: int | None) -> tuple[str, int]:
    """The attempt a call is about: the key's own, or for control keys the one it names."""
    if claims.scope is not Scope.CONTROL:
        return claims.rollout_id, claims.attempt
    if rollout_id is None or attempt is None:
        raise Unprocessable("with a control key, name rollout_id and attempt", param="rollout_id")
    return rollout_id, attempt
