"""`render: engine`: the engine renders the messages and reads the reply; the ids that come back place the turn."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import orjson

from leyden.gateway.attempts import Attempt
from leyden.gateway.calls import FIRST_RETRY_S, EngineCalls
from leyden.gateway.engines import ChatAnswer, ChatCall, ChatEngine, Sampling
from leyden.gateway.models import Models
from leyden.gateway.placement import place
from leyden.gateway.sampling import of_call
from leyden.gateway.unmet import Wishes
from leyden.gateway.ways import Sampled, all_of, first_call
from leyden.gateway.workers import Workers
from leyden.protocols import ChatRequest
from leyden.protocols.checks import sampled_object
from leyden.types import FinishReason, Json


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
        answers = await all_of([self._chat(attempt, call) for _ in range(request.n)])
        known = attempt.conversations.snapshot()
        prompts = await self._workers.run(
            attempt, request.body_bytes, lambda: [place(known, request, answer.prompt_P) for answer in answers]
        )
        return [Sampled(p, a.generation, a.message) for p, a in zip(prompts, answers, strict=True)]

    def reply(self, sampled: Sampled, request: ChatRequest, turn_id: int) -> Json:
        assert sampled.message is not None
        message = _deliverable(sampled.message, request)
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [call | {"id": f"call_{turn_id}_{i}"} for i, call in enumerate(calls)]
        return first_call(message) if request.one_call else message

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
            answer = await self._calls.ask(attempt, partial(self._ask, asked), drains=True)
            if answer.generation.finish_reason is FinishReason.ABORT:
                await asyncio.sleep(FIRST_RETRY_S)
            elif call.prompt is None and answer.generation.stop_string and _only_reasons(answer.message):
                asked = replace(call, sampling=replace(call.sampling, stop=()))
            else:
                return answer if asked is call else _cut(answer, stops)

    async def _ask(self, call: ChatCall, url: str, version: int) -> ChatAnswer:
        return await self._engine.chat(url, replace(call, version=version))


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
