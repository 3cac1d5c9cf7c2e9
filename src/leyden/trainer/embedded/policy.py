"""The policy that is trained: a Hugging Face causal LM in float32, AdamW, and the optimizer steps of an update.

Life of an update: pi_old is the policy as it is when `update` begins. The batch is dealt into mini-batches of whole
rollouts; each is one optimizer step, its gradient summed over micro-batches. With a single mini-batch the policy
that is differentiated *is* pi_old, so its log-probs are taken from the same forward pass; with several, a first
pass over all samples records them. Dropout is off throughout, or pi and pi_old would differ by noise.

The sampler has its own copy of the weights (`make_sampler`), which changes only in `publish`: it never sees half
an update. `publish` must be finished before the next `update` begins.
"""

from __future__ import annotations

import copy
import inspect
import math
import os
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from leyden.algorithms.batch import Batch, WeightedSample, micro_batches, mini_batches, needs_forward
from leyden.algorithms.losses import token_logprobs
from leyden.algorithms.objective import Objective, objective
from leyden.algorithms.padding import PaddedSamples, pad
from leyden.config import AlgorithmConfig, EmbeddedConfig, ModelConfig, OptimizerConfig
from leyden.errors import ConfigError, TrainingError
from leyden.trainer.embedded import checkpoint, hub
from leyden.trainer.embedded.architecture import check_supported
from leyden.trainer.embedded.sampler import Sampler
from leyden.trainer.embedded.tally import Tally, UpdateMetrics
from leyden.types import Json

MicroBatch = list[WeightedSample]


class EmbeddedPolicy:
    """See the module's head. Not thread-safe: one call at a time.

    Raises ConfigError if the model folder cannot be loaded or its attention is not supported.
    """

    def __init__(
        self,
        model: ModelConfig,
        *,
        algorithm: AlgorithmConfig,
        optimizer: OptimizerConfig,
        embedded: EmbeddedConfig,
        mini_batches: int = 1,
        seed: int = 0,
    ) -> None:
        self._algorithm = algorithm
        self._optimizer_config = optimizer
        self._embedded = embedded
        self._context_tokens = model.context_tokens
        self._mini_batches = mini_batches
        self._rng = np.random.default_rng(seed)
        torch.set_num_threads(embedded.threads or default_threads())
        self.device = _device(embedded.device)
        self.model, self.tokenizer = hub.load(model.path)
        check_supported(self.model.config.to_dict(), model.context_tokens)
        self.model.to(self.device)
        self._reference = _frozen_copy(self.model) if algorithm.kl_coef > 0 else None
        self._optimizer = make_optimizer(self.model, optimizer)
        self.optimizer_steps = 0

    def update(self, batch: Batch, sampling_temperature: float) -> UpdateMetrics:
        """One training step on a batch. A mini-batch without any gradient makes no optimizer step and is counted.

        Raises TrainingError, naming the optimizer step, if a loss or a gradient norm is not finite; that optimizer
        step then changes nothing, while mini-batches before it in this update have been applied: go back to a
        checkpoint.
        """
        work = [self._micro_batches(mini) for mini in mini_batches(batch, self._mini_batches, self._rng)]
        tally = Tally()
        old = self._old_logprobs(work, sampling_temperature) if len(work) > 1 else None
        for number, micros in enumerate(work):
            if not micros:
                tally.steps_skipped += 1
                continue
            self._optimizer.zero_grad(set_to_none=True)
            loss = 0.0
            for index, micro in enumerate(micros):
                result = self._backward(micro, sampling_temperature, old[number][index] if old else None)
                self._require_finite("loss", value := float(result.loss.detach()), micro)
                loss += value
                tally.add(result, len(micro))
            tally.step(loss, self._optimizer_step(micros))
        return tally.metrics(lr=self._optimizer.param_groups[0]["lr"], samples=len(batch.samples))

    def make_sampler(self, *, version: int = 0, lineage: str = "", seed: int = 0) -> Sampler:
        """A sampler with a copy of the current weights. Not started."""
        return Sampler(
            _frozen_copy(self.model),
            slots=self._embedded.slots,
            context_tokens=self._context_tokens,
            decode=self.decode,
            version=version,
            lineage=lineage,
            seed=seed,
        )

    def publish(self, sampler: Sampler, version: int, lineage: str | None = None) -> Future[None]:
        """Copy the current weights into the sampler, between two tokens; done when the future is."""
        return sampler.update_weights(lambda: copy_weights(self.model, sampler.model), version, lineage)

    def decode(self, ids: list[int]) -> str:
        """The text of ids as it stands, special tokens included."""
        text: str = self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def save(self, root: Path, name: str, state: Json, *, keep: int, also: int | None = None) -> Path:
        """Write checkpoint `root/name` with the caller's `state`; keep the newest `keep` and that of step `also`."""
        return checkpoint.save(
            root,
            name,
            checkpoint.Parts(self.model, self.tokenizer, self._optimizer, self._rng),
            policy_state={"optimizer_steps": self.optimizer_steps},
            state=state,
            keep=keep,
            also=also,
        )

    def load(self, path: Path) -> Json:
        """Go on from a checkpoint exactly where it was written; returns the caller's `state`.

        The KL's reference stays the initial model.
        """
        policy_state, state = checkpoint.load(
            path, checkpoint.Parts(self.model, self.tokenizer, self._optimizer, self._rng)
        )
        self.optimizer_steps = int(policy_state["optimizer_steps"])
        return state

    def _micro_batches(self, mini: Sequence[WeightedSample]) -> list[MicroBatch]:
        kept = [s for s in mini if needs_forward(s, self._algorithm)]
        return micro_batches(kept, self._embedded.micro_batch_tokens)

    @torch.no_grad()
    def _old_logprobs(self, work: Sequence[Sequence[MicroBatch]], temperature: float) -> list[list[Tensor]]:
        """log-probs [T] of every micro-batch under the policy as it is now."""

        def of(micro: MicroBatch) -> Tensor:
            return trained_logprobs(self.model, pad(micro, device=self.device), temperature)[0]

        return [[of(micro) for micro in micros] for micros in work]

    def _backward(self, micro: MicroBatch, temperature: float, old_T: Tensor | None) -> Objective:
        padded = pad(micro, device=self.device)
        logprobs_T, entropy_T = trained_logprobs(
            self.model, padded, temperature, entropy_gradient=self._algorithm.entropy_coef > 0
        )
        reference_T = None
        if self._reference is not None:
            with torch.no_grad():
                reference_T = trained_logprobs(self._reference, padded, temperature)[0]
        result = objective(
            logprobs_T,
            entropy_T,
            old_T=logprobs_T.detach() if old_T is None else old_T,
            rollout_T=padded.logprobs_T,
            advantage_T=padded.advantage_T,
            weight_T=padded.weight_T,
            reference_T=reference_T,
            config=self._algorithm,
        )
        result.loss.backward()  # type: ignore[no-untyped-call]
        return result

    def _optimizer_step(self, micros: Sequence[MicroBatch]) -> float:
        """Clip, check and apply the gradient; returns its norm before clipping."""
        norm = float(nn.utils.clip_grad_norm_(self.model.parameters(), self._optimizer_config.max_grad_norm))
        self._require_finite("gradient norm", norm, [s for micro in micros for s in micro])
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate(self._optimizer_config, self.optimizer_steps)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.optimizer_steps += 1
        return norm

    def _require_finite(self, what: str, value: float, samples: Sequence[WeightedSample]) -> None:
        if math.isfinite(value):
            return
        self._optimizer.zero_grad(set_to_none=True)
        rollouts = sorted({s.sample.rollout_id for s in samples})
        raise TrainingError(
            f"optimizer step {self.optimizer_steps + 1}: the {what} is {value}; the step was not applied. Rollouts: "
            f"{', '.join(rollouts[:5])}{' ...' if len(rollouts) > 5 else ''}. A lower optimizer.lr may help"
        )


def trained_logprobs(
    model: Any, padded: PaddedSamples, temperature: float, *, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """(logprobs_T, entropy_T) of softmax(logits / temperature) at the trained tokens, log-probs with gradient.

    The model sees every token of a sample, context included. Rows are padded on the right, where a causal model
    does not look, so there is no mask. Logits are made only at columns where some row has a trained token.
    """
    index_T, keep = padded.column_T - 1, {}
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        keep["logits_to_keep"], index_T = torch.unique(index_T, return_inverse=True)
    logits_BKV = model(input_ids=padded.ids_BL, use_cache=False, **keep).logits
    logits_TV = logits_BKV[padded.row_T, index_T]
    return token_logprobs(logits_TV, padded.targets_T, temperature, entropy_gradient=entropy_gradient)


def default_threads() -> int:
    """All cores but one, which is left to the harnesses: on a core that is shared, PyTorch's threads wait for each
    other by spinning, and a decode step that takes 5 ms on one thread was seen to take 80 ms on two.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores - 1)


def make_optimizer(model: Any, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101) with decoupled decay on matrices only.

    Parameters of one dimension (norms, biases) are not decayed; embeddings are matrices and are, as in
    nanoGPT and Megatron-LM.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps)


def learning_rate(config: OptimizerConfig, steps_done: int) -> float:
    """Linear warm-up over `warmup_steps` optimizer steps, then constant. Warm-up 4: 1/4, 2/4, 3/4, 1, 1, ... of lr."""
    return config.lr * min(1.0, (steps_done + 1) / max(1, config.warmup_steps))


@torch.no_grad()
def copy_weights(source: Any, target: Any) -> None:
    """Copy parameters and buffers in place, so that the target's own references to them stay valid."""
    torch._foreach_copy_(list(target.parameters()), list(source.parameters()))
    for mine, theirs in zip(target.buffers(), source.buffers(), strict=True):
        mine.copy_(theirs)


def _frozen_copy(model: Any) -> Any:
    """The same model with parameters of its own and without gradients."""
    return copy.deepcopy(model).eval().requires_grad_(False)


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError("embedded.device", f"{name!r} cannot be used here: {error}") from error
    return device
