"""Run real harnesses through the gateway: `python -m tests.harnesses [--smoke] [--run plain] [NAME ...]`.

Without names: all launchers and their variants plainly, then all launchers with faults between gateway and engine, then
all launchers with a pause in the middle. Prints a table, writes build/harnesses.json, keeps what each harness printed
in build/harnesses. Ends with 1 if anything differs from what is expected in cases.py.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from leyden.gateway.render import ModelRenderer
from tests.harnesses import engine, report
from tests.harnesses.cases import LAUNCHERS, SMOKE, VARIANTS, Case
from tests.harnesses.install import PACKAGES, install, installed
from tests.harnesses.loopback import leave_network
from tests.harnesses.run import Mode, Outcome, Setup, make_repository, run
from tests.qwen_tokenizers import qwen_tokenizer_folder

BUILD = Path(__file__).parents[2] / "build"
AT_ONCE = 8
KEPT_VARIABLES = ("HOME", "LANG", "PATH")
Job = tuple[Case, Mode]


def main() -> None:
    options = arguments()
    jobs = chosen(options)
    missing = install(sorted({case.package for case, _ in jobs}))
    skipped = {case.name: missing[case.package] for case, _ in jobs if case.package in missing}
    jobs = [(case, mode) for case, mode in jobs if case.name not in skipped]
    if not leave_network():
        print("the kernel gives no network of its own: harnesses may try to reach the internet")
    model = qwen_tokenizer_folder("qwen3")
    scratch = Path(tempfile.mkdtemp(prefix="leyden-harnesses-"))
    try:
        clean_environment(scratch)
        make_repository(scratch / "repository")
        renderer = ModelRenderer(str(model), "qwen3", "template")
        setup = Setup(model, engine.load(model), renderer, scratch, BUILD / "harnesses", options.pause_s)
        outcomes = asyncio.run(run_all(jobs, setup))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    ended = [(case, outcome) for (case, _), outcome in zip(jobs, outcomes, strict=True)]
    report.write(BUILD / "harnesses.json", ended, {name: why.reason for name, why in skipped.items()})
    Console(width=240 if not sys.stdout.isatty() else None).print(report.table(ended))
    for name, why in skipped.items():
        print(f"skipped: {name}: {why.reason}")
    failed = any(why.failed for why in skipped.values())
    sys.exit(failed or any(report.problems(case, outcome) for case, outcome in ended))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.harnesses", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="launchers or variants; all if none is given")
    parser.add_argument("--run", action="append", choices=["plain", "faults", "pause"], help="all three if absent")
    parser.add_argument("--pause-s", type=float, default=60.0, help="length of the pause, seconds")
    parser.add_argument("--smoke", action="store_true", help=f"{', '.join(SMOKE)} plainly, and mini with faults")
    return parser.parse_args()


def chosen(options: argparse.Namespace) -> list[Job]:
    """Variants run plainly only, unless they are named."""
    known = {case.name: case for case in (*LAUNCHERS, *VARIANTS)}
    if options.smoke:
        return [*((known[name], "plain") for name in SMOKE), (known[SMOKE[0]], "faults")]
    if unknown := [name for name in options.names if name not in known]:
        sys.exit(f"no harness is called {', '.join(unknown)}; known are {', '.join(known)}")
    cases = [known[name] for name in options.names] or list(known.values())
    modes: Sequence[Mode] = options.run or ("plain", "faults", "pause")
    return [(c, mode) for mode in modes for c in cases if mode == "plain" or options.names or c in LAUNCHERS]


def clean_environment(scratch: Path) -> None:
    """Harnesses inherit no setting of whoever runs this; their commands are found, and temporary files go away."""
    commands = [str(installed() / name / "node_modules" / ".bin") for name in PACKAGES]
    kept = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
    os.environ.clear()
    os.environ.update(kept)
    os.environ["PATH"] = os.pathsep.join([*commands, kept["PATH"], str(installed() / "smolagents" / "bin")])
    os.environ["NODE_PATH"] = str(installed() / "aisdk" / "node_modules")
    os.environ["TMPDIR"] = os.environ["TMUX_TMPDIR"] = str(scratch)


async def run_all(jobs: Sequence[Job], setup: Setup) -> list[Outcome]:
    """As many at once as there are CPUs, to a point. A line for each that ends. SIGTERM ends all harnesses first."""
    me = asyncio.current_task()
    assert me is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, me.cancel)
    slots = asyncio.Semaphore(min(os.cpu_count() or 1, AT_ONCE))

    async def one(case: Case, mode: Mode) -> Outcome:
        try:
            outcome = await run(case, setup, mode, slots)
        except Exception as error:
            outcome = Outcome.broken(case.name, mode, f"{type(error).__name__}: {error}")
        verdict = "; ".join(report.problems(case, outcome)) or "ok"
        print(f"{outcome.seconds:6.1f} s  {case.name} ({mode}): {verdict}", flush=True)
        return outcome

    return list(await asyncio.gather(*(one(case, mode) for case, mode in jobs)))


if __name__ == "__main__":
    logging.basicConfig(level=logging.ERROR)
    main()
