"""Texts as ids that no tokenizer would choose, as sampling does now and then."""

from __future__ import annotations

import random

from tokenizers import Tokenizer


class Speller:
    """Encodes a text and splits some of its tokens into two that spell the same. Equal texts have equal ids."""

    def __init__(self, tokenizer: Tokenizer, share: float = 0.3) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = tokenizer.get_vocab(with_added_tokens=False)
        self._share = share

    def ids(self, text: str) -> list[int]:
        rng = random.Random(text)
        canonical = self._tokenizer.encode(text, add_special_tokens=False).ids
        return [part for token_id in canonical for part in self._parts(token_id, rng)]

    def _parts(self, token_id: int, rng: random.Random) -> list[int]:
        token = self._tokenizer.id_to_token(token_id)
        if token not in self._vocabulary or rng.random() > self._share:
            return [token_id]
        cuts = [(token[:at], token[at:]) for at in range(1, len(token))]
        known = [(a, b) for a, b in cuts if a in self._vocabulary and b in self._vocabulary]
        return [self._vocabulary[part] for part in rng.choice(known)] if known else [token_id]
