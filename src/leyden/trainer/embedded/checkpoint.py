"""Checkpoints: a Hugging Face model folder (weights as safetensors, tokenizer) plus what a resume needs.

    step-000010/
      config.json model.safetensors tokenizer.json ...   loads with `from_pretrained`
      optimizer.pt                                       tensors, read with weights_only
      rng.json                                           Python, numpy, torch and the mini-batch generator
      state.json                                         the policy's counters, and the caller's dict

A checkpoint is written to a temporary sibling, synced, and renamed: a folder of its final name is complete.
"""

from __future__ import annotations

import os
import pickle
import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import torch
from safetensors import SafetensorError

from leyden.errors import TrainingError
from leyden.trainer.embedded.hub import load_model, quiet
from leyden.trainer.folder import CHECKPOINT, checkpoint_step, checkpoints
from leyden.types import Json

FORMAT = 1
TEMPORARY = ".tmp-"


@dataclass(frozen=True, slots=True)
class Parts:
    """What a checkpoint holds besides the two dicts. `rng` deals rollouts into mini-batches."""

    model: Any
    tokenizer: Any
    optimizer: torch.optim.Optimizer
    rng: np.random.Generator


def save(
    root: Path, name: str, parts: Parts, *, policy_state: Json, state: Json, keep: int, also: int | None = None
) -> Path:
    """Write `root/name` (as `step-N`) atomically, replace one of that name, and remove all but the newest `keep`
    and that of step `also`.

    Raises TrainingError if it cannot be written, as on a full disk; the earlier checkpoints are as they were then.
    """
    if not CHECKPOINT.fullmatch(name):
        raise TrainingError(f"checkpoint name {name!r} is not of the form step-N, such as step-000010")
    temporary = root / f"{TEMPORARY}{name}"
    try:
        _write(temporary, parts, policy_state, state)
    except (OSError, RuntimeError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise TrainingError(f"checkpoint {root / name} cannot be written: {error}; the same command resumes") from error
    final = root / name
    if final.exists():
        final.rename(root / f"{TEMPORARY}old-{name}")
    temporary.rename(final)
    _sync(root)
    _remove_leftovers(root)
    for path in checkpoints(root)[:-keep]:
        if checkpoint_step(path) != also:
            shutil.rmtree(path)
    return final


def _write(folder: Path, parts: Parts, policy_state: Json, state: Json) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(folder.parent)
    folder.mkdir()
    with quiet():
        parts.model.save_pretrained(folder)
    parts.tokenizer.save_pretrained(folder)
    torch.save(parts.optimizer.state_dict(), folder / "optimizer.pt")
    (folder / "rng.json").write_bytes(orjson.dumps(_rng_state(parts.rng), option=orjson.OPT_SERIALIZE_NUMPY))
    (folder / "state.json").write_bytes(
        orjson.dumps({"format": FORMAT, "policy": policy_state, "state": state}, option=orjson.OPT_INDENT_2)
    )
    for path in (*folder.rglob("*"), folder):
        _sync(path)


def load(path: Path, parts: Parts) -> tuple[Json, Json]:
    """Put model, optimizer and all random generators back; returns (policy state, caller's state).

    Raises TrainingError for a folder that is not a checkpoint of this format, or of another model.
    """
    saved = _read_state(path)
    _load_weights(path, parts.model)
    device = next(parts.model.parameters()).device
    try:
        parts.optimizer.load_state_dict(torch.load(path / "optimizer.pt", map_location=device, weights_only=True))
        _restore_rng(orjson.loads((path / "rng.json").read_bytes()), parts.rng)
    except (OSError, ValueError, KeyError, RuntimeError, pickle.UnpicklingError) as error:
        raise TrainingError(f"checkpoint {path} is damaged: {error}") from error
    return saved["policy"], saved["state"]


def _remove_leftovers(root: Path) -> None:
    for path in root.glob(f"{TEMPORARY}*"):
        shutil.rmtree(path)


def _read_state(path: Path) -> Json:
    try:
        saved = orjson.loads((path / "state.json").read_bytes())
    except (OSError, ValueError) as error:
        raise TrainingError(f"{path} is not a checkpoint: {error}") from error
    if not isinstance(saved, dict) or saved.get("format") != FORMAT:
        raise TrainingError(f"{path}/state.json is not of checkpoint format {FORMAT}; start a new run_dir")
    return saved


@torch.no_grad()
def _load_weights(path: Path, model: Any) -> None:
    try:
        source = dict(load_model(str(path)).named_parameters())
        target = dict(model.named_parameters())
        if source.keys() != target.keys() or any(source[n].shape != p.shape for n, p in target.items()):
            raise TrainingError(f"checkpoint {path} is of another model than model.path of the run file")
    except (OSError, ValueError) as error:
        raise TrainingError(f"checkpoint {path} is damaged: {error}") from error
    for name, parameter in target.items():
        parameter.copy_(source[name])


def _rng_state(rng: np.random.Generator) -> Json:
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    version, internal, gauss_next = random.getstate()
    return {
        "python": [version, list(internal), gauss_next],
        "numpy": [kind, np.asarray(keys).tolist(), position, has_gauss, gauss],
        "torch": torch.get_rng_state().tolist(),
        "cuda": [state.tolist() for state in torch.cuda.get_rng_state_all()],
        "mini_batches": _with_text_integers(rng.bit_generator.state),
    }


def _restore_rng(saved: Json, rng: np.random.Generator) -> None:
    version, internal, gauss_next = saved["python"]
    random.setstate((version, tuple(internal), gauss_next))
    kind, keys, position, has_gauss, gauss = saved["numpy"]
    np.random.set_state((kind, np.array(keys, np.uint32), position, has_gauss, gauss))
    torch.set_rng_state(torch.tensor(saved["torch"], dtype=torch.uint8))
    if len(saved["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([torch.tensor(s, dtype=torch.uint8) for s in saved["cuda"]])
    rng.bit_generator.state = _with_integers(saved["mini_batches"])


def _with_text_integers(value: Any) -> Any:
    """PCG64's state is two integers of 128 bits, which JSON cannot hold as numbers."""
    if isinstance(value, dict):
        return {k: _with_text_integers(v) for k, v in value.items()}
    return f"int:{value}" if isinstance(value, int) else value


def _with_integers(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _with_integers(v) for k, v in value.items()}
    return int(value.removeprefix("int:")) if isinstance(value, str) and value.startswith("int:") else value


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
