"""Which request sits in which slot of the key-value cache, and how much of its prompt is already there. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from leyden.types import Ids

WORTH_COPYING = 16
WORTH_WAITING = 64


class Placement(NamedTuple):
    """`reused` leading tokens need no computation; they are copied from slot `donor` unless that is None."""

    slot: int
    reused: int
    donor: int | None


class SlotTable:
    """The ids whose keys and values each slot holds. A released slot keeps them until it is given away.

    A conversation's next turn finds its old slot by exact id prefix. Another request that shares only the
    beginning (a system prompt) does not take that slot away: it gets the least recently used one and a copy.
    """

    def __init__(self, slots: int, context_tokens: int) -> None:
        self.ids_SL: NDArray[np.int32] = np.zeros((slots, context_tokens), np.int32)
        self.filled_S = np.zeros(slots, np.int64)
        self.busy_S = np.zeros(slots, np.bool_)
        self._promised_S = np.zeros(slots, np.int64)
        self._used_S = np.zeros(slots, np.int64)
        self._clock = 0

    @property
    def free(self) -> int:
        return int((~self.busy_S).sum())

    def place(self, prompt_P: Ids) -> Placement:
        """Occupy a free slot (there must be one) for a prompt. Its last token is always computed, never reused.

        Worked example: slot 0 (free) holds [1, 2, 3, 4], slot 1 is empty. [1, 2, 3, 4, 5] continues slot 0
        and reuses 4 tokens; [1, 9] shares one token of 4, less than half, and goes to slot 1.
        """
        shared_S = self._shared(prompt_P[:-1])
        continues_S = ~self.busy_S & (shared_S > 0) & (2 * shared_S >= self.filled_S)
        donor: int | None = None
        if continues_S.any():
            slot = int(np.where(continues_S, shared_S, -1).argmax())
        else:
            age_S = np.where(self.filled_S == 0, -1, self._used_S)
            slot = int(np.where(self.busy_S, np.iinfo(np.int64).max, age_S).argmin())
        best = int(shared_S.argmax())
        if best != slot and shared_S[best] >= shared_S[slot] + WORTH_COPYING:
            donor = best
        reused = int(shared_S[slot] if donor is None else shared_S[donor])
        self.busy_S[slot] = True
        self.ids_SL[slot, : len(prompt_P)] = prompt_P
        self.filled_S[slot] = reused
        self._promised_S[slot] = len(prompt_P)
        self._touch(slot)
        return Placement(slot, reused, donor)

    def should_wait(self, prompt_P: Ids) -> bool:
        """Whether prompts that were placed but not computed yet will soon hold much more of this prompt.

        The members of a group arrive together with one prompt: the first computes it, the others copy it.
        """
        differs_S = self._first_difference(prompt_P[:-1])
        now = np.minimum(differs_S, self.filled_S).max()
        soon = np.minimum(differs_S, np.maximum(self.filled_S, self._promised_S)).max()
        return bool(soon - now >= WORTH_WAITING)

    def computed(self, slot: int, length: int) -> None:
        """The slot now holds the first `length` tokens of its prompt."""
        self.filled_S[slot] = length
        self._promised_S[slot] = 0

    def release(self, slot: int) -> None:
        self.busy_S[slot] = False
        self._promised_S[slot] = 0
        self._touch(slot)

    def forget(self) -> None:
        """Nothing that is held is valid any more (new weights)."""
        self.filled_S[:] = 0

    def _touch(self, slot: int) -> None:
        self._clock += 1
        self._used_S[slot] = self._clock

    def _shared(self, prompt_P: Ids) -> NDArray[np.int64]:
        """Length of the common prefix of the prompt with what each slot holds, shape [S]."""
        return np.minimum(self._first_difference(prompt_P), self.filled_S)

    def _first_difference(self, prompt_P: Ids) -> NDArray[np.int64]:
        length = len(prompt_P)
        if length == 0:
            return np.zeros(len(self.filled_S), np.int64)
        differs_SP = self.ids_SL[:, :length] != prompt_P
        return np.where(differs_SP.any(axis=1), differs_SP.argmax(axis=1), length)


def prefill_batches(new_tokens: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Positions of requests that are prefilled in one forward pass: of similar length, padded size bounded.

    A pass holds lengths of which the longest is at most twice the shortest (or 32), and rows x longest is at
    most `max_tokens`, unless a single request is longer.

    >>> prefill_batches([30, 500, 20, 900, 8], max_tokens=1000)
    [[4, 2, 0], [1], [3]]
    """
    order = sorted(range(len(new_tokens)), key=lambda i: new_tokens[i])
    result: list[list[int]] = []
    for i in order:
        fits = bool(result) and (
            new_tokens[i] <= max(32, 2 * new_tokens[result[-1][0]])
            and (len(result[-1]) + 1) * new_tokens[i] <= max_tokens
        )
        if fits:
            result[-1].append(i)
        else:
            result.append([i])
    return result
