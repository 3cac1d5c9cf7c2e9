"""The files of a model: a folder, or a repository of the Hugging Face hub, which is asked once and not again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from leyden.errors import ConfigError

HUB_WAIT_S = 10.0


def locate(model_path: str, name: str) -> Path:
    """The file `name` of a model, fetched from the hub if need be. Raises ConfigError if there is none.

    A path that can only be a folder (see `run_file`) has been made absolute; what is left is a hub id.
    """
    folder = Path(model_path)
    if folder.is_dir():
        if not (folder / name).is_file():
            raise ConfigError("model.path", f"{model_path!r} has no {name}; give a Hugging Face model folder")
        return folder / name
    if folder.is_absolute():
        found = "is a file, not a folder" if folder.exists() else "there is no such folder"
        raise ConfigError("model.path", f"{model_path!r}: {found}; give a Hugging Face model folder or a hub id")
    return _from_hub(model_path, name)


def architecture(model_path: str) -> dict[str, Any]:
    """The model's config.json. Raises ConfigError."""
    path = locate(model_path, "config.json")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError("model.path", f"{path} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError("model.path", f"{path} holds {type(found).__name__}, not an object")
    return found


def _from_hub(model_id: str, name: str) -> Path:
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url, try_to_load_from_cache

    try:
        cached = try_to_load_from_cache(model_id, name)
        if isinstance(cached, str):
            return Path(cached)
        get_hf_file_metadata(hf_hub_url(model_id, name), timeout=HUB_WAIT_S)  # the download alone would retry for long
        return Path(hf_hub_download(model_id, name))
    except Exception as error:  # the hub's client raises its own, httpx's and OSError
        why = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ConfigError(
            "model.path",
            f"{model_id!r}: no such folder beside the run file, so taken as a hub id; its {name} cannot be had: {why}",
        ) from None
