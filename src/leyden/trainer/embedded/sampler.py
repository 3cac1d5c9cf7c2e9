"""The embedded inference engine: token ids in, token ids and exact log-probs out.

Concurrency: one thread, `leyden-sampler`, owns the model, the key-value cache, the slot table and every
active request. Other threads touch only the inbox and the list of pending weight updates, under one lock, and
futures. The thread repeats: weight updates, cancellations, admission (prefill), one decode step for all
active requests. So an update and a cancellation happen at a token boundary, and a new request waits for one
decode step at most.

A weight update invalidates all keys and values; active requests go on from prompt + partial ids and their
later tokens carry the new version. Errors fail the futures of the requests concerned; the thread goes on.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from leyden.errors import EngineError, EngineUnavailable
from leyden.trainer.embedded.architecture import check_supported
from leyden.trainer.embedded.draw import sample
from leyden.trainer.embedded.kv import SlotCache, last_logits
from leyden.trainer.embedded.requests import Active, SampleRequest, check
from leyden.trainer.embedded.slots import SlotTable, prefill_batches
from leyden.trainer.embedded.stopping import Decode, StopStrings
from leyden.types import Generation


@dataclass(slots=True)
class SamplerStats:
    """Totals since the start. `prefilled` counts prompt tokens computed, `reused` those found in the cache."""

    prefilled: int = 0
    reused: int = 0
    sampled: int = 0
    prefill_passes: int = 0
    decode_steps: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0


class _Update(NamedTuple):
    apply: Callable[[], None]
    version: int
    lineage: str | None
    future: Future[None]


class Sampler:
    """See the module's head. `model` belongs to the sampler's thread from now on: give it a copy of its own.

    `decode` turns ids into text and is needed for stop strings only.
    """

    def __init__(
        self,
        model: Any,
        *,
        slots: int,
        context_tokens: int,
        decode: Decode | None = None,
        version: int = 0,
        lineage: str = "",
        seed: int = 0,
        prefill_tokens: int = 8192,
    ) -> None:
        check_supported(model.config.to_dict(), context_tokens)
        self.model = model.eval()
        self._device = next(model.parameters()).device
        self._vocabulary = int(model.get_input_embeddings().num_embeddings)
        self._context = context_tokens
        self._decode_text = decode
        self._prefill_tokens = prefill_tokens
        self._forward = last_logits(model)
        self._cache = SlotCache(model.config.get_text_config().num_hidden_layers, slots, context_tokens)
        self._table = SlotTable(slots, context_tokens)
        self._columns = torch.arange(context_tokens + 1, device=self._device)
        self._seeds = random.Random(seed)
        self._version = version
        self._lineage = lineage
        self._broken: str | None = None
        self._active: list[Active] = []
        self._waiting: deque[Active] = deque()
        self._changed = threading.Condition()
        self._inbox: list[Active] = []
        self._updates: list[_Update] = []
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="leyden-sampler", daemon=True)
        self.stats = SamplerStats()

    @property
    def version(self) -> int:
        """Policy version of the weights that the next token is sampled with."""
        return self._version

    @property
    def lineage(self) -> str:
        """With the version, names one set of weights."""
        return self._lineage

    @property
    def load(self) -> tuple[int, int]:
        """(requests in a slot, requests waiting for one), as of now."""
        return len(self._active), len(self._waiting) + len(self._inbox)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End the thread at the next token boundary; requests that are not finished fail."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread.ident is None:
            self._end()
        else:
            self._thread.join()

    def submit(self, request: SampleRequest) -> Future[Generation]:
        """Queue a request (first come, first served). Cancelling the future cancels it at the next token.

        Raises EngineRejected for what can never work, EngineUnavailable when closed or without valid weights.
        """
        check(
            request,
            context_tokens=self._context,
            vocabulary=self._vocabulary,
            has_text=self._decode_text is not None,
        )
        stops = StopStrings(request.stop, self._decode_text) if request.stop and self._decode_text else None
        with self._changed:
            if self._closing or self._broken:
                raise EngineUnavailable(self._broken or "the sampler is closed")
            seed = self._seeds.getrandbits(63) if request.seed is None else request.seed
            active = Active(
                request,
                list(request.prompt_ids),
                random.Random(seed),
                frozenset(request.stop_token_ids),
                stops,
            )
            self._inbox.append(active)
            self._changed.notify()
        return active.future

    def update_weights(self, apply: Callable[[], None], version: int, lineage: str | None = None) -> Future[None]:
        """Run `apply`, which writes new weights into `model`, between two tokens; from then on they are `version`.

        If `apply` raises, the future does too and nothing is sampled until an update succeeds.
        """
        future: Future[None] = Future()
        with self._changed:
            if self._closing:
                raise EngineUnavailable("the sampler is closed")
            self._updates.append(_Update(apply, version, lineage, future))
            self._changed.notify()
        return future

    # ---- the thread --------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while self._next_work():
                    try:
                        self._drop_cancelled()
                        self._admit()
                        self._decode()
                    except Exception as error:
                        self._fail_active(EngineError(f"sampling failed: {type(error).__name__}: {error}"))
        finally:
            self._end()

    def _next_work(self) -> bool:
        """Sleep until there is something to do, take what came in, apply weight updates; False when closing."""
        with self._changed:
            while not (self._closing or self._updates or self._inbox or self._waiting or self._active):
                self._changed.wait()
            if self._closing:
                return False
            self._waiting.extend(self._inbox)
            self._inbox.clear()
            updates, self._updates = self._updates, []
        for update in updates:
            self._update(update)
        return True

    def _update(self, update: _Update) -> None:
        for active in self._active:
            self._table.release(active.slot)
        self._waiting.extendleft(reversed(self._active))
        self._active = []
        self._table.forget()
        try:
            update.apply()
        except Exception as error:
            self._broken = f"the update to version {update.version} failed: {error}"
            self._fail_active(EngineUnavailable(self._broken))
            _settle(update.future, error)
            return
        self._version, self._broken = update.version, None
        if update.lineage is not None:
            self._lineage = update.lineage
        _settle(update.future, None)

    def _drop_cancelled(self) -> None:
        for active in [a for a in self._active if a.future.cancelled()]:
            self._table.release(active.slot)
            self._active.remove(active)

    def _admit(self) -> None:
        """Give free slots to waiting requests, prefill them in few batched passes, sample their first tokens."""
        admitted: list[tuple[Active, list[int], int]] = []
        later: list[Active] = []
        while self._waiting and self._table.free:
            active = self._waiting.popleft()
            if active.future.cancelled():
                continue
            ids = active.prompt + active.sampled
            ids_P = np.asarray(ids, np.int32)
            if admitted and self._table.should_wait(ids_P):
                later.append(active)
                continue
            placement = self._table.place(ids_P)
            active.slot = placement.slot
            self._active.append(active)
            if placement.donor is not None:
                self._cache.copy_prefix(placement.donor, placement.slot, placement.reused)
            if not active.marks or active.marks[-1][0] != self._version:
                active.marks.append((self._version, len(active.sampled)))
            self.stats.reused += placement.reused
            admitted.append((active, ids, placement.reused))
        self._waiting.extendleft(reversed(later))
        if admitted:
            started = time.perf_counter()
            for batch in prefill_batches([len(i) - r for _, i, r in admitted], self._prefill_tokens):
                self._prefill([admitted[i] for i in batch])
            self._active.sort(key=lambda a: a.slot)
            self.stats.prefill_s += time.perf_counter() - started

    def _prefill(self, batch: list[tuple[Active, list[int], int]]) -> None:
        """Compute the prompts' new tokens, aligned on the right: each row's last logits are in the last column."""
        longest = max(len(ids) - reused for _, ids, reused in batch)
        used = max(len(ids) for _, ids, _ in batch)
        input_BS = np.zeros((len(batch), longest), np.int64)
        position_BS = np.zeros((len(batch), longest), np.int64)
        column_BS = np.full((len(batch), longest), self._cache.scrap_column, np.int64)
        for row, (_, ids, reused) in enumerate(batch):
            new = len(ids) - reused
            input_BS[row, longest - new :] = ids[reused:]
            position_BS[row, longest - new :] = column_BS[row, longest - new :] = range(reused, len(ids))
        slots = np.array([a.slot for a, _, _ in batch])
        logits_BV = self._logits(input_BS, position_BS, column_BS, slots, used)
        for active, ids, reused in batch:
            self._table.computed(active.slot, len(ids))
            self.stats.prefilled += len(ids) - reused
        self.stats.prefill_passes += 1
        self._emit([a for a, _, _ in batch], logits_BV)

    def _decode(self) -> None:
        """One token for every active request."""
        if not self._active:
            return
        started = time.perf_counter()
        active = list(self._active)
        slots = np.array([a.slot for a in active])
        tokens = np.array([a.sampled[-1] for a in active])
        positions = np.array([len(a.prompt) + len(a.sampled) - 1 for a in active])
        self._table.ids_SL[slots, positions] = tokens
        used = int(positions.max()) + 1
        logits_BV = self._logits(tokens[:, None], positions[:, None], positions[:, None], slots, used)
        self._table.filled_S[slots] = positions + 1
        self.stats.decode_steps += 1
        self._emit(active, logits_BV)
        self.stats.decode_s += time.perf_counter() - started

    def _logits(self, input_BS: Any, position_BS: Any, column_BS: Any, slots_B: Any, used: int) -> Tensor:
        """Logits [B, V] at the last column. A query attends to its slot's columns up to its own position."""
        contiguous = int(slots_B[-1] - slots_B[0]) + 1 == len(slots_B) and bool((np.diff(slots_B) == 1).all())
        positions = self._tensor(position_BS)
        mask_B1SU = self._columns[:used] <= positions[:, None, :, None]
        cache = self._cache.at(
            self._tensor(slots_B),
            positions if column_BS is position_BS else self._tensor(column_BS),
            used,
            first=int(slots_B[0]) if contiguous else None,
        )
        return self._forward(self._tensor(input_BS), mask_B1SU, positions, cache)

    def _tensor(self, array: Any) -> Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)

    def _emit(self, active: list[Active], logits_BV: Tensor) -> None:
        """Sample one token for each, append it, and finish those that end with it."""
        requests = [a.request for a in active]
        tokens_B, logprobs_B = sample(
            logits_BV,
            [a.rng.random() for a in active],
            [r.temperature for r in requests],
            [r.top_p for r in requests],
            [r.top_k for r in requests],
        )
        outcomes: dict[int, tuple[Active, Generation | EngineError]] = {}
        for a, token, logprob in zip(active, tokens_B.tolist(), logprobs_B.tolist(), strict=True):
            a.sampled.append(token)
            a.logprobs.append(logprob)
            if not math.isfinite(logprob):
                error = EngineError(f"log-prob {logprob} at token {len(a.sampled)}: broken logits")
                outcomes[id(a)] = a, error
            elif (end := a.end(self._context)) is not None:
                outcomes[id(a)] = a, a.generation(*end)
        self.stats.sampled += len(active)
        if outcomes:
            self._active = [a for a in self._active if id(a) not in outcomes]
        for a, _ in outcomes.values():
            self._table.release(a.slot)
        for a, outcome in outcomes.values():
            _settle(a.future, outcome)

    def _fail_active(self, error: Exception) -> None:
        """Fail everything that was accepted: a request in a slot, or waiting for one."""
        for active in self._active:
            self._table.release(active.slot)
        self._table.forget()
        with self._changed:
            failed = [*self._active, *self._waiting, *self._inbox]
            self._active, self._inbox = [], []
            self._waiting.clear()
        for active in failed:
            _settle(active.future, error)

    def _end(self) -> None:
        with self._changed:
            self._closing = True
            updates, self._updates = self._updates, []
        self._fail_active(EngineUnavailable("the sampler is closed"))
        for update in updates:
            _settle(update.future, EngineUnavailable("the sampler is closed"))


def _settle(future: Future[Any], outcome: Any) -> None:
    """Give a future its result or exception, unless its owner has cancelled it in the meantime."""
    try:
        if isinstance(outcome, BaseException):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
    except InvalidStateError:
        pass
