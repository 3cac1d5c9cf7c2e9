"""The life of a request, from the parsed call to the committed answer.

1. admit      budgets; a paused gateway holds the call
2. continue   find the recorded turn it continues and extend its exact ids, or render afresh and name the cause
3. sample     from token ids; an engine that is away is waited for, and only here is anything tried again
4. commit     before the first byte of the answer leaves

Concurrency: one event loop. Two calls of one attempt may be in flight; each reads the conversations when it starts and
adds its turns when it commits, without an await in between, so the tree needs no lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from typing import Protocol

import numpy as np

from leyden.config import RunConfig
from leyden.errors import (
    BudgetExceeded,
    CaptureError,
    Conflict,
    EngineRejected,
    EngineUnavailable,
    RequestError,
    Unauthorized,
)
from leyden.gateway.admission import Admission
from leyden.gateway.attempts import Attempt, AttemptRecall, Attempts, Delivery
from leyden.gateway.engines import GenerateRequest
from leyden.gateway.metrics import Metrics
from leyden.gateway.models import Models
from leyden.gateway.prompt import Prompt, Prompter
from leyden.gateway.render import ModelRenderer
from leyden.protocols import ChatChoice, ChatReply, ChatRequest, Recall
from leyden.store import Store
from leyden.trajectory.causes import sibling_cause
from leyden.trajectory.meaning import extend_key
from leyden.trajectory.nodes import Node
from leyden.types import Claims, Generation, Json, TurnState

FIRST_RETRY_S, LONGEST_RETRY_S = 0.05, 2.0


class Engine(Protocol):
    async def generate(self, url: str, request: GenerateRequest) -> Generation: ...


class TurnService:
    """Answers model calls. `closing` is set when the gateway stops: calls cut off then count as lost, not abandoned."""

    def __init__(
        self,
        config: RunConfig,
        store: Store,
        renderer: ModelRenderer,
        engine: Engine,
        admission: Admission,
        models: Models,
        metrics: Metrics,
    ) -> None:
        self._config = config
        self._store = store
        self._renderer = renderer
        self._prompter = Prompter(renderer, metrics, continuity=config.model.continuity == "semantic")
        self._engine = engine
        self._admission = admission
        self._models = models
        self._metrics = metrics
        self.attempts = Attempts(store, config.model.name)
        self.closing = False

    async def answer(self, claims: Claims, request: ChatRequest, *, retried: bool, wire: Json) -> Delivery:
        """Answer a call, or replay the answer to an earlier try of the same call.

        A retry is an equal request of the same attempt whose predecessor's connection closed early, or that says so
        itself (`retried`). A finished predecessor is replayed, an unfinished one abandoned. Anything else is a call of
        its own, equal or not. CancelledError: the caller hung up, the attempt ended, or a retry took the call's place.
        """
        attempt = self.attempts.get(claims)
        key = request.key()
        earlier = attempt.predecessor(key, request.n, retried=retried)
        if earlier is not None and earlier.reply is not None:
            self._metrics.replays.inc()
            earlier.cut = False
            return earlier
        if earlier is not None:
            attempt.forget(earlier)
        delivery = Delivery(key, task=asyncio.current_task())
        attempt.remember(delivery)
        try:
            delivery.reply = await self._call(attempt, request, key, wire)
        except asyncio.CancelledError:
            delivery.cut = True
            raise
        finally:
            delivery.task = None
            if delivery.reply is None and not delivery.cut:
                attempt.forget(delivery)
        return delivery

    def recall(self, claims: Claims) -> Recall:
        """Earlier answers of the caller's attempt, for protocols that refer to them."""
        return AttemptRecall(self.attempts.get(claims), self._store)

    def count(self, claims: Claims, request: ChatRequest) -> int:
        """How many tokens the prompt of this request has now."""
        return len(self._prompter.prompt(self.attempts.get(claims).conversations, request).ids)

    async def _call(self, attempt: Attempt, request: ChatRequest, key: bytes, wire: Json) -> ChatReply:
        self._check_turns(attempt, request.n)
        self._metrics.ignore(request.protocol, request.ignored)
        kept_wire = wire if self._config.gateway.keep_wire else None
        turn_ids = [
            self._store.turns.open(attempt.rollout_id, attempt.attempt, key, request, kept_wire)
            for _ in range(request.n)
        ]
        attempt.turns += request.n
        try:
            with self._metrics.in_flight.track_inprogress():
                return await self._sample_and_commit(attempt, request, turn_ids)
        except asyncio.CancelledError:
            if not self.closing:
                self._close(turn_ids, TurnState.ABANDONED)
            raise
        except CaptureError as error:
            self._close(turn_ids, TurnState.FAILED)
            self._store.rollouts.mark_incomplete(attempt.rollout_id, attempt.attempt, str(error))
            raise RequestError(f"the answer cannot be recorded exactly: {error}", code="capture_failed") from error
        except BaseException:
            self._close(turn_ids, TurnState.FAILED)
            raise

    async def _sample_and_commit(self, attempt: Attempt, request: ChatRequest, turn_ids: list[int]) -> ChatReply:
        if not self._admission.open:
            with self._held(attempt, time.monotonic()):
                await self._admission.wait()
        prompt = self._prompter.prompt(attempt.conversations, request)
        engine_request = self._engine_request(attempt, request, prompt)
        generations = await asyncio.gather(*(self._generate(attempt, engine_request) for _ in turn_ids))
        choices = [
            self._commit(attempt, request, prompt, turn_id, generation)
            for turn_id, generation in zip(turn_ids, generations, strict=True)
        ]
        return ChatReply(turn_ids[0], self._config.model.name, int(time.time()), len(prompt.ids), choices)

    def _engine_request(self, attempt: Attempt, request: ChatRequest, prompt: Prompt) -> GenerateRequest:
        """Sampling by the run file in training, by the group or the harness in evaluation; tokens fit the context."""
        limit = self._models.context_tokens
        room = limit - len(prompt.ids)
        if room <= 0:
            raise BudgetExceeded(
                f"This model's maximum context length is {limit} tokens, but the messages have {len(prompt.ids)}. "
                "Shorten them, or raise model.context_tokens in the run file.",
                param="messages",
                code="context_length_exceeded",
            )
        own = self._config.sampling.model_dump() if attempt.kind == "train" else attempt.sampling
        if own is None:
            harness = request.sampling
            own = {
                "temperature": 1.0 if harness.temperature is None else harness.temperature,
                "top_p": harness.top_p or 1.0,
                "top_k": max(harness.top_k or 0, 0),
            }
        wanted = [room, request.max_tokens, own.get("max_tokens")]
        return GenerateRequest(
            prompt_ids=prompt.ids,
            max_tokens=min(tokens for tokens in wanted if tokens),
            temperature=own["temperature"],
            top_p=own["top_p"],
            top_k=own["top_k"],
            stop_token_ids=tuple(self._renderer.stop_token_ids),
            stop=request.stop,
            seed=request.sampling.seed if attempt.kind != "train" else None,
        )

    async def _generate(self, attempt: Attempt, request: GenerateRequest) -> Generation:
        """One answer of the engine. While no engine can be reached the call is held and tried again."""
        delay = FIRST_RETRY_S
        while True:
            url = self._models.engine(attempt.rollout_id)
            start = time.monotonic()
            try:
                with self._metrics.engine_seconds.time():
                    return self._checked(await self._engine.generate(url, request))
            except EngineRejected as error:
                raise RequestError(str(error), code="engine_rejected") from error
            except EngineUnavailable:
                self._metrics.engine_errors.inc()
                with self._held(attempt, start):
                    await asyncio.sleep(delay)
                    await self._admission.wait()
                delay = min(2 * delay, LONGEST_RETRY_S)

    def _checked(self, generation: Generation) -> Generation:
        if generation.logprobs_T is None:
            self._metrics.no_logprobs.inc()
            if self._config.gateway.strict_logprobs:
                raise CaptureError("log-probs are missing or not finite, and gateway.strict_logprobs is set")
        return generation

    @contextlib.contextmanager
    def _held(self, attempt: Attempt, since: float) -> Iterator[None]:
        """Time from `since` (monotonic) to the end of the block, in which Leyden made the attempt wait: it counts
        against no budget. Holds that overlap count once.
        """
        attempt.begin_hold(since)
        try:
            yield
        finally:
            if seconds := attempt.end_hold():
                self._metrics.held_seconds.inc(seconds)
                self._store.rollouts.add_held(attempt.rollout_id, attempt.attempt, seconds)

    def _commit(
        self, attempt: Attempt, request: ChatRequest, prompt: Prompt, turn_id: int, generation: Generation
    ) -> ChatChoice:
        parent = prompt.parent
        shared = parent.end_tokens if parent else 0
        if request.prompt is not None:
            reply = self._renderer.plain(generation.token_ids_T, generation.stop_string)
        else:
            reply = self._renderer.parse(
                generation.token_ids_T,
                prompt.ids,
                request.tools,
                call_prefix=f"call_{turn_id}_",
                stop_string=generation.stop_string,
            )
        node = Node(
            turn_id=turn_id,
            parent=parent,
            delta_P=np.asarray(prompt.ids[shared:], dtype=np.int32),
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
                messages=_new_messages(request, prompt),
            )
        except Conflict as error:
            raise Unauthorized(f"the attempt ended before its call did: {error}", forbidden=True) from error
        attempt.conversations.add(node)
        self._metrics.turns.labels(TurnState.COMMITTED).inc()
        self._metrics.tokens.inc(len(generation.token_ids_T))
        if cause:
            self._metrics.forks.labels(cause).inc()
        return ChatChoice(reply, generation.finish_reason, len(generation.token_ids_T), generation.stop_string)

    def _check_turns(self, attempt: Attempt, n: int) -> None:
        limit = self._config.harness.max_turns
        if attempt.turns + n > limit:
            raise BudgetExceeded(
                f"the rollout has made {attempt.turns} model calls and may make {limit} (harness.max_turns)"
            )

    def _close(self, turn_ids: list[int], state: TurnState) -> None:
        for turn_id in turn_ids:
            self._store.turns.close(turn_id, state)
            self._metrics.turns.labels(state).inc()


def _new_messages(request: ChatRequest, prompt: Prompt) -> Json | None:
    """What the store keeps of a request that later ones may refer to: the messages that its parent does not know."""
    if not request.store:
        return None
    parent_id = prompt.parent.turn_id if prompt.parent and prompt.shared else None
    return {"after": parent_id, "messages": request.messages[prompt.shared :]}
