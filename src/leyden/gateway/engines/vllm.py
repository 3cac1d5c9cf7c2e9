"""The client of vLLM. Which of its routes gives token ids is found out by one token of each, when an engine is checked
for the first time or comes back.

The same token shows whether the engine can serve this run at all. If it cannot, the error names the option to start it
with, before anything is recorded.
"""

from __future__ import annotations

from leyden.errors import EngineRejected, EngineUnavailable, EngineUnsuitable, NotFound
from leyden.gateway.engines import vllm_wire as wire
from leyden.gateway.engines.base import (
    ChatAnswer,
    ChatCall,
    Ends,
    GenerateRequest,
    MissingIds,
    Sampling,
    as_promised,
    within,
)
from leyden.gateway.engines.engine_http import EngineHttp, parsed
from leyden.gateway.engines.evidence import Evidence
from leyden.types import Generation

HEALTH_S = 10.0
NO_ROUTE = frozenset({404, 405})
MOST_CERTAIN = -1e-4
# More than one token: the embedding of a padding token is zero, and then all next tokens are equally likely.
_PROBE = GenerateRequest(prompt_ids=[1, 2, 3, 4, 5, 6, 7, 8], max_tokens=1, top_k=1)
_CHAT_PROBE = ChatCall([{"role": "user", "content": "hi"}], [], Sampling(top_k=1, max_tokens=1))


class VllmEngine:
    """`base.ChatEngine` for any number of vLLM servers.

    `model` is the name that they know the model by (None: their only one). `chat` says that messages are to be
    rendered by the engine, `training` what training samples from, `context_tokens` the longest sequence of the run.
    """

    def __init__(
        self,
        http: EngineHttp,
        evidence: Evidence,
        model: str | None,
        training: Sampling,
        context_tokens: int,
        *,
        chat: bool,
    ) -> None:
        self._http = http
        self._evidence = evidence
        self._model = model
        self._training = training
        self._context_tokens = context_tokens
        self._chat = chat
        self._ends = Ends()
        self._routes: dict[str, str] = {}

    async def generate(self, url: str, request: GenerateRequest) -> Generation:
        if url not in self._routes:
            raise EngineUnavailable(f"engine {url} has not been checked since it was last down")
        with self._evidence.call(url):
            return await self._generate(url, self._routes[url], request)

    async def chat(self, url: str, call: ChatCall) -> ChatAnswer:
        with self._evidence.call(url):
            return await self._chat_once(url, call)

    async def count(self, url: str, call: ChatCall) -> int:
        try:
            answer = await self._http.post(url, wire.TOKENIZE, wire.tokenize_body(call, self._model))
        except EngineRejected as error:
            if error.status not in NO_ROUTE:
                raise
            raise NotFound(f"the engine cannot count tokens: it does not serve {wire.TOKENIZE}") from error
        count = answer.get("count") if isinstance(answer, dict) else None
        if not isinstance(count, int):
            raise EngineUnavailable(f"engine {url} answered {wire.TOKENIZE} without a count", status=200)
        return count

    async def health(self, url: str) -> None:
        try:
            await self._http.alive(url, HEALTH_S)
        except EngineUnavailable:
            self._routes.pop(url, None)
            raise
        if url not in self._routes or self._evidence.doubtful(url):
            self._routes[url] = await self._evidence.proof(url, self._route(url))

    async def _chat_once(self, url: str, call: ChatCall) -> ChatAnswer:
        if call.prompt is None:
            raw = await self._http.post_raw(url, wire.CHAT, wire.chat_body(call, self._model))
            rest, apart = wire.ids_apart(raw)
            answer = parsed(url, rest)
            with as_promised():
                chat = wire.read_chat(answer, call, apart)
        else:
            answer = await self._http.post(url, wire.COMPLETIONS, wire.prompt_body(call, self._model))
            with as_promised():
                chat = wire.read_prompt(answer, call)
        within(chat.generation, call.sampling.max_tokens)
        self._ends.note(url, wire.end_of(answer))
        return chat

    async def _generate(self, url: str, route: str, request: GenerateRequest) -> Generation:
        by_ids = route == wire.GENERATE
        body = wire.generate_body(request) if by_ids else wire.completion_body(request, self._model)
        answer = await self._http.post(url, route, body)
        with as_promised():
            generation = (wire.read_generate if by_ids else wire.read_completion)(answer, request)
        self._ends.note(url, wire.end_of(answer))
        return within(generation, request.max_tokens)

    async def _route(self, url: str) -> str:
        """The route that gives ids. Raises EngineUnsuitable if there is none, or its log-probs are the wrong ones."""
        route, probe = await (self._probe_chat(url) if self._chat else self._probe(url))
        self._check_logprobs(url, probe)
        await self._check_context(url)
        return route

    async def _probe(self, url: str) -> tuple[str, Generation]:
        try:
            return wire.GENERATE, await self._generate(url, wire.GENERATE, _PROBE)
        except EngineRejected as error:
            if error.status not in NO_ROUTE:
                raise
        try:
            return wire.COMPLETIONS, await self._generate(url, wire.COMPLETIONS, _PROBE)
        except (MissingIds, EngineRejected) as error:
            raise EngineUnsuitable(
                f"engine {url} gives no token ids: start vLLM with --enable-scale-out ({wire.GENERATE}), or use a "
                f"version whose {wire.COMPLETIONS} knows return_token_ids. It said: {error}"
            ) from error

    async def _probe_chat(self, url: str) -> tuple[str, Generation]:
        try:
            return wire.CHAT, (await self._chat_once(url, _CHAT_PROBE)).generation
        except (MissingIds, EngineRejected) as error:
            if isinstance(error, EngineRejected) and error.status not in NO_ROUTE:
                raise
            raise EngineUnsuitable(
                f"engine {url} gives no token ids for chats: use a version of vLLM whose {wire.CHAT} knows "
                f"return_token_ids. It said: {error}"
            ) from error

    async def _check_context(self, url: str) -> None:
        """vLLM says its longest sequence in the list of models."""
        status, body = await self._http.get(url, "/v1/models", HEALTH_S)
        lengths = wire.context_lengths(body) if status == 200 else []
        if lengths and max(lengths) < self._context_tokens:
            raise EngineUnsuitable(
                f"engine {url} takes {max(lengths)} tokens: start it with --max-model-len {self._context_tokens}, or "
                "lower model.context_tokens in the run file"
            )

    def _check_logprobs(self, url: str, probe: Generation) -> None:
        """The probe had one token to choose from: its log-prob is 0, or it is one of another distribution."""
        if probe.logprobs_T is None:
            raise EngineUnsuitable(f"engine {url} gives no log-probs: start it without --max-logprobs 0")
        if min(probe.logprobs_T, default=0.0) < MOST_CERTAIN and not self._training.plain:
            raise EngineUnsuitable(
                f"engine {url} gives log-probs from before temperature, top_p and top_k, which the run file sets: "
                "start it with --logprobs-mode processed_logprobs"
            )
