"""Samples of one micro-batch as tensors: padded ids for the forward pass, flat vectors for the loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from leyden.algorithms.batch import WeightedSample


@dataclass(frozen=True, slots=True, eq=False)
class PaddedSamples:
    """`ids_BL` is padded on the right, which a causal model never sees from the left: no attention mask is needed.

    The others run over the T trained tokens of all samples, row by row: token t stands at `ids_BL[row_T,
    column_T]` and is predicted by the logits one column earlier. `logprobs_T` is NaN where none was recorded.
    """

    ids_BL: Tensor
    row_T: Tensor
    column_T: Tensor
    targets_T: Tensor
    logprobs_T: Tensor
    advantage_T: Tensor
    weight_T: Tensor


def pad(samples: Sequence[WeightedSample], *, device: torch.device | str = "cpu") -> PaddedSamples:
    """Pad with id 0 and flatten. Advantage and weight of a sample go to its trained tokens and nowhere else.

    Worked example: ids [5, 6, 7] with mask [F, F, T], advantage 0.7, and ids [5, 8] with mask [F, T], advantage -1:

        ids_BL     [[5, 6, 7], [5, 8, 0]]
        row_T      [0, 1]     column_T     [2, 1]      targets_T [7, 8]
        advantage_T [0.7, -1]
    """
    longest = max(len(s.sample.ids_L) for s in samples)
    ids_BL = np.zeros((len(samples), longest), dtype=np.int64)
    mask_BL = np.zeros((len(samples), longest), dtype=np.bool_)
    logprobs_BL = np.zeros((len(samples), longest), dtype=np.float32)
    for row, weighted in enumerate(samples):
        length = len(weighted.sample.ids_L)
        ids_BL[row, :length] = weighted.sample.ids_L
        mask_BL[row, :length] = weighted.sample.mask_L
        logprobs_BL[row, :length] = weighted.sample.logprobs_L
    row_T, column_T = np.nonzero(mask_BL)
    advantage_B = np.array([s.advantage for s in samples])
    weight_B = np.array([s.weight for s in samples])
    return PaddedSamples(
        ids_BL=torch.from_numpy(ids_BL).to(device),
        row_T=torch.from_numpy(row_T).to(device),
        column_T=torch.from_numpy(column_T).to(device),
        targets_T=torch.from_numpy(ids_BL[mask_BL]).to(device),
        logprobs_T=torch.from_numpy(logprobs_BL[mask_BL]).to(device),
        advantage_T=torch.from_numpy(advantage_B[row_T]).to(device),
        weight_T=torch.from_numpy(weight_B[row_T]).to(device),
    )
