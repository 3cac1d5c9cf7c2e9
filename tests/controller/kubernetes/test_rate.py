"""How fast Jobs are made, on a clock that the test moves."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from pathlib import Path

import pytest

from leyden.controller.backends.kubernetes.rate import CreationRate
from leyden.controller.plan import AttemptStatus, Limits, Observed, Phase, Start, plan
from tests.controller.test_plan import rollout

NOON = 1_790_000_000.0


class Clock:
    def __init__(self) -> None:
        self.time = NOON

    def now(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        assert 0 < seconds <= 60
        self.time += seconds


def rate(clock: Clock, folder: Path, limit: int = 60, existing: Iterable[float] = ()) -> CreationRate:
    made = CreationRate(limit, folder / "created", now=clock.now, sleep=clock.sleep)
    made.resume(existing)
    return made


def most_in_a_minute(times: list[float]) -> int:
    return max(sum(t <= other < t + 60 for other in times) for t in times)


async def test_a_thousand_rollouts_and_a_restart_midway(tmp_path: Path) -> None:
    """1,000 queued, 60 a minute, 50 active, each for 90 s; the controller is another one after half of them,
    when most of the Jobs that were made in the last minute are gone. First come, first served."""
    clock, limits = Clock(), Limits("me", 50, 60, 1000, 10, 1)
    queued = {f"r{i}": rollout(f"r{i}", "queued", 0, created=float(i)) for i in range(1000)}
    jobs: deque[tuple[float, str]] = deque()  # until when it runs
    made: list[tuple[float, str]] = []
    limiter = rate(clock, tmp_path)
    while queued or jobs:
        while jobs and jobs[0][0] <= clock.time:
            jobs.popleft()
        observed = Observed({name: AttemptStatus(name, 1, Phase.RUNNING, until) for until, name in jobs})
        starts = [a.rollout_id for a in plan(observed, queued, limits, clock.time) if isinstance(a, Start)]
        for name in starts:
            await limiter.room()
            made.append((clock.time, name))
            jobs.append((clock.time + (5 if len(made) % 2 else 90), name))
            del queued[name]
            assert len(jobs) <= 50
            if len(made) == 500:
                limiter = rate(clock, tmp_path, existing=[t for t, other in made if other == name])
        jobs = deque(sorted(jobs))
        clock.time = max(clock.time, jobs[0][0]) if jobs else clock.time
    assert [name for _, name in made] == [f"r{i}" for i in range(1000)]
    assert most_in_a_minute([t for t, _ in made]) <= 60


async def test_nobody_overtakes(tmp_path: Path) -> None:
    clock, order = Clock(), list[tuple[int, float]]()
    limiter = rate(clock, tmp_path, limit=2)

    async def ask(number: int) -> None:
        await limiter.room()
        order.append((number, clock.time - NOON))

    await asyncio.gather(*map(ask, range(5)))
    assert order == [(0, 0), (1, 0), (2, 60), (3, 60), (4, 120)]


@pytest.mark.parametrize("lost", [None, "", "1790\x00\x00"])
async def test_without_its_file_the_jobs_that_exist_count(tmp_path: Path, lost: str | None) -> None:
    """By their creation times. Those of a clock that is ahead count as made now."""
    clock = Clock()
    if lost is not None:
        (tmp_path / "created").write_text(lost)
    limiter = rate(clock, tmp_path, limit=3, existing=[NOON - 60, NOON - 20, NOON + 7])
    await limiter.room()
    assert clock.time == NOON
    await limiter.room()
    assert clock.time == NOON + 40


async def test_the_file_stays_small(tmp_path: Path) -> None:
    clock = Clock()
    limiter = rate(clock, tmp_path, limit=4)
    for _ in range(200):
        await limiter.room()
        assert len((tmp_path / "created").read_text().splitlines()) <= 40
    assert clock.time == NOON + 49 * 60


async def test_a_file_that_cannot_be_written_or_read_holds_nothing_up(tmp_path: Path) -> None:
    """A full disk, say."""
    clock = Clock()
    (tmp_path / "created").mkdir()
    limiter = rate(clock, tmp_path, limit=2, existing=[NOON - 20])
    for _ in range(30):
        await limiter.room()
    assert clock.time == NOON + 14 * 60 + 40
