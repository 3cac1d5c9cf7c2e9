"""In the job's own process: exec the command, or run it in this interpreter, which has its modules already."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import sys
import time
import types
from typing import Any, Dict, NoReturn  # noqa: UP035  (evaluated, and Python 3.9 must do it)

from . import late
from .cgroups import Cgroup
from .json_files import write_json
from .processes import SIGNALS
from .sandboxed import CHANNEL, FINAL, MOST_NAME_CHARS, NEVER

OOM_SCORE, OOM_MORE = "/proc/self/oom_score_adj", 100  # in thousandths of the machine's memory; see proc(5)

Job = Dict[str, Any]  # noqa: UP006  (one start message)


class Become(BaseException):
    """Raised in a forked child to leave all frames of the launcher before the harness starts."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.job = job


def start_job(job: Job, group: Cgroup, log_fd: int, error_fd: int) -> NoReturn:
    """Session, limits, output, folder; then exec, or Become to run in this interpreter. A failure goes to `error_fd`,
    which a sandboxed program finds as its descriptor CHANNEL.
    """
    try:
        os.setsid()
        group.make()
        group.join()
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (log_fd, 1), (log_fd, 2)):
            os.dup2(source, target)
        os.close(null)
        os.close(log_fd)
        before_its_reaper()
        os.umask(0o022)
        os.chdir(job["cwd"])
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        if job["entry"] is None:
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            if job["forward"]:
                os.dup2(error_fd, CHANNEL)
                os.set_inheritable(CHANNEL, True)
            found = program(job["argv"][0])
            os.execvpe(found, [found, *job["argv"][1:]], job["env"])  # noqa: S606
        os.close(error_fd)
    except OSError as error:
        where = f"{error.filename}: " if "cgroup" in str(error.filename) else ""
        text = f"cannot start {job['argv'][0][:MOST_NAME_CHARS]!r} in {job['cwd']}: {where}{error.strerror}"
        os.write(error_fd, (FINAL if error.errno in NEVER and not where else b"") + text.encode(errors="replace"))
        os._exit(127)
    raise Become(job)


def before_its_reaper() -> None:
    """Where memory runs out, the kernel ends a job before what watches it and would be missed."""
    with contextlib.suppress(OSError, ValueError):
        with open(OOM_SCORE, encoding="ascii") as file:
            score = int(file.read())
        with open(OOM_SCORE, "w", encoding="ascii") as file:
            file.write(str(min(1000, score + OOM_MORE)))


def program(name: str) -> str:
    """A bare name means the command installed beside this interpreter, if there is one, else the one on PATH."""
    beside = os.path.join(os.path.dirname(sys.executable), name)
    return beside if os.sep not in name and os.access(beside, os.X_OK) else name


def run_here(job: Job) -> NoReturn:
    """Run the command in this forked interpreter as `python` would have run it afresh, then end the process."""
    import atexit
    import threading

    argv, env = job["argv"], job["env"]
    become_fresh(argv, env)
    before = set(sys.modules)
    code: Any = 0
    try:
        sys.exit(call_entry(job["entry"], argv))
    except SystemExit as end:
        code = end.code
        if code is not None and not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    if job["learns"]:
        with contextlib.suppress(OSError):
            write_json(job["late"], late.report(before, job["dir"]))
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit((code or 0) & 0xFF)


def become_fresh(argv: list[str], env: dict[str, str]) -> None:
    """What interpreter start-up would have read from the environment and a fork keeps from its parent."""
    os.environ.clear()
    os.environ.update(env)
    sys.dont_write_bytecode = bool(env.get("PYTHONDONTWRITEBYTECODE"))
    sys.path[:0] = [p for p in env.get("PYTHONPATH", "").split(os.pathsep) if p and p not in sys.path]
    if env.get("PYTHONUNBUFFERED"):
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(write_through=True)  # type: ignore[union-attr]
    time.tzset()
    tempfile: Any = sys.modules.get("tempfile")
    if tempfile:
        tempfile.tempdir = None
    numpy_random: Any = sys.modules.get("numpy.random")
    if numpy_random:
        numpy_random.seed()
    sys.argv = list(argv)
    gc.enable()


def call_entry(entry: list[str], argv: list[str]) -> Any:
    kind, *where = entry
    if kind == "script":
        path = os.path.join(os.path.dirname(sys.executable), os.path.basename(argv[0]))
        main_module = types.ModuleType("__main__")
        main_module.__file__ = sys.argv[0] = path
        sys.modules["__main__"] = main_module
        target: Any = importlib.import_module(where[0])
        for name in where[1].split("."):
            target = getattr(target, name)
        return target()
    import runpy

    sys.argv = sys.argv[2:] if kind == "module" else sys.argv[1:]
    if kind == "module":
        sys.path.insert(0, os.getcwd())
        runpy.run_module(where[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(where[0])))
        runpy.run_path(where[0], run_name="__main__")
    return None
