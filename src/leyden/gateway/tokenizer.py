"""The tokenizer as renderers need it, straight on the `tokenizers` library.

The gateway neither trains nor samples, so it does without transformers and torch: it starts in a second, not in ten,
and encoding costs no wrapper. Ids are those of the Hugging Face tokenizer (a test compares them).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

from tokenizers import Tokenizer

from leyden.errors import BudgetExceeded, ConfigError, RequestError
from leyden.model_files import locate

TRIES = 4  # a conversation is bridged in two ways, then rendered: each shows some of it
PIECE_CHARS = 16 * 1024
LONG_CHARS = 2048  # longer texts are tokenised without holding the interpreter


class FastTokenizer:
    """Satisfies the `Tokenizer` protocol of the renderers library. Texts are bounded within `at_most`."""

    def __init__(self, backend: Tokenizer, name_or_path: str, special: dict[str, str | None]) -> None:
        self._budget: ContextVar[_Budget | None] = ContextVar("budget", default=None)
        self._backend = backend
        self._longest = _longest_token(backend)
        self.name_or_path = name_or_path
        self.unk_token_id = self._id(special.get("unk_token"))
        self.eos_token_id = self._id(special.get("eos_token"))

    def encode(self, text: str, *, add_special_tokens: bool = False, **_: Any) -> list[int]:
        """Raises BudgetExceeded, within `at_most`, before a text is tokenised that is too long for sure."""
        budget = self._budget.get()
        if budget is not None and len(text) > budget.left:
            if self._longest and text.isascii() and len(text) > self._longest * budget.context_tokens:
                raise too_long(budget.context_tokens, "are far longer")
            self._refuse_over(budget, text)
        ids = self._ids(text, add_special_tokens)
        if budget is not None:
            budget.spend(len(ids))
        return ids

    @contextmanager
    def at_most(self, context_tokens: int) -> Iterator[None]:
        """Bound the work of the block, for a prompt that must fit a context."""
        before = self._budget.set(_Budget(context_tokens, TRIES * context_tokens))
        try:
            yield
        finally:
            self._budget.reset(before)

    def _refuse_over(self, budget: _Budget, text: str) -> None:
        """Count a long text in pieces, as far as it takes to know. Cuts add few tokens, and what is left is far
        more than fits."""
        counted = replace(budget)
        for start in range(0, len(text), PIECE_CHARS):
            counted.spend(len(self._ids(text[start : start + PIECE_CHARS], add_special_tokens=False)))

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        """Raises RequestError for a text that the tokenizer gives up on, such as a megabyte of spaces."""
        try:
            if len(text) <= LONG_CHARS:
                ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
                return ids
            (encoded,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            return list(encoded.ids)
        except BaseException as error:
            if (
                type(error).__name__ != "PanicException"
            ):  # of Rust; it is no Exception, and can be imported from nowhere
                raise
            said = f"the tokenizer gives up on a text of {len(text)} characters ({error}); shorten it"
            raise RequestError(said, param="messages", code="invalid_value") from None

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = False, **_: Any) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        return str(self._backend.decode(ids, skip_special_tokens=skip_special_tokens))

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        """The id of a token, or of each of a list; an unknown one is `unk_token_id`, which may be None."""
        if not isinstance(tokens, str):
            return [self.convert_tokens_to_ids(token) for token in tokens]
        found = self._id(tokens)
        return self.unk_token_id if found is None else found

    def _id(self, token: str | None) -> int | None:
        found: int | None = None if token is None else self._backend.token_to_id(token)
        return found


def _longest_token(backend: Tokenizer) -> int | None:
    """The characters of ASCII text that one token holds at most; None where tokens do not spell the whole text."""
    keeps_all = type(backend.decoder).__name__ == "ByteLevel" and type(backend.normalizer).__name__ in (
        "NoneType",
        "NFC",
    )
    return max(map(len, backend.get_vocab())) if keeps_all else None


@dataclass(slots=True)
class _Budget:
    context_tokens: int
    left: int

    def spend(self, tokens: int) -> None:
        self.left -= tokens
        if self.left < 0:
            raise too_long(self.context_tokens, "are far longer")


def too_long(context_tokens: int, messages: str) -> BudgetExceeded:
    """The refusal of a prompt; harnesses know its code and its first words."""
    return BudgetExceeded(
        f"This model's maximum context length is {context_tokens} tokens, but the messages {messages}. "
        "Shorten them, or raise model.context_tokens in the run file.",
        param="messages",
        code="context_length_exceeded",
    )


def load(model_path: str) -> FastTokenizer:
    """The tokenizer of a Hugging Face model folder or hub id.

    Raises ConfigError if there is no `tokenizer.json`: models with only a Python tokenizer are not supported.
    """
    tokenizer = locate(model_path, "tokenizer.json")
    try:
        settings = locate(model_path, "tokenizer_config.json")
        special = json.loads(settings.read_text(encoding="utf-8"))
    except ConfigError:
        special = {}
    except ValueError as error:
        raise ConfigError("model.path", f"{settings} is not JSON: {error}") from None
    names = {name: _token_text(special.get(name)) for name in ("unk_token", "eos_token")}
    try:
        return FastTokenizer(Tokenizer.from_file(str(tokenizer)), model_path, names)
    except Exception as error:
        raise ConfigError("model.path", f"{tokenizer} cannot be loaded: {error}") from error


def _token_text(token: Any) -> str | None:
    """A special token is written as its text, or as an object that holds it."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None
