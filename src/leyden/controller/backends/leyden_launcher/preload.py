"""Modules that forks find imported: those of `preload`, then what the first forked job needed besides (`late`)."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import sys
import time
from collections.abc import Callable

from .huge_pages import use_huge_pages
from .job import Job
from .json_files import log, read_json, write_json
from .late import take_in
from .processes import fork, threads

PROBE_LIMIT_S = 60.0


class Preload:
    def __init__(self, names: list[str], state: str) -> None:
        self.names = names
        self.late_path = os.path.join(state, "late.json")
        self.safe_path = os.path.join(state, "safe.json")
        self.scripts: dict[str, tuple[str, str]] = {}
        self.can_fork = True
        self.learn = "wanted" if names else "off"
        self.probe: int | None = None
        self.probe_until = 0.0

    def load(self) -> str | None:
        """Import `names`; what is wrong with them, or None."""
        for name in self.names:
            try:
                importlib.import_module(name)
            except BaseException as error:
                return f"harness.preload: {name} cannot be imported: {type(error).__name__}: {error}"
        if self.names:
            self.scripts = console_scripts()
        alive = threads()
        if alive:
            return (
                f"harness.preload: {alive} alive after importing {self.names}; a process with threads cannot "
                "be forked safely. Leave out the module that starts them, or stop it through harness.env "
                "(for example OPENBLAS_NUM_THREADS: '1')"
            )
        return None

    def prepare(self, job: Job) -> None:
        """Say in the job how it is run, and whether it reports what it did late."""
        job["entry"] = self.entry(job)
        job["learns"] = bool(job["entry"]) and job.get("learn", True) and self.learn == "wanted"
        if job["learns"]:
            self.learn = "running"
            job["late"] = self.late_path

    def entry(self, job: Job) -> list[str] | None:
        """How a forked interpreter runs the command: a (module, attribute), a file, a module; None to exec it."""
        argv = job["argv"]
        if not job["fork"] or not self.can_fork:
            return None
        name = os.path.basename(argv[0])
        if name in self.scripts and os.path.dirname(argv[0]) in ("", os.path.dirname(sys.executable)):
            return ["script", *self.scripts[name]]
        if argv[0] in (sys.executable, "python", "python3") and len(argv) > 1:
            if argv[1] == "-m" and len(argv) > 2:
                return ["module", argv[2]]
            if not argv[1].startswith("-"):
                return ["file", argv[1]]
        return None

    def start_probe(self, leave: Callable[[], None]) -> None:
        """The job that learns has ended. `leave` closes in the probe what belongs to the launcher."""
        found = read_json(self.late_path)
        if found is None:
            self.learn = "wanted"
            return
        try:
            pid = fork()
        except OSError:
            self.learn = "wanted"
            return
        if pid == 0:
            with contextlib.suppress(BaseException):
                leave()
                os.setsid()
                write_json(self.safe_path, take_in(found))
            os._exit(0)
        self.learn = "probing"
        self.probe = pid
        self.probe_until = time.monotonic() + PROBE_LIMIT_S

    def end_slow_probe(self) -> None:
        if self.probe and time.monotonic() > self.probe_until:
            os.kill(self.probe, signal.SIGKILL)

    def take_probe(self) -> None:
        """Do what the probe found harmless. If a thread is alive all the same, nothing is forked any more."""
        self.probe = None
        self.learn = "off"
        done = take_in(read_json(self.safe_path))
        alive = threads()
        if alive:
            self.can_fork = False
            log(f"late imports left {alive} alive; jobs are started without preloading from now on")
        freeze()
        log(f"imported {len(done['imports'])} modules and built {len(done['models'])} models as the first job did late")


def console_scripts() -> dict[str, tuple[str, str]]:
    """name -> (module, attribute) of this interpreter's installed commands."""
    from importlib.metadata import distributions

    entries = [e for d in distributions() for e in d.entry_points if e.group == "console_scripts"]
    split = {e.name: e.value.split("[")[0].strip().partition(":") for e in entries}
    return {name: (module.strip(), attribute.strip()) for name, (module, _, attribute) in split.items()}


def freeze() -> None:
    """Keep the collector away from what is shared with forks, so that their pages stay shared; make forks cheap."""
    gc.collect()
    gc.freeze()
    use_huge_pages()
