"""A static key-value cache of `slots` rows for transformers' own forward pass, with a position per row."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class Window:
    """Where the next forward pass writes and reads: set by `SlotCache.at`, read by every layer."""

    rows_B: Tensor
    columns_BS: Tensor
    used: int
    first: int | None  # rows first .. first + B - 1 in order, so that a view replaces a gather


class SlotLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values [slots, heads, columns, head size] of one layer; allocated when their shapes are known."""

    def __init__(self, slots: int, columns: int, window: Window) -> None:
        super().__init__()
        self._slots, self._columns, self._window = slots, columns, window

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        def empty(like: Tensor) -> Tensor:
            shape = (self._slots, like.shape[1], self._columns, like.shape[3])
            return torch.zeros(shape, dtype=like.dtype, device=like.device)

        self.keys, self.values = empty(key_states), empty(value_states)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Store [B, heads, S, size] at the window and return everything that may be attended to, [B,
        heads, used, size].
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        w = self._window
        self.keys[w.rows_B[:, None], :, w.columns_BS] = key_states.transpose(1, 2)
        self.values[w.rows_B[:, None], :, w.columns_BS] = value_states.transpose(1, 2)
        if w.first is not None:
            rows = slice(w.first, w.first + len(w.rows_B))
            return self.keys[rows, :, : w.used], self.values[rows, :, : w.used]
        return (
            self.keys[:, :, : w.used].index_select(0, w.rows_B),
            self.values[:, :, : w.used].index_select(0, w.rows_B),
        )

    def copy_prefix(self, source: int, target: int, count: int) -> None:
        if self.is_initialized:
            self.keys[target, :, :count] = self.keys[source, :, :count]
            self.values[target, :, :count] = self.values[source, :, :count]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._columns, 0

    def get_seq_length(self) -> int:
        return 0  # rows have lengths of their own; masks and positions are always given

    def get_max_length(self) -> int:
        return self._columns

    get_max_cache_shape = get_max_length


class SlotCache(Cache):  # type: ignore[misc]
    """The cache that is handed to `model(cache=...)`. Column `context_tokens` is scrap paper for padding."""

    def __init__(self, layers: int, slots: int, context_tokens: int) -> None:
        self._window = Window()
        self.scrap_column = context_tokens
        super().__init__(layers=[SlotLayer(slots, context_tokens + 1, self._window) for _ in range(layers)])

    def at(self, rows_B: Tensor, columns_BS: Tensor, used: int, *, first: int | None) -> SlotCache:
        """Aim the next forward pass: row b of its input belongs to slot `rows_B[b]`, its tokens to
        `columns_BS[b]`.
        """
        w = self._window
        w.rows_B, w.columns_BS, w.used, w.first = rows_B, columns_BS, used, first
        return self

    def copy_prefix(self, source: int, target: int, count: int) -> None:
        for layer in self.layers:
            layer.copy_prefix(source, target, count)


def last_logits(model: Any) -> Callable[[Tensor, Tensor, Tensor, SlotCache], Tensor]:
    """transformers' own forward, for the last column's logits, with the argument names of the installed release."""
    parameters = inspect.signature(model.forward).parameters
    cache_name = "cache" if "cache" in parameters else "past_key_values"
    extra = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}

    def forward(ids_BS: Tensor, mask_B1SU: Tensor, positions_BS: Tensor, cache: SlotCache) -> Tensor:
        output = model(
            input_ids=ids_BS,
            attention_mask=mask_B1SU,
            position_ids=positions_BS,
            use_cache=True,
            **{cache_name: cache},
            **extra,
        )
        logits: Tensor = output.logits[:, -1]
        return logits

    return forward
