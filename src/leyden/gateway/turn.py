"""The life of a request, from the parsed call to the committed answer.

1. budget     the attempt may make so many calls
2. sample     one of two ways (`gateway/ways`): which recorded turn it continues, the exact ids, the engine's answer
3. commit     before the first byte of the answer leaves

Concurrency: one event loop. Two calls of one attempt may be in flight; each reads the conversations when it starts and
adds its turns when it commits, without an await in between, so the tree needs no lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np

from leyden.config import RunConfig
from leyden.errors import (
    BudgetExceeded,
    CaptureError,
    Conflict,
    EngineBroken,
    EngineUnsuitable,
    LeydenError,
    RequestError,
    Unauthorized,
    Unwritable,
)
from leyden.gateway.attempts import Attempt, AttemptRecall, Attempts, Delivery
from leyden.gateway.metrics import Metrics
from leyden.gateway.placement import Prompt
from leyden.gateway.ways import Sampled, Way
from leyden.gateway.workers import Workers
from leyden.protocols import ChatChoice, ChatReply, ChatRequest, Recall
from leyden.protocols.chat import refuse_prefill
from leyden.store import Store
from leyden.store.pack import compressor, pack_json
from leyden.trajectory.causes import sibling_cause
from leyden.trajectory.meaning import extend_key
from leyden.trajectory.nodes import Node
from leyden.types import FinishReason, Generation, Json, TurnState

MOST_KEPT_BYTES = 256 * 2**20  # of one attempt, as the next
MOST_FAILED = 1000


@dataclass(frozen=True, slots=True)
class Asked:
    """A call as it was read. `key` is the request's, `wire` the packed body if it is to be kept."""

    request: ChatRequest
    key: bytes
    wire: bytes | None


T = TypeVar("T")
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0
log = logging.getLogger(__name__)


class TurnService:
    """Answers model calls. `closing` is set when the gateway stops: calls cut off then count as lost, not abandoned."""

    def __init__(self, config: RunConfig, store: Store, way: Way, metrics: Metrics, workers: Workers) -> None:
        self._config = config
        self._store = store
        self._way = way
        self._metrics = metrics
        self._workers = workers
        self.attempts = Attempts(store, config.model.name)
        self.wishes = way.wishes
        self.closing = False

    def asked(self, body: Json, request: ChatRequest) -> Asked:
        """Called where the request was read: off the event loop, if it is large."""
        wire = pack_json(body, compressor()) if self._config.gateway.keep_wire else None
        return Asked(request, request.key(), wire)

    async def answer(self, attempt: Attempt, asked: Asked, *, retried: bool) -> Delivery:
        """Answer a call, or replay the answer to an earlier try of the same call.

        A retry is an equal request of the same attempt whose predecessor's connection closed early, or that says so
        itself (`retried`). A finished predecessor is replayed, an unfinished one abandoned. Anything else is a call of
        its own, equal or not. CancelledError: the caller hung up, the attempt ended, or a retry took the call's place.
        """
        refuse_prefill(asked.request)
        earlier = attempt.predecessor(asked.key, asked.request.n, retried=retried)
        if earlier is not None and earlier.reply is not None:
            self._metrics.replays.inc()
            earlier.cut = False
            last = earlier.reply.turn_id
            await self._written(attempt, lambda: self._store.turns.goes_on(attempt.rollout_id, attempt.attempt, last))
            return earlier
        if earlier is not None:
            attempt.forget(earlier)
        delivery = Delivery(asked.key, task=asyncio.current_task())
        attempt.remember(delivery)
        try:
            delivery.reply = await self._call(attempt, asked)
        except asyncio.CancelledError:
            delivery.cut = True
            raise
        finally:
            delivery.task = None
            if delivery.reply is None and not delivery.cut:
                attempt.forget(delivery)
        return delivery

    def recall(self, attempt: Attempt) -> Recall:
        """Earlier answers of the caller's attempt, for protocols that refer to them."""
        return AttemptRecall(attempt, self._store)

    async def count(self, attempt: Attempt, request: ChatRequest) -> int:
        """How many tokens the prompt of this request has now."""
        try:
            return await self._way.count(attempt, request)
        except (EngineUnsuitable, EngineBroken) as error:
            raise self._incomplete(attempt, error) from error

    async def _call(self, attempt: Attempt, asked: Asked) -> ChatReply:
        request = asked.request
        self._check_turns(attempt, request.n)
        _keep(attempt, asked.wire)
        self._metrics.ignore(request.protocol, request.ignored)
        self.wishes.note(request.unmet)
        wires = [asked.wire, *[None] * (request.n - 1)]
        attempt.turns += request.n
        turn_ids: list[int] = []
        try:
            for wire in wires:
                names = (attempt.rollout_id, attempt.attempt)
                open_turn = partial(self._store.turns.open, *names, asked.key, request, wire)
                turn_ids.append(await self._written(attempt, open_turn))
            with self._metrics.in_flight.track_inprogress():
                return await self._sample_and_commit(attempt, request, turn_ids)
        except asyncio.CancelledError:
            if not self.closing:
                self._close(turn_ids, TurnState.ABANDONED)
            raise
        except (CaptureError, EngineUnsuitable, EngineBroken) as error:
            self._fail(attempt, request.n, turn_ids)
            raise self._incomplete(attempt, error) from error
        except BaseException:
            self._fail(attempt, request.n, turn_ids)
            raise

    async def _sample_and_commit(self, attempt: Attempt, request: ChatRequest, turn_ids: list[int]) -> ChatReply:
        answers = await self._way.sample(attempt, request)
        for answer in answers:
            self._check_logprobs(answer.generation)
        kept = await self._kept_messages(attempt, request, answers)
        choices = []
        for turn_id, answer, messages in zip(turn_ids, answers, kept, strict=True):
            commit = partial(self._commit, attempt, request, answer, turn_id, messages)
            choices.append(await self._written(attempt, commit))
        prompt_tokens = len(answers[0].prompt.ids)
        return ChatReply(turn_ids[0], self._config.model.name, int(time.time()), prompt_tokens, choices)

    def _incomplete(self, attempt: Attempt, error: LeydenError) -> RequestError:
        """What the harness hears of an attempt that cannot count."""
        self.attempts.spoil(attempt.rollout_id, attempt.attempt, str(error))
        what = "no engine answers" if isinstance(error, EngineBroken) else "the answer cannot be recorded exactly"
        return RequestError(f"{what}: {error}", code="capture_failed")

    def _check_logprobs(self, generation: Generation) -> None:
        if generation.logprobs_T is None:
            self._metrics.no_logprobs.inc()
            if self._config.gateway.strict_logprobs:
                raise CaptureError("log-probs are missing or not finite, and gateway.strict_logprobs is set")

    async def _kept_messages(
        self, attempt: Attempt, request: ChatRequest, answers: Sequence[Sampled]
    ) -> Sequence[bytes | None]:
        """What the store keeps, for each answer, of a request that later ones may refer to."""
        if not request.store:
            return [None] * len(answers)

        def pack() -> list[bytes]:
            return [pack_json(_new_messages(request, answer.prompt), compressor()) for answer in answers]

        kept = await self._workers.run(attempt, request.body_bytes, pack)
        for messages in kept:
            _keep(attempt, messages)
        return kept

    def _commit(
        self, attempt: Attempt, request: ChatRequest, answer: Sampled, turn_id: int, messages: bytes | None
    ) -> ChatChoice:
        prompt, generation = answer.prompt, answer.generation
        parent = prompt.parent
        shared = parent.end_tokens if parent else 0
        reply = self._way.reply(answer, request, turn_id)
        node = Node(
            turn_id=turn_id,
            parent=parent,
            delta_P=np.array(prompt.ids[shared:], dtype=np.int32),
            sampled_T=np.asarray(generation.token_ids_T, dtype=np.int32),
            key=extend_key(prompt.keys[-1], reply),
            prompt_key=prompt.keys[-1],
            first_key=prompt.keys[1],
            tools_key=prompt.tools_key,
            depth=len(request.messages if request.prompt is None else request.prompt),
            reply=reply,
            has_reasoning=prompt.has_reasoning or "reasoning_content" in reply,
            stop_string=generation.stop_string,
        )
        cause = prompt.cause or sibling_cause(attempt.conversations, parent, request.messages, prompt.keys)
        try:
            self._store.turns.commit(
                turn_id,
                parent_id=parent.turn_id if parent else None,
                fork_cause=cause,
                delta=node.delta_P,
                generation=generation,
                node=node.to_json(),
                messages=messages,
            )
        except Conflict as error:
            raise Unauthorized(f"the attempt ended before its call did: {error}", forbidden=True) from error
        attempt.conversations.add(node)
        self._metrics.turns.labels(TurnState.COMMITTED).inc()
        self._metrics.tokens.inc(len(generation.token_ids_T))
        if generation.finish_reason is FinishReason.LENGTH:
            self._metrics.truncated.inc()
        if cause:
            self._metrics.forks.labels(cause).inc()
        return ChatChoice(reply, generation.finish_reason, len(generation.token_ids_T), generation.stop_string)

    async def _written(self, attempt: Attempt, write: Callable[[], T]) -> T:
        """What `write` answers once the store can be written. Until then the call is held; a caller that does not wait
        for it was let down."""
        since, pause_s = time.monotonic(), FIRST_PAUSE_S
        try:
            return write()
        except Unwritable as error:
            why = str(error)
        log.warning("a model call of rollout %s is held: %s", attempt.rollout_id, why)
        with attempt.held(since, self._store, self._metrics):
            while True:
                try:
                    await asyncio.sleep(pause_s)
                    return write()
                except Unwritable:
                    pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
                except asyncio.CancelledError:
                    self.attempts.spoil(attempt.rollout_id, attempt.attempt, why)
                    raise

    def _check_turns(self, attempt: Attempt, n: int) -> None:
        limit = self._config.harness.max_turns
        if attempt.turns + n > limit:
            raise BudgetExceeded(
                f"the rollout has made {attempt.turns} model calls and may make {limit} (harness.max_turns)"
            )

    def _fail(self, attempt: Attempt, n: int, turn_ids: list[int]) -> None:
        """Such calls count against no budget, so the store keeps only the first of them."""
        attempt.turns -= n
        attempt.failed += n
        if attempt.failed > MOST_FAILED:
            with contextlib.suppress(Unwritable):
                self._store.turns.withdraw(turn_ids)
        self._close(turn_ids, TurnState.FAILED)

    def _close(self, turn_ids: list[int], state: TurnState) -> None:
        for turn_id in turn_ids:
            with contextlib.suppress(Unwritable):  # it stays open until its attempt ends
                self._store.turns.close(turn_id, state)
            self._metrics.turns.labels(state).inc()


def _keep(attempt: Attempt, packed: bytes | None) -> None:
    """Count what the store is to keep of a call. Raises BudgetExceeded where an attempt would fill it."""
    kept = attempt.kept_bytes + len(packed or b"")
    if kept > MOST_KEPT_BYTES:
        raise BudgetExceeded(
            f"the record of this attempt's requests would grow to {kept} bytes; the limit is {MOST_KEPT_BYTES}. Send "
            "`store: false`, or set gateway.keep_wire: false in the run file"
        )
    attempt.kept_bytes = kept


def _new_messages(request: ChatRequest, prompt: Prompt) -> Json:
    """The messages that a turn's parent does not know."""
    parent_id = prompt.parent.turn_id if prompt.parent and prompt.shared else None
    return {"after": parent_id, "messages": request.messages[prompt.shared :]}
