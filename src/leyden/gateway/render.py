"""Messages to token ids and back, for one model: a thin layer over the `renderers` library.

Two renderer instances serve the same tokenizer. The first keeps the template's own rule for earlier reasoning, so it
refuses to bridge where the template would drop reasoning; the second keeps all of it. Where no assistant message on
the path holds reasoning the two give the same text, and the second is used because it bridges user messages too.

Some templates take a system message only at the beginning (Qwen3.5). For those all system messages of a conversation
are shown as one there, as vLLM does for the messages that Claude Code sends in between.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from leyden.config import ModelConfig
from leyden.errors import BudgetExceeded, ConfigError, RequestError
from leyden.gateway.tokenizer import FastTokenizer, load
from leyden.protocols.chat import digest
from leyden.protocols.checks import sampled_object
from leyden.types import Json

log = logging.getLogger(__name__)
BLOCK = ("<think>", "</think>")
RETENTION = frozenset({"preserve_thinking", "preserved_thinking", "clear_thinking"})
MOST_VARIANTS = 16


class ModelRenderer:
    """Renders, bridges and parses for one model. Calls share no state, so threads may make them."""

    def __init__(
        self,
        model_path: str,
        renderer: str,
        thinking_history: Literal["template", "keep"],
        template_kwargs: Mapping[str, Any] | None = None,
        *,
        tokenizer: FastTokenizer | None = None,
    ) -> None:
        self._settings = (model_path, renderer, thinking_history)
        self.template_kwargs = dict(template_kwargs or {})
        self._variants: dict[bytes, ModelRenderer] = {}
        self._tokenizer = tokenizer or load(model_path)
        shared = (self._tokenizer, renderer, model_path)
        if thinking_history == "keep":
            self._keep = self._template = _create(*shared, "all", self.template_kwargs)
        else:
            self._template = _create(*shared, None, self.template_kwargs)
            # Used only where no reasoning stands: what becomes of earlier reasoning is no question there.
            told = {name: value for name, value in self.template_kwargs.items() if name not in RETENTION}
            self._keep = _create(*shared, "all", told)
        keep = self._keep
        self.stop_token_ids: list[int] = list(keep.get_stop_token_ids())
        self._system_leads = _system_leads(keep)

    def variant(self, kwargs: Mapping[str, Any]) -> tuple[ModelRenderer, list[str]]:
        """With these variables of the template over its own; and the names that the template does not know.

        Raises RequestError for a value that the template does not take.
        """
        known = self._template.config.template_field_names()
        wanted = {name: value for name, value in kwargs.items() if name in known}
        merged = self.template_kwargs | wanted
        unknown = [name for name in kwargs if name not in known]
        if merged == self.template_kwargs or all(
            _same(getattr(self._template.config, n), v) for n, v in wanted.items()
        ):
            return self, unknown
        key = digest(merged)
        if key not in self._variants:
            try:
                made = ModelRenderer(*self._settings, merged, tokenizer=self._tokenizer)
            except ConfigError as error:
                field = "chat_template_kwargs"
                raise RequestError(f"{field} {wanted!r:.200} is refused: {error}", param=field) from error
            if len(self._variants) >= MOST_VARIANTS:
                self._variants.pop(next(iter(self._variants)))
            self._variants[key] = made
        return self._variants[key], unknown

    def at_most(self, context_tokens: int) -> AbstractContextManager[None]:
        """Within it, what is far longer than a context is refused before it is tokenised, with BudgetExceeded."""
        return self._tokenizer.at_most(context_tokens)

    def moves(self, messages: Iterable[Json]) -> bool:
        """Whether any of these later messages is shown at the beginning, so that nothing before it stays as it was."""
        return self._system_leads and any(message["role"] == "system" for message in messages)

    def render(self, messages: Sequence[Json], tools: Sequence[Json]) -> list[int]:
        """The prompt of a conversation from its beginning, with the generation prompt at its end.

        Raises RequestError for messages that the template refuses.
        """
        shown = system_first(messages) if self._system_leads else list(messages)
        with _refusing():
            ids: list[int] = self._template.render_ids(shown, tools=_specs(tools), add_generation_prompt=True)
        return ids

    def bridge(
        self,
        prompt_ids: list[int],
        sampled_ids: list[int],
        new_messages: Sequence[Json],
        tools: Sequence[Json],
        *,
        reasoning: bool,
    ) -> list[int] | None:
        """prompt + sampled + `new_messages` + generation prompt; None if the template does not continue like that.

        `reasoning` says whether any assistant message up to here holds reasoning. Raises RequestError for messages
        that the template refuses.
        """
        if self.moves(new_messages):
            return None
        renderer = self._template if reasoning else self._keep
        with _refusing():
            rendered = renderer.bridge_to_next_turn(prompt_ids, sampled_ids, list(new_messages), tools=_specs(tools))
        if rendered is None:
            return None
        ids: list[int] = rendered.token_ids
        kept = len(prompt_ids) + len(sampled_ids)
        return ids if len(ids) > kept and ids[:kept] == [*prompt_ids, *sampled_ids] else None

    def parse(
        self,
        sampled_ids: list[int],
        prompt_ids: list[int],
        tools: Sequence[Json],
        *,
        call_prefix: str,
        stop_string: str | None,
        may_call: Callable[[str], bool] = lambda _name: True,
    ) -> Json:
        """The assistant message that the sampled ids spell. Its content holds no reasoning, nor an empty block of it.

        Tool calls only where tools were offered, every call parses and each `may_call` its tool; else the reply is
        literal text, as a deployed server would send it. Ids of calls are `call_prefix` and a number, so a replay
        answers the same.
        """
        text = self.text(sampled_ids)
        try:
            parsed = self._keep.parse_response(sampled_ids, tools=_specs(tools), prompt_ids=prompt_ids)
            content, reasoning, attempts = parsed.content, parsed.reasoning_content, parsed.tool_calls
        except Exception as error:
            log.warning("sampled ids could not be parsed: %s", type(error).__name__)
            content, reasoning, attempts = text, None, [None]
        message: Json = {"role": "assistant", "content": content}
        if reasoning:
            message["reasoning_content"] = reasoning
        calls = [_tool_call(call, f"{call_prefix}{i}") for i, call in enumerate(attempts)]
        if calls and tools and all(call is not None and may_call(call["function"]["name"]) for call in calls):
            message["tool_calls"] = calls
        elif calls:
            message["content"] = _after_reasoning(text, reasoning)
        elif not reasoning:
            message["content"] = _with_blanks(text, content)
        if stop_string is not None:
            message["content"] = message["content"].split(stop_string, 1)[0]
        return message

    def hides(self, stop_string: str, sampled_ids: list[int], prompt_ids: list[int]) -> bool:
        """Whether a stop string stands in the reasoning alone: no caller sees it there, and it ends nothing."""
        text = self.decode(sampled_ids)
        try:
            parsed = self._keep.parse_response(sampled_ids, prompt_ids=prompt_ids)
        except Exception:
            return False
        shown = "" if parsed.reasoning_complete is False else _after_reasoning(text, parsed.reasoning_content)
        return stop_string in text and stop_string not in shown

    def plain(self, sampled_ids: list[int], stop_string: str | None) -> Json:
        """The reply to a prompt without messages: the text as it was sampled, without special tokens."""
        text = self.text(sampled_ids)
        return {"role": "assistant", "content": text if stop_string is None else text.split(stop_string, 1)[0]}

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """`add_special_tokens` says whether the tokenizer's post-processor adds its own, such as BOS."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return ids

    def text(self, ids: Sequence[int]) -> str:
        """Without special tokens and without the tokens that end a turn."""
        kept = [i for i in ids if i not in self.stop_token_ids]
        return str(self._tokenizer.decode(kept, skip_special_tokens=True))

    def decode(self, ids: Sequence[int]) -> str:
        """All of it, special tokens included."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))


def _after_reasoning(text: str, reasoning: str | None) -> str:
    """The text that follows the block at its beginning, if there is one. An empty block may have no `reasoning`."""
    if reasoning is None and not text.lstrip().startswith(BLOCK):
        return text
    before, close, after = text.partition(BLOCK[1])
    if close:
        return after.lstrip("\n")
    return before.partition(reasoning or BLOCK[0])[2].lstrip("\n")  # a call ended the reasoning


def _with_blanks(text: str, content: str) -> str:
    """All that was said, blanks at its ends too, if `content` leaves out no more than those; else `content`."""
    spoken = content.strip()
    return content if text.strip() != spoken and text.rstrip().endswith(spoken) else text


def system_first(messages: Sequence[Json]) -> list[Json]:
    """The conversation with its system messages as one at the beginning, joined without a separator."""
    system = [message["content"] for message in messages if message["role"] == "system"]
    others = [message for message in messages if message["role"] != "system"]
    return [{"role": "system", "content": "".join(system)}, *others] if system else others


def _system_leads(renderer: Any) -> bool:
    """Whether the template refuses a system message after the first message."""
    try:
        renderer.render_ids([{"role": role, "content": "x"} for role in ("system", "user", "system", "user")])
    except Exception:
        return True
    return False


def load_renderer(model: ModelConfig) -> ModelRenderer:
    """What the run file names. Raises ConfigError for a model without tokenizer or renderer."""
    return ModelRenderer(model.path, model.renderer, model.thinking_history, model.template_kwargs)


def check_template_kwargs(renderer: str, kwargs: Mapping[str, Any]) -> None:
    """Raise ConfigError for variables that the renderer of this name does not take. `auto` says nothing yet."""
    if kwargs and renderer != "auto":
        _check_kwargs(_typed(renderer, None), kwargs)


def _typed(renderer: str, retention: str | None) -> Any:
    """The renderer's own settings."""
    from renderers.configs import RendererConfig

    settings = {"name": renderer} | ({"thinking_retention": retention} if retention else {})
    try:
        return TypeAdapter(RendererConfig).validate_python(settings)
    except ValidationError as error:
        raise ConfigError("model.renderer", f"{renderer!r} is refused: {error.errors()[0]['msg']}") from error


def _check_kwargs(typed: Any, kwargs: Mapping[str, Any]) -> None:
    """Raise ConfigError for variables of the chat template that are unknown, or would be taken as another value."""
    from renderers.base import merge_chat_template_kwargs

    key = "model.template_kwargs"
    known = typed.template_field_names()
    if unknown := [name for name in kwargs if name not in known]:
        allowed = ", ".join(sorted(known)) or "none"
        raise ConfigError(key, f"{unknown[0]!r} is not known to the renderer {typed.name!r}; it knows {allowed}")
    try:
        merged = merge_chat_template_kwargs(typed, kwargs)
    except ValidationError as error:
        problem = error.errors()[0]
        place = ".".join(map(str, problem["loc"])) or "it"
        raise ConfigError(key, f"{dict(kwargs)!r:.200}: {place}: {problem['msg']}") from error
    for name, value in kwargs.items():
        if not _same(getattr(merged, name), value):
            raise ConfigError(key, f"{name} is {value!r:.80}; the renderer {typed.name!r} reads another value in it")


def _same(one: Any, other: Any) -> bool:
    """Equal, and true is not 1."""
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def _create(
    tokenizer: FastTokenizer, renderer: str, model_path: str, retention: str | None, kwargs: Mapping[str, Any]
) -> Any:
    from renderers import create_renderer

    typed = _typed(renderer, retention)
    if renderer != "auto":
        _check_kwargs(typed, kwargs)
    try:
        made = create_renderer(tokenizer, typed, chat_template_kwargs=kwargs)
    except Exception as error:
        raise ConfigError("model.renderer", f"{renderer!r} does not fit {model_path!r}: {error}") from error
    if type(made).__name__ == "DefaultRenderer":
        raise ConfigError(
            "model.renderer",
            f"{renderer!r} finds no exact renderer for {model_path!r}; name its family, for example 'qwen3'",
        )
    return made


def _specs(tools: Sequence[Json]) -> list[Any] | None:
    return list(tools) or None


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """What a template cannot show is the caller's to change; the same messages would fail again."""
    try:
        yield
    except BudgetExceeded:
        raise
    except Exception as error:
        log.warning("messages could not be rendered: %s", type(error).__name__)
        message = f"the model's chat template cannot show these messages: {type(error).__name__}: {error!s:.200}"
        raise RequestError(message, param="messages", code="template_error") from error


def _tool_call(call: Any, call_id: str) -> Json | None:
    """A parsed call in the message's shape; None for one that no protocol could carry."""
    if call is None or call.status.value != "ok" or not isinstance(call.name, str) or not call.name.isprintable():
        return None
    arguments = sampled_object(call.arguments)
    if arguments is None:
        return None
    return {"id": call.id or call_id, "type": "function", "function": {"name": call.name, "arguments": arguments}}
