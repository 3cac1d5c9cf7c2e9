"""`leyden show`: the steps of a run, its rollouts, one trajectory. Steps are read from the run folder alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from leyden.cli.branches import fork_table, shown_branches
from leyden.cli.gateway_of import gateway_of, read_run
from leyden.cli.screen import screen
from leyden.cli.trajectory import Decode, decoder, trajectory_lines
from leyden.client import ControlClient, Rollout
from leyden.errors import ConfigError
from leyden.trainer.display import named
from leyden.trainer.metrics import current, read_metrics
from leyden.types import Json, RolloutState, Turn

PAGE = 1000
TURNS_PAGE = 64


@dataclass(frozen=True, slots=True)
class Filter:
    """Which rollouts to list; None is any."""

    step: int | None = None
    kind: str | None = None
    state: str | None = None
    limit: int = 200

    @property
    def narrows(self) -> bool:
        return (self.step, self.kind, self.state) != (None, None, None)

    def check(self) -> None:
        if self.kind not in (None, "train", "eval"):
            raise ConfigError("--kind", f"{self.kind!r} is not train or eval")
        if self.state is not None and self.state not in set(RolloutState):
            raise ConfigError("--state", f"{self.state!r} is not one of {', '.join(RolloutState)}")

    def takes(self, rollout: Rollout) -> bool:
        return (
            self.step in (None, rollout.step)
            and self.kind in (None, rollout.kind)
            and self.state in (None, rollout.state)
        )


def show_steps(run_dir: Path) -> None:
    read_run(run_dir)
    lines = read_metrics(run_dir / "metrics.jsonl")
    console = screen()
    if not lines:
        console.print(f"{run_dir} has no finished step yet")
        return
    console.print(step_table(current(lines)))
    superseded = sum(line["event"] in ("step", "skip") for line in lines) - sum(
        line["event"] in ("step", "skip") for line in current(lines)
    )
    if superseded:
        console.print(f"{superseded} steps of earlier starts were done again and are not shown")


def step_table(lines: Iterable[Json]) -> Table:
    """One row per step or evaluation that holds, in order."""
    columns = ("step", "version", "reward", "pass", "no spread", "left out", "samples", "tokens", "entropy",
               "grad", "logprob diff", "seconds", "validation pass@1")  # fmt: skip
    table = Table(*columns)
    for line in lines:
        if line["event"] == "eval":
            first = line["pass"][0]
            value = "no data" if first["value"] is None else f"{first['value']:.3f} " + _interval(first["interval_95"])
            table.add_row(str(line["step"]), str(line["version"]), *[""] * 9, f"{line['seconds']:.1f}", value)
        elif line["event"] in ("step", "skip"):
            table.add_row(
                str(line["step"]),
                str(line["version"]),
                _number(line.get("reward"), ".3f"),
                _number(line.get("pass_rate"), ".2f"),
                f"{line['groups_without_spread']}/{line['groups']}",
                named(line["excluded"]),
                str(line["samples"]),
                str(line["trained_tokens"]),
                _number(line.get("entropy"), ".3g"),
                _number(line.get("grad_norm"), ".3g"),
                _number(line.get("max_logprob_diff"), ".2g"),
                f"{sum(line['seconds'].values()):.1f}",
                "skipped" if line["event"] == "skip" else "",
            )
    return table


def show_rollouts(run_dir: Path, chosen: Filter, secret: bytes | None, *, forks: bool) -> None:
    """`forks` counts branches over the rollouts that would be listed."""
    chosen.check()
    config = read_run(run_dir)
    shown, total, turns_of = asyncio.run(_chosen_rollouts(run_dir, chosen, secret, all_turns=forks))
    table = fork_table(turns_of, config.trainer.max_sample_tokens) if forks else rollout_table(shown, total, turns_of)
    screen().print(table)


def rollout_table(rollouts: Sequence[Rollout], total: int, turns_of: Mapping[str, Sequence[Turn]]) -> Table:
    """`turns_of` holds the turns of those that branched."""
    title = f"{len(rollouts)} of {total} rollouts"
    table = Table("rollout", "kind", "step", "task", "state", "attempt", "reward", "turns", "tokens", "versions",
                  "seconds", "branches", "reason", title=title)  # fmt: skip
    for r in rollouts:
        seconds = "" if r.started is None or r.finished is None else f"{max(0.0, r.finished - r.started):.1f}"
        versions = "" if r.min_version is None else f"{r.min_version}-{r.max_version}"
        state = f"{r.state} ({r.failure})" if r.failure else str(r.state)
        table.add_row(
            r.rollout_id, r.kind, str(r.step), f"{r.slot}.{r.member}", state, str(r.attempt),
            _number(r.reward, ".3f"), str(r.turns), str(r.sampled_tokens), versions, seconds,
            named(shown_branches(turns_of.get(r.rollout_id, ()))), r.reason or "",
        )  # fmt: skip
    return table


def show_rollout(run_dir: Path, beginning: str, secret: bytes | None) -> None:
    config = read_run(run_dir)
    rollout, turns = asyncio.run(_one_rollout(run_dir, beginning, secret))
    decode: Decode = decoder(config.model.path)
    console = Console(soft_wrap=True, highlight=False)
    for line in [*heading(rollout, run_dir), *trajectory_lines(turns, decode, config.trainer.max_sample_tokens)]:
        console.print(line)


def heading(rollout: Rollout, run_dir: Path) -> list[Text]:
    where = run_dir / "attempts" / rollout.rollout_id / str(rollout.attempt)
    state = f"{rollout.state} ({rollout.failure})" if rollout.failure else str(rollout.state)
    facts = [
        f"{rollout.kind} step {rollout.step}, task {rollout.slot}, member {rollout.member}, attempt {rollout.attempt}",
        f"{state}, reward {_number(rollout.reward, '.4g')}, exit code {rollout.exit_code}"
        + (", timed out" if rollout.timed_out else "")
        + (f", {rollout.reason}" if rollout.reason else ""),
        f"{rollout.turns} turns, {rollout.sampled_tokens} sampled tokens, held {rollout.held_s:.1f} s; logs in {where}",
    ]
    return [Text(rollout.rollout_id, "bold"), *(Text(fact) for fact in facts)]


async def _chosen_rollouts(
    run_dir: Path, chosen: Filter, secret: bytes | None, *, all_turns: bool
) -> tuple[list[Rollout], int, dict[str, list[Turn]]]:
    """The newest of those that the filter takes, how many it takes, and turns: of all shown or of those with forks."""
    async with gateway_of(run_dir, read_run(run_dir), secret) as client:
        found = [r async for r in _each(client) if chosen.takes(r)]
        found.sort(key=lambda r: (r.step, r.kind, r.slot, r.member))
        shown = found[-chosen.limit :]
        turns_of: dict[str, list[Turn]] = {r.rollout_id: [] for r in shown if all_turns or r.forks}
        wanted = list(turns_of)
        for first in range(0, len(wanted), TURNS_PAGE):
            page = wanted[first : first + TURNS_PAGE]
            for turn in await client.turns(page):
                turns_of[turn.rollout_id].append(turn)
        return shown, len(found), turns_of


async def _each(client: ControlClient) -> AsyncIterator[Rollout]:
    """Every rollout of the run, oldest change first."""
    cursor, more = 0, True
    while more:
        page, cursor = await client.rollouts(after=cursor, limit=PAGE, tasks=False)
        more = bool(page)
        for rollout in page:
            yield rollout


async def _one_rollout(run_dir: Path, beginning: str, secret: bytes | None) -> tuple[Rollout, list[Turn]]:
    async with gateway_of(run_dir, read_run(run_dir), secret) as client:
        matches = [r.rollout_id async for r in _each(client) if r.rollout_id.startswith(beginning)]
        if len(matches) != 1 and beginning not in matches:
            some = f": {', '.join(sorted(matches)[:5])}" if matches else "; `leyden show RUN_DIR --rollouts` lists them"
            raise ConfigError("ROLLOUT", f"{len(matches)} rollouts begin with {beginning!r}{some}")
        rollout_id = beginning if beginning in matches else matches[0]
        return await client.rollout(rollout_id), await client.turns([rollout_id])


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _interval(interval: Sequence[float]) -> str:
    return f"[{interval[0]:.3f}, {interval[1]:.3f}]"
