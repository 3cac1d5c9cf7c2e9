"""What can be known to be wrong with a run before anything starts.

`leyden train`, `leyden train --dry-run`, `leyden eval` and `leyden doctor` look at the same things and say what they
find in the same words. Each check raises ConfigError or LaunchError; none takes longer than a second or two, writes
what it does not remove, or starts a program of the user's.
"""

from __future__ import annotations

import importlib.machinery
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from leyden.config import EngineConfig, KubernetesConfig, RunConfig
from leyden.controller.backends.local import check_passed, interpreter, sandbox_view
from leyden.controller.backends.local_jobs import local_jobs
from leyden.doctor.manifests import ROLLOUT, URL, claim_of, render_manifests
from leyden.errors import ConfigError
from leyden.model_files import architecture
from leyden.trainer.embedded.architecture import GIB, arithmetic, check_supported, needs
from leyden.trainer.run_json import check_same_run
from leyden.trainer.tasks import Data, read_data
from leyden.types import Json


def before_training(config: RunConfig, secret: bytes | None, parent: Mapping[str, str]) -> Data:
    """All that `leyden train` refuses, in the order in which it would meet it. Returns the tasks."""
    check_trainable(config.engine)
    data = before_rollouts(config, secret, parent)
    check_same_run(config, data)
    check_backend(config)
    return data


def before_rollouts(config: RunConfig, secret: bytes | None, parent: Mapping[str, str]) -> Data:
    """What training and evaluation have in common."""
    check_folder(config.run_dir)
    data = read_data(config.data)
    if config.controller.start:  # else harnesses run where that controller does, with its files and programs
        check_launch(config, data.train.tasks[0], parent)
    if config.gateway.url is None:
        from leyden.gateway.engines import engine_key
        from leyden.gateway.serving import check_address, check_port

        check_address(config.gateway.host, secret)
        check_port(config.gateway, config.run_dir)
        engine_key(config.engine.api_key_env, parent)
        if config.engine.render == "gateway":
            from leyden.gateway.render import load_renderer

            load_renderer(config.model)
    return data


def check_trainable(engine: EngineConfig) -> None:
    """Raises ConfigError for engines that the trainer cannot update."""
    if engine.urls or engine.kind != "leyden":
        raise ConfigError(
            "engine",
            "the embedded trainer updates no engine but its own: leave engine.urls and engine.kind out to train; "
            "`leyden gateway` and `leyden eval` take them",
        )


def check_backend(config: RunConfig) -> str:
    """Whether the embedded backend runs this model and has the memory for it: the arithmetic in words."""
    model = architecture(config.model.path)
    check_supported(model, config.model.context_tokens)
    sizes = config.embedded, config.model.context_tokens
    parts = needs(model, *sizes, reference=config.algorithm.kl_coef > 0)
    sum_, here = arithmetic(parts, *sizes), memory(config.embedded.device)
    if here is not None and sum(parts.values()) > here:
        raise ConfigError(
            "embedded",
            f"{config.model.path} does not fit into the {here / GIB:.1f} GiB of {_device(config.embedded.device)}: "
            f"{sum_}; lower embedded.slots, model.context_tokens or embedded.micro_batch_tokens",
        )
    return sum_


def memory(device: str) -> int | None:
    """The bytes of memory that a device has; None for one that cannot be asked without loading its driver."""
    if _device(device) != "this machine":
        return None
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            limits.append(int(Path(path).read_text(encoding="ascii")))
        except (OSError, ValueError):
            continue
    return min(limits)


def _device(device: str) -> str:
    has_gpu = Path("/dev/nvidiactl").exists() or Path("/dev/kfd").exists()
    return "this machine" if device == "cpu" or (device == "auto" and not has_gpu) else device


def check_folder(run_dir: Path) -> None:
    """Whether the run folder can be made and written. What is made for the trial is removed again."""
    missing = [path for path in (run_dir, *run_dir.parents) if not path.exists()]
    made: list[Path] = []
    try:
        for path in reversed(missing):
            path.mkdir(mode=0o700)
            made.append(path)
        with tempfile.TemporaryDirectory(dir=run_dir, prefix="doctor-"):
            pass
    except OSError as error:
        raise ConfigError(
            "run_dir", f"{run_dir} cannot be made and written: {error.filename}: {error.strerror}"
        ) from None
    finally:
        for path in reversed(made):
            path.rmdir()


def check_launch(config: RunConfig, task: Json, parent: Mapping[str, str]) -> None:
    """Command, environment and files of the first task's attempt. Raises LaunchError, ConfigError."""
    if config.controller.backend == "kubernetes":
        render_manifests(config, task)
        return
    python = interpreter(config.harness)
    check_passed(config.harness, config.grader, parent)
    jobs, rollout = local_jobs(config, URL, parent), claim_of(ROLLOUT, task).rollout
    job = jobs.harness(rollout, "key")
    check_program("harness.command", job.argv[0], job.env, python)
    sandbox_view(config, python, config.gateway.url or URL)
    if config.grader.command:
        graded = jobs.grader(rollout, "key", 1)
        check_program("grader.command", graded.argv[0], graded.env, python)
    if config.grader.function:
        check_function(config.grader.function, config.config_dir)


def check_program(key: str, name: str, env: Mapping[str, str], python: str) -> None:
    """Whether the program of a command exists, where the launcher will look for it. A relative path is one in the
    workspace, which is not there yet.
    """
    if Path(name).is_absolute():
        if not os.access(name, os.X_OK) or Path(name).is_dir():
            raise ConfigError(key, f"{name!r} is no program that can be run here")
        return
    beside = os.fspath(Path(python).parent)
    places = os.pathsep.join((beside, env.get("PATH", os.defpath)))
    if os.sep not in name and shutil.which(name, path=places) is None:
        raise ConfigError(key, f"there is no program {name!r} in {beside} or on PATH; install it, or give its path")


def check_function(function: str, folder: Path) -> None:
    """Whether the module of `grader.function` is beside the run file or installed. It is not imported."""
    module = function.partition(":")[0]
    if importlib.machinery.PathFinder.find_spec(module.partition(".")[0], [str(folder), *sys.path]) is None:
        raise ConfigError("grader.function", f"there is no module {module!r} in {folder}, nor is one installed")


def unheeded(config: RunConfig) -> list[str]:
    """Settings that this run does not look at, a line each."""
    given = config.kubernetes.model_fields_set & set(KubernetesConfig.model_fields)
    if config.controller.backend == "kubernetes" or not given:
        return []
    names = ", ".join(f"kubernetes.{name}" for name in sorted(given))
    return [f"{names}: not looked at, because controller.backend is {config.controller.backend}"]
