"""Serve until told to stop; in a forked job, become that job."""

from __future__ import annotations

import json
import os
import sys

from .job import Become, run_here
from .launcher import Launcher


def main() -> None:
    os.umask(0o077)
    job = None
    try:
        launcher = Launcher(json.loads(sys.argv[1]))
        launcher.open()
        launcher.serve()
    except Become as become:
        job = become.job
    if job is not None:
        run_here(job)
