"""What the user sees of a run: one live line while rollouts run, one line that stays per step, warnings.

Whatever it is given is one line and shown as it is: neither markup nor escape sequences have an effect.
Without a terminal the live line becomes a plain line at most every `PLAIN_EVERY_S` seconds.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from rich.console import Console
from rich.live import Live
from rich.text import Text

from leyden.trainer.collect import Progress
from leyden.trainer.outcomes import failures
from leyden.types import Json
from leyden.visible import visible

PLAIN_EVERY_S = 30.0
BAR_CELLS = 20


class Display:
    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(soft_wrap=True, highlight=False)
        self._live: Live | None = None
        self._last_plain = time.monotonic()

    def live(self, text: str) -> None:
        """Replace the live line."""
        if not self._console.is_terminal:
            if time.monotonic() - self._last_plain >= PLAIN_EVERY_S:
                self._last_plain = time.monotonic()
                self._console.print(Text(visible(text)))
            return
        if self._live is None:
            self._live = Live(console=self._console, transient=True, auto_refresh=False)
            self._live.start()
        self._live.update(Text(visible(text), overflow="ellipsis", no_wrap=True), refresh=True)

    def line(self, text: str, style: str = "") -> None:
        """A line that stays."""
        self.clear()
        self._last_plain = time.monotonic()
        self._console.print(Text(visible(text), style))

    def warn(self, text: str) -> None:
        self.line(f"warning: {text}", "yellow")

    def clear(self) -> None:
        """Remove the live line, if there is one."""
        if self._live is not None:
            self._live.stop()
            self._live = None


def progress_line(label: str, progress: Progress) -> str:
    """`step 3/60  [#####.....]  12/64 rollouts, reward 0.250, 8 s, about 35 s left`."""
    filled = BAR_CELLS * progress.done // progress.total if progress.total else BAR_CELLS
    parts = [f"{progress.done}/{progress.total} rollouts"]
    if progress.mean_reward is not None:
        parts.append(f"reward {progress.mean_reward:.3f}")
    parts.append(f"{progress.elapsed_s:.0f} s")
    if progress.eta_s is not None and progress.done < progress.total:
        parts.append(f"about {progress.eta_s:.0f} s left")
    return f"{label}  [{'#' * filled}{'.' * (BAR_CELLS - filled)}]  {', '.join(parts)}"


def step_line(line: Json, steps: int) -> str:
    """The line of a finished step, from its line in metrics.jsonl."""
    parts = [f"step {line['step']}/{steps}"]
    if line["event"] == "skip":
        parts.append(f"skipped: {line['why']}")
    if line.get("reward") is not None:
        parts.append(f"reward {line['reward']:.3f}, pass {line['pass_rate']:.2f}")
    if line.get("groups"):
        parts.append(f"groups without spread {line['groups_without_spread']}/{line['groups']}")
    if failed := failures(line.get("outcomes") or {}, without=line.get("excluded") or {}):
        parts.append(f"ended {named(failed)}")
    if line.get("excluded"):
        parts.append(f"left out {named(line['excluded'])}")
    if line.get("trained_rollouts"):
        parts.append(f"{line['samples'] / line['trained_rollouts']:.2f} samples/rollout")
    if line.get("forks"):
        parts.append(f"forks {named(line['forks'])}")
    if limits := {k: v for k, v in (line.get("sample_limits") or {}).items() if v}:
        parts.append(named(limits))
    if line.get("unmet"):
        parts.append(f"asked for and not given: {named(line['unmet'])}")
    if line.get("trained_tokens"):
        parts.append(f"{line['trained_tokens']} tokens")
    parts += [f"{label} {line[key]:.3g}" for key, label in _NUMBERS if line.get(key) is not None]
    parts.append(" ".join(f"{name} {seconds:.1f}s" for name, seconds in line["seconds"].items()))
    return " | ".join(parts)


_NUMBERS = (
    ("entropy", "entropy"),
    ("grad_norm", "grad"),
    ("max_logprob_diff", "logprob diff"),
)


def named(counts: Mapping[str, int]) -> str:
    """`cause 2, other 1`, most frequent first."""
    return ", ".join(f"{name} {n}" for name, n in sorted(counts.items(), key=lambda item: (-item[1], item[0])))
