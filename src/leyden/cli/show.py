"""`leyden show`: the steps of a run, its rollouts, one trajectory. Steps are read from the run folder alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson

from leyden.cli.forks import count_forks, fork_table, shown_forks
from leyden.cli.record import Record, read_run, record_of
from leyden.cli.screen import Line, Screen, TableParts
from leyden.cli.trajectory import Decode, decoder, trajectory_json, trajectory_lines
from leyden.client import Rollout
from leyden.errors import ConfigError
from leyden.trainer.collect import exclusion
from leyden.trainer.display import named
from leyden.trainer.metrics_log import current, read_metrics
from leyden.trainer.outcomes import COMPLETED, failures, outcome, words
from leyden.types import Json, RolloutState, Turn

PAGE = 1000
TURNS_PAGE = 64
STEPS = ("step", "skip")
TASK_NAMES = ("id", "task_id", "instance_id", "name")


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


def show_steps(run_dir: Path, *, as_json: bool = False) -> None:
    """The steps of a run and its evaluations; for the folder of a `leyden eval`, what came of it."""
    read_run(run_dir)
    lines = read_metrics(run_dir / "metrics.jsonl")
    kept = current(lines)
    results = read_results(run_dir)
    screen = Screen()
    if as_json:
        steps = [line for line in kept if line["event"] in STEPS]
        evaluations = [line for line in kept if line["event"] == "eval"]
        screen.json({"run_dir": str(run_dir), "steps": steps, "evaluations": evaluations, "results": results})
        return
    if not kept and not results:
        screen.line(f"{run_dir} has no finished step yet")
        return
    if any(line["event"] in STEPS for line in kept):
        screen.table(*step_table(kept))
    superseded = sum(line["event"] in STEPS for line in lines) - sum(line["event"] in STEPS for line in kept)
    if superseded:
        screen.line(f"{superseded} steps of earlier starts were done again and are not shown")
    evaluations = [
        {**line, "checkpoint": f"step {line['step']} (training)"} for line in kept if line["event"] == "eval"
    ]
    if evaluations or results:
        screen.table(*evaluation_table([*evaluations, *results]))


def read_results(run_dir: Path) -> list[Json]:
    """What each `leyden eval` wrote below the run folder, or in it if it is the folder of one; oldest first."""
    found = []
    for path in [run_dir / "result.json", *sorted((run_dir / "eval").glob("*/result.json"))]:
        try:
            document = orjson.loads(path.read_bytes())
        except (OSError, orjson.JSONDecodeError):
            continue
        if isinstance(document, dict) and "pass" in document:
            found.append({**document, "folder": str(path.parent)})
    return found


def step_table(lines: Iterable[Json]) -> TableParts:
    """One row per step that holds, in order."""
    columns = ("step", "version", "reward", "pass", "no spread", "ended", "left out", "samples", "tokens", "entropy",
               "grad", "logprob diff", "seconds", "note")  # fmt: skip
    rows = [
        (
            str(line["step"]),
            str(line["version"]),
            _number(line.get("reward"), ".3f"),
            _number(line.get("pass_rate"), ".2f"),
            f"{line['groups_without_spread']}/{line['groups']}",
            named(failures(line.get("outcomes") or {}, without=line["excluded"])),
            named(line["excluded"]),
            str(line["samples"]),
            str(line["trained_tokens"]),
            _number(line.get("entropy"), ".3g"),
            _number(line.get("grad_norm"), ".3g"),
            _number(line.get("max_logprob_diff"), ".2g"),
            f"{sum(line['seconds'].values()):.1f}",
            f"skipped: {line['why']}" if line["event"] == "skip" else "",
        )
        for line in lines
        if line["event"] in STEPS
    ]
    return columns, rows, ""


def evaluation_table(evaluations: Iterable[Json]) -> TableParts:
    """One row per evaluation and k."""
    columns = ("evaluation", "version", "tasks", "samples", "rewarded", "mean reward", "k", "pass@k", "95 % interval",
               "missing", "ended", "seconds", "folder")  # fmt: skip
    rows = []
    for e in evaluations:
        checkpoint = e.get("checkpoint")
        for p in e["pass"]:
            rows.append(
                (
                    Path(checkpoint).name if checkpoint else "initial model or engines",
                    str(e["version"]),
                    str(e["tasks"]),
                    str(e["samples"]),
                    f"{e['rewarded']}/{e['rollouts']}",
                    _number(e.get("mean_reward"), ".3f"),
                    str(p["k"]),
                    "no data" if p["value"] is None else f"{p['value']:.3f}",
                    "" if p["interval_95"] is None else _interval(p["interval_95"]),
                    named(e["missing"]),
                    named(failures(e.get("outcomes") or {}, without=e["missing"])),
                    f"{e['seconds']:.1f}",
                    Path(e["folder"]).name if "folder" in e else "",
                )
            )
    return columns, rows, ""


def show_rollouts(run_dir: Path, chosen: Filter, secret: bytes | None, *, forks: bool, as_json: bool = False) -> None:
    """`forks` counts forks over the rollouts that would be listed."""
    chosen.check()
    config = read_run(run_dir)
    shown, total, turns_of = asyncio.run(_chosen_rollouts(run_dir, chosen, secret, all_turns=forks))
    screen = Screen()
    if forks and as_json:
        screen.json(count_forks(turns_of, config.trainer.max_sample_tokens).as_json())
    elif forks:
        screen.table(*fork_table(turns_of, config.trainer.max_sample_tokens))
    elif as_json:
        screen.json({"total": total, "rollouts": [rollout_json(r) for r in shown]})
    else:
        screen.table(*rollout_table(shown, total, turns_of))


def rollout_json(rollout: Rollout) -> Json:
    return {
        **asdict(rollout),
        "outcome": outcome(rollout) if rollout.state.terminal else None,
        "untrained": untrained(rollout),
    }


def rollout_table(rollouts: Sequence[Rollout], total: int, turns_of: Mapping[str, Sequence[Turn]]) -> TableParts:
    """`turns_of` holds the turns of those that forked."""
    columns = ("rollout", "kind", "step", "task", "state", "attempt", "reward", "turns", "tokens", "versions",
               "seconds", "forks", "ended", "reason")  # fmt: skip
    rows = []
    for r in rollouts:
        seconds = "" if r.started is None or r.finished is None else f"{max(0.0, r.finished - r.started):.1f}"
        versions = "" if r.min_version is None else f"{r.min_version}-{r.max_version}"
        rows.append(
            (
                r.rollout_id, r.kind, str(r.step), task_name(r), state_words(r), str(r.attempt),
                _number(r.reward, ".3f"), str(r.turns), str(r.sampled_tokens), versions, seconds,
                named(shown_forks(turns_of.get(r.rollout_id, ()))), ended(r),
                words(r) if ended(r) else r.reason or "",
            )
        )  # fmt: skip
    return columns, rows, f"{len(rollouts)} of {total} rollouts"


def task_name(rollout: Rollout) -> str:
    """What the task calls itself, else its slot in the step."""
    for name in TASK_NAMES:
        if isinstance(value := rollout.task.get(name), str | int) and not isinstance(value, bool):
            return str(value)
    return f"slot {rollout.slot}"


def state_words(rollout: Rollout) -> str:
    return f"{rollout.state} ({rollout.failure})" if rollout.failure else str(rollout.state)


def ended(rollout: Rollout) -> str:
    """The kind of an end that is not simply complete."""
    kind = outcome(rollout) if rollout.state.terminal else COMPLETED
    return "" if kind == COMPLETED else kind


def untrained(rollout: Rollout) -> str | None:
    """Why nothing of a rollout is trained, or None."""
    if rollout.kind == "eval":
        return "an evaluation"
    if not rollout.state.terminal:
        return "not finished"
    kind = exclusion(rollout)
    return f"left out ({kind})" if kind else None


def show_rollout(run_dir: Path, beginning: str, secret: bytes | None, *, as_json: bool = False) -> None:
    config = read_run(run_dir)
    rollout, turns = asyncio.run(_one_rollout(run_dir, beginning, secret))
    decode: Decode = decoder(config.model.path)
    screen, limit, why = Screen(), config.trainer.max_sample_tokens, untrained(rollout)
    if as_json:
        screen.json({"rollout": rollout_json(rollout), "turns": trajectory_json(turns, decode, limit, why)})
        return
    for line in [*heading(rollout, run_dir), *trajectory_lines(turns, decode, limit, why)]:
        screen.line(*line)


def heading(rollout: Rollout, run_dir: Path) -> list[Line]:
    where = run_dir / "attempts" / rollout.rollout_id / str(rollout.attempt)
    facts = [
        f"{rollout.kind} step {rollout.step}, task {task_name(rollout)}, member {rollout.member}, "
        f"attempt {rollout.attempt}",
        f"{state_words(rollout)}, reward {_number(rollout.reward, '.4g') or 'none'}, {exit_words(rollout)}"
        + (f", {ended(rollout)}" if ended(rollout) and not rollout.timed_out else ""),
        *([words(rollout)] if ended(rollout) and words(rollout) else []),
        f"{rollout.turns} turns, {rollout.sampled_tokens} sampled tokens, held {rollout.held_s:.1f} s; logs in {where}",
    ]
    return [Line(rollout.rollout_id, "bold"), *(Line(fact) for fact in facts)]


def exit_words(rollout: Rollout) -> str:
    if rollout.timed_out:
        return "timed out"
    if rollout.exit_code is None:
        return "no exit code"
    return f"exit {rollout.exit_code}" if rollout.exit_code >= 0 else f"killed by signal {-rollout.exit_code}"


async def _chosen_rollouts(
    run_dir: Path, chosen: Filter, secret: bytes | None, *, all_turns: bool
) -> tuple[list[Rollout], int, dict[str, list[Turn]]]:
    """The newest of those that the filter takes, how many it takes, and turns: of all shown or of those with forks."""
    async with record_of(run_dir, read_run(run_dir), secret) as record:
        found = [r async for r in _each(record) if chosen.takes(r)]
        found.sort(key=lambda r: (r.step, r.kind, r.slot, r.member))
        shown = found[-chosen.limit :]
        turns_of: dict[str, list[Turn]] = {r.rollout_id: [] for r in shown if all_turns or r.forks}
        wanted = list(turns_of)
        for first in range(0, len(wanted), TURNS_PAGE):
            page = wanted[first : first + TURNS_PAGE]
            for turn in await record.turns(page):
                turns_of[turn.rollout_id].append(turn)
        return shown, len(found), turns_of


async def _each(record: Record) -> AsyncIterator[Rollout]:
    """Every rollout of the run, oldest change first."""
    cursor, more = 0, True
    while more:
        page, cursor = await record.rollouts(after=cursor, limit=PAGE)
        more = bool(page)
        for rollout in page:
            yield rollout


async def _one_rollout(run_dir: Path, beginning: str, secret: bytes | None) -> tuple[Rollout, list[Turn]]:
    async with record_of(run_dir, read_run(run_dir), secret) as record:
        matches = [r.rollout_id async for r in _each(record) if r.rollout_id.startswith(beginning)]
        if len(matches) != 1 and beginning not in matches:
            some = f": {', '.join(sorted(matches)[:5])}" if matches else "; `leyden show RUN_DIR --rollouts` lists them"
            raise ConfigError("ROLLOUT", f"{len(matches)} rollouts begin with {beginning!r}{some}")
        rollout_id = beginning if beginning in matches else matches[0]
        return await record.rollout(rollout_id), await record.turns([rollout_id])


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _interval(interval: Sequence[float]) -> str:
    return f"[{interval[0]:.3f}, {interval[1]:.3f}]"
