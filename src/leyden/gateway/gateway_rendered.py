"""`render: gateway`: the prompt is made here, and the reply is read from the sampled ids."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import cast

from leyden.gateway.attempts import Attempt
from leyden.gateway.calls import FIRST_RETRY_S, EngineCalls
from leyden.gateway.engines import Engine, GenerateRequest, Sampling, joined
from leyden.gateway.metrics import Metrics
from leyden.gateway.models import Models
from leyden.gateway.placement import Prompt
from leyden.gateway.prompt import Prompter
from leyden.gateway.render import ModelRenderer
from leyden.gateway.sampling import of_call
from leyden.gateway.tokenizer import too_long
from leyden.gateway.unmet import Wishes
from leyden.gateway.ways import Sampled, all_of, first_call
from leyden.gateway.workers import Workers
from leyden.protocols import ChatRequest
from leyden.types import FinishReason, Generation, Json

Hides = Callable[[str, list[int], list[int]], bool]


class GatewayRendered:
    """`render: gateway`."""

    def __init__(
        self,
        calls: EngineCalls,
        engine: Engine,
        models: Models,
        renderer: ModelRenderer,
        prompter: Prompter,
        training: Sampling,
        metrics: Metrics,
        workers: Workers,
    ) -> None:
        self.wishes = Wishes()
        self._calls = calls
        self._workers = workers
        self._engine = engine
        self._models = models
        self._renderer = renderer
        self._prompter = prompter
        self._training = training
        self._metrics = metrics

    async def sample(self, attempt: Attempt, request: ChatRequest) -> list[Sampled]:
        await self._calls.admitted(attempt)
        renderer, unknown = self._renderer.variant(request.template_kwargs)
        if unknown:
            self._metrics.ignore(request.protocol, ["chat_template_kwargs"])
            self.wishes.note(["chat_template_kwargs"])
        prompt = await self._prompt(attempt, renderer, request)
        sampling = of_call(self._training, attempt.kind, attempt.sampling, request)
        hides = renderer.hides if request.prompt is None else None
        generate = self._request(sampling, cast("list[int]", prompt.ids))
        generations = await all_of([self._generate(attempt, generate, hides) for _ in range(request.n)])
        for generation in generations:
            self._count_stop_token(generation)
        return [Sampled(prompt, generation) for generation in generations]

    def reply(self, sampled: Sampled, request: ChatRequest, turn_id: int) -> Json:
        generation = sampled.generation
        if request.prompt is not None:
            return self._renderer.plain(generation.token_ids_T, generation.stop_string)
        renderer, _ = self._renderer.variant(request.template_kwargs)
        message = renderer.parse(
            generation.token_ids_T,
            cast("list[int]", sampled.prompt.ids),
            request.tools,
            call_prefix=f"call_{turn_id}_",
            stop_string=generation.stop_string,
            may_call=request.may_call,
        )
        return first_call(message) if request.one_call else message

    async def count(self, attempt: Attempt, request: ChatRequest) -> int:
        renderer, _ = self._renderer.variant(request.template_kwargs)
        return len((await self._prompt(attempt, renderer, request)).ids)

    async def _prompt(self, attempt: Attempt, renderer: ModelRenderer, request: ChatRequest) -> Prompt:
        known, context_tokens = attempt.conversations.snapshot(), self._models.context_tokens
        make = partial(self._prompter.of(renderer).prompt, known, request, context_tokens)
        return await self._workers.run(attempt, request.body_bytes, make)

    def _count_stop_token(self, generation: Generation) -> None:
        """An engine that leaves it out keeps the policy from learning to stop: the closing token is context then."""
        stopped = generation.finish_reason is FinishReason.STOP and generation.stop_string is None
        if stopped and not {*generation.token_ids_T[-1:]} & {*self._renderer.stop_token_ids}:
            self._metrics.no_stop_token.inc()

    def _request(self, sampling: Sampling, prompt_ids: list[int]) -> GenerateRequest:
        """Tokens fit the context. Raises BudgetExceeded if not one does."""
        limit = self._models.context_tokens
        room = limit - len(prompt_ids)
        if room <= 0:
            raise too_long(limit, f"have {len(prompt_ids)}")
        return GenerateRequest(
            prompt_ids=prompt_ids,
            max_tokens=room if sampling.max_tokens is None else min(room, sampling.max_tokens),
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            stop_token_ids=tuple(self._renderer.stop_token_ids),
            stop=sampling.stop,
            seed=sampling.seed,
        )

    async def _generate(self, attempt: Attempt, request: GenerateRequest, hides: Hides | None) -> Generation:
        """One answer. Cut short by an update, it goes on from the ids that are there, under the new weights; and so it
        does where the engine met a stop string in what `hides` from the caller.
        """
        parts: list[Generation] = []
        left = request
        while True:
            part = await self._calls.ask(attempt, partial(self._ask, left))
            parts.append(part)
            left = left.after(part.token_ids_T)
            whole = joined(parts)
            unseen = bool(
                hides and part.stop_string and part.token_ids_T
                and hides(part.stop_string, whole.token_ids_T, request.prompt_ids)
            )  # fmt: skip
            if part.finish_reason is not FinishReason.ABORT and not unseen:
                return whole
            if left.max_tokens <= 0:
                return replace(whole, finish_reason=FinishReason.LENGTH, stop_string=None)
            if unseen:
                continue
            self._metrics.continued.inc()
            if not part.token_ids_T:
                await asyncio.sleep(FIRST_RETRY_S)

    async def _ask(self, request: GenerateRequest, url: str, version: int) -> Generation:
        return await self._engine.generate(url, replace(request, version=version))
