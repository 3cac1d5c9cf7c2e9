"""The two ways from a request to sampled ids: `render: gateway` and `render: engine`.

gateway   the prompt's ids are made here, exactly those of the turn it continues and the new messages' after them;
          the reply is parsed from the sampled ids. An update interrupts a call, and it goes on from its ids.
engine    the messages go to the engine, which renders and parses. Which turn a call continues is seen from the ids
          that come back. An update waits for open calls, and those that take too long are made again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar, cast

import orjson

from leyden.gateway.attempts import Attempt
from leyden.gateway.calls import FIRST_RETRY_S, EngineCalls
from leyden.gateway.engines import ChatAnswer, ChatCall, ChatEngine, Engine, GenerateRequest, Sampling, joined
from leyden.gateway.metrics import Metrics
from leyden.gateway.models import Models
from leyden.gateway.prompt import Prompt, Prompter
from leyden.gateway.render import ModelRenderer
from leyden.gateway.sampling import of_call
from leyden.gateway.tokenizer import too_long
from leyden.gateway.wishes import Wishes
from leyden.gateway.workers import Workers
from leyden.protocols import ChatRequest
from leyden.protocols.chat import digest
from leyden.protocols.checks import sampled_object
from leyden.trajectory.causes import ForkCause, sibling_cause
from leyden.trajectory.continuity import extended, find
from leyden.trajectory.meaning import prefix_keys
from leyden.trajectory.nodes import Conversations, Node
from leyden.trajectory.text import find_text, prompt_keys, root_cause
from leyden.types import FinishReason, Generation, Ids, Json

T = TypeVar("T")
Hides = Callable[[str, list[int], list[int]], bool]


@dataclass(frozen=True, slots=True)
class Sampled:
    """One answer, not yet recorded. `message` is the engine's own reading of it, where it rendered."""

    prompt: Prompt
    generation: Generation
    message: Json | None = None


class Way(Protocol):
    wishes: Wishes

    async def sample(self, attempt: Attempt, request: ChatRequest) -> list[Sampled]:
        """`request.n` answers. Raises RequestError for what cannot be answered, CaptureError for what cannot be
        recorded, EngineUnsuitable if no engine can serve the run.
        """

    def reply(self, sampled: Sampled, request: ChatRequest, turn_id: int) -> Json:
        """The assistant message of an answer. Its tool calls are named after the turn: a replay says the same."""

    async def count(self, attempt: Attempt, request: ChatRequest) -> int:
        """How many tokens the prompt of this request has now."""


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
        generations = await _all([self._generate(attempt, generate, hides) for _ in range(request.n)])
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
        return _first_call(message) if request.one_call else message

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
            part = await self._calls.ask(attempt, _Generate(self._engine, left))
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


class EngineRendered:
    """`render: engine`."""

    def __init__(
        self,
        calls: EngineCalls,
        engine: ChatEngine,
        models: Models,
        training: Sampling,
        template_kwargs: Json,
        workers: Workers,
    ) -> None:
        self.wishes = Wishes()
        self._template_kwargs = template_kwargs
        self._calls = calls
        self._workers = workers
        self._engine = engine
        self._models = models
        self._training = training

    async def sample(self, attempt: Attempt, request: ChatRequest) -> list[Sampled]:
        call = self._call(attempt, request)
        answers = await _all([self._chat(attempt, call) for _ in range(request.n)])
        known = attempt.conversations.snapshot()
        prompts = await self._workers.run(
            attempt, request.body_bytes, lambda: [_place(known, request, answer.prompt_P) for answer in answers]
        )
        return [Sampled(p, a.generation, a.message) for p, a in zip(prompts, answers, strict=True)]

    def reply(self, sampled: Sampled, request: ChatRequest, turn_id: int) -> Json:
        assert sampled.message is not None
        message = _deliverable(sampled.message, request)
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [call | {"id": f"call_{turn_id}_{i}"} for i, call in enumerate(calls)]
        return _first_call(message) if request.one_call else message

    async def count(self, attempt: Attempt, request: ChatRequest) -> int:
        call = self._call(attempt, request)
        return await self._calls.ask(attempt, lambda url, _: self._engine.count(url, call))

    def _call(self, attempt: Attempt, request: ChatRequest) -> ChatCall:
        sampling = of_call(self._training, attempt.kind, attempt.sampling, request)
        if sampling.max_tokens is not None:
            sampling = replace(sampling, max_tokens=min(sampling.max_tokens, self._models.context_tokens))
        return ChatCall(
            request.messages,
            request.tools,
            sampling,
            request.prompt,
            calls=request.callable_tools != (),
            template_kwargs=self._template_kwargs | request.template_kwargs,
        )

    async def _chat(self, attempt: Attempt, call: ChatCall) -> ChatAnswer:
        """One answer, of one version: what an update cut short is made again. So is what a stop string ended in its
        reasoning, which no caller sees: the engine is not told of stop strings then, and the text is cut here.
        """
        stops, asked = call.sampling.stop, call
        while True:
            answer = await self._calls.ask(attempt, _Chat(self._engine, asked), drains=True)
            if answer.generation.finish_reason is FinishReason.ABORT:
                await asyncio.sleep(FIRST_RETRY_S)
            elif call.prompt is None and answer.generation.stop_string and _only_reasons(answer.message):
                asked = replace(call, sampling=replace(call.sampling, stop=()))
            else:
                return answer if asked is call else _cut(answer, stops)


def _only_reasons(message: Json) -> bool:
    return bool(message.get("reasoning_content")) and not message["content"] and not message.get("tool_calls")


def _cut(answer: ChatAnswer, stops: Sequence[str]) -> ChatAnswer:
    """With its text up to the first stop string in it; the ids stay."""
    content = answer.message["content"]
    found = [(content.index(stop), stop) for stop in stops if stop in content]
    if not found:
        return answer
    end, stop = min(found)
    message = {name: value for name, value in answer.message.items() if name != "tool_calls"}
    generation = replace(answer.generation, stop_string=stop, finish_reason=FinishReason.STOP)
    return replace(answer, generation=generation, message=message | {"content": content[:end]})


def _deliverable(message: Json, request: ChatRequest) -> Json:
    """The engine's message if the request allows its calls and their arguments are objects; else with them as text."""
    calls = [call["function"] for call in message.get("tool_calls", ())]
    if all(request.may_call(c["name"]) and sampled_object(c["arguments"]) is not None for c in calls):
        return dict(message)
    texts = [orjson.dumps({"name": c["name"], "arguments": c["arguments"]}).decode() for c in calls]
    content = "\n".join(filter(None, [message["content"], *texts]))
    return {name: value for name, value in message.items() if name != "tool_calls"} | {"content": content}


def _first_call(message: Json) -> Json:
    """With one call at most, as vLLM reads a reply where no parallel calls are wanted."""
    return message | {"tool_calls": message["tool_calls"][:1]} if "tool_calls" in message else message


def _place(known: Conversations, request: ChatRequest, prompt_P: Ids) -> Prompt:
    """Where a prompt that the engine rendered stands in the attempt's tree."""
    text = request.prompt
    keys = prefix_keys(request.messages) if text is None else prompt_keys(text)
    tools_key = digest(request.tools)
    parent = extended(known, prompt_P)
    meant, cause = _meant(known, request, tools_key, keys)
    if meant is not None:
        cause = None if meant is parent else ForkCause.RERENDERED
    if parent is not None:
        cause = sibling_cause(known, parent, request.messages, keys, otherwise=cause)
    reasoning = any(message.get("reasoning_content") for message in request.messages)
    return Prompt(prompt_P, parent, cause, keys, tools_key, reasoning)


def _meant(
    known: Conversations, request: ChatRequest, tools_key: bytes, keys: list[bytes]
) -> tuple[Node | None, ForkCause | None]:
    """The turn that the request continues by what it says, or why it continues none."""
    if request.prompt is None:
        found = find(known, request.messages, tools_key, keys)
        return found.parent, found.cause
    if isinstance(request.prompt, str):
        text = find_text(known, request.prompt)
        return text.parent, text.cause
    return None, root_cause(known, request.prompt)


@dataclass(frozen=True, slots=True)
class _Generate:
    engine: Engine
    request: GenerateRequest

    async def __call__(self, url: str, version: int) -> Generation:
        return await self.engine.generate(url, replace(self.request, version=version))


@dataclass(frozen=True, slots=True)
class _Chat:
    engine: ChatEngine
    call: ChatCall

    async def __call__(self, url: str, version: int) -> ChatAnswer:
        return await self.engine.chat(url, replace(self.call, version=version))


async def _all(works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """The results in order. The first error ends the others."""
    if len(works) == 1:
        return [await works[0]]
    tasks = [asyncio.create_task(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
