"""Stop strings over sampled ids. Pure except for the tokenizer's decode."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[list[int]], str]


class StopStrings:
    """Finds the first stop string in the text of the sampled ids, one token at a time.

    Only the end of the text is decoded: a stop string of n UTF-8 bytes is covered by n tokens at most, and a
    few more are taken so that a multi-byte character cut at the left edge cannot hide it. A character that is
    not complete yet decodes to U+FFFD and simply does not match until its last byte is there. Text of special
    tokens counts as text.
    """

    MARGIN_TOKENS = 4

    def __init__(self, stops: Sequence[str], decode: Decode) -> None:
        self._stops = tuple(stops)
        self._decode = decode
        self._window = max(len(s.encode()) for s in stops) + self.MARGIN_TOKENS

    def find(self, token_ids_T: list[int]) -> str | None:
        """The stop string that begins first in the text, now that the last token has been added; None if none does."""
        text = self._decode(token_ids_T[-self._window :])
        found = [(position, stop) for stop in self._stops if (position := text.find(stop)) >= 0]
        return min(found, key=lambda f: f[0])[1] if found else None
