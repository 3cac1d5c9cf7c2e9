"""The sync schedule on the real store with a policy that only counts."""

from __future__ import annotations

import asyncio
import io
import json
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console

from leyden.config import RunConfig
from leyden.errors import GatewayError, TrainingError
from leyden.run_file import parse
from leyden.trainer.display import Display
from leyden.trainer.loop import Cursor, Loop, eval_due
from leyden.trainer.metrics_log import current, read_metrics
from leyden.trainer.tasks import Data, read_tasks, tasks_for_step
from tests.trainer.scripted_control import INFRASTRUCTURE, NO_CALLS, Ending, ScriptedControl


class CountingPolicy:
    """Its weights are the number of updates; a checkpoint is one JSON file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.weights = 0
        self.published: list[tuple[int, int]] = []
        self.batches = []
        self.saved: list[tuple[int, int | None]] = []
        self.before_update = lambda: None
        self.dead = False

    def update(self, batch):
        self.before_update()
        self.weights += 1
        self.batches.append(batch)
        return {"entropy": 0.5, "grad_norm": 1.0, "max_logprob_diff": 1e-6}

    def publish(self, version, lineage):
        self.published.append((version, self.weights))

    def save(self, cursor, best):
        if self.dead:
            return
        self.saved.append((cursor.step, best))
        state = {"step": cursor.step, "version": cursor.version, "weights": self.weights}
        (self.folder / "checkpoint.json").write_text(json.dumps(state))

    def load(self) -> Cursor:
        path = self.folder / "checkpoint.json"
        if not path.exists():
            return Cursor()
        state = json.loads(path.read_text())
        self.weights = state["weights"]
        return Cursor(state["step"], state["version"])


@pytest.fixture
def config(tmp_path) -> RunConfig:
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"n": n}) + "\n" for n in range(5)))
    (tmp_path / "val.jsonl").write_text('{"v": 0}\n{"v": 1}\n')
    parsed = parse(
        {
            "run_dir": str(tmp_path / "run"),
            "model": {"path": "none"},
            "data": {"train": str(tmp_path / "train.jsonl"), "validation": str(tmp_path / "val.jsonl")},
            "harness": {"command": ["agent"]},
            "grader": {"function": "a:b"},
            "trainer": {"steps": 4, "groups_per_step": 2, "group_size": 2, "checkpoint_every": 2, "max_empty_steps": 3},
            "eval": {"every": 2},
        }
    )
    parsed.run_dir.mkdir()
    return parsed


def spread(rollout):
    return Ending(reward=float(rollout.member))


def loop(config, control, policy, screen=None):
    console = Console(file=screen or io.StringIO(), width=1000)
    data = Data(read_tasks(config.data.train), read_tasks(config.data.validation))
    return Loop(
        config, control, policy, engines=["http://engine"], data=data, cursor=policy.load(), display=Display(console),
    )  # fmt: skip


def trained_tasks(control, state="consumed"):
    """{step: tasks} of the train groups in a state."""
    found = {}
    for group in control.group_list:
        if group.kind == "train" and group.state == state:
            found.setdefault(group.step, []).append(group.rollouts[0].task["n"])
    return found


def expected_tasks(steps):
    return {s: tasks_for_step(5, s, 2, seed=0, shuffle=True) for s in range(1, steps + 1)}


async def test_a_whole_run(config):
    control, policy, screen = ScriptedControl(spread), CountingPolicy(config.run_dir), io.StringIO()
    summary = await loop(config, control, policy, screen).run()
    assert policy.weights == 4
    assert policy.published == [(0, 0), (1, 1), (2, 2), (3, 3), (4, 4)]
    assert trained_tasks(control) == expected_tasks(4)
    assert policy.load() == Cursor(4, 4)
    events = [(line["event"], line["step"], line["version"]) for line in read_metrics(config.run_dir / "metrics.jsonl")]
    assert [e for e in events if e[0] != "publish"] == [
        ("start", 0, 0), ("eval", 0, 0), ("step", 1, 1), ("step", 2, 2), ("checkpoint", 2, 2), ("eval", 2, 2),
        ("step", 3, 3), ("step", 4, 4), ("checkpoint", 4, 4), ("eval", 4, 4),
    ]  # fmt: skip
    assert (summary["pass_at_1_before"], summary["counts"]["rollouts"], summary["steps"]) == (0.0, 16, 4)
    assert (config.run_dir / "learning_curve.png").exists()
    assert list((config.run_dir / "tensorboard").iterdir())
    lines = screen.getvalue().splitlines()
    assert lines[1].startswith(
        "step 1/4 | reward 0.500, pass 0.50 | groups without spread 0/2 | 1.00 samples/rollout | 8 tokens"
    )
    assert [line.split(" |")[0] for line in lines] == [
        "validation at step 0", "step 1/4", "step 2/4", "validation at step 2", "step 3/4", "step 4/4",
        "validation at step 4",
    ]  # fmt: skip


async def test_the_checkpoint_of_the_best_validation_is_kept(config):
    """Validation is best after step 1, which is off the schedule of checkpoints, and ties with step 2: the earlier one
    holds."""
    values = {0: 0.0, 1: 1.0, 2: 1.0, 3: 0.0, 4: 0.5}
    control = ScriptedControl(lambda r: Ending(values[r.step] if r.kind == "eval" else float(r.member)))
    policy = CountingPolicy(config.run_dir)
    settings = config.model_copy(update={"eval": config.eval.model_copy(update={"every": 1})})
    summary = await loop(settings, control, policy).run()
    assert policy.saved == [(1, 1), (2, 1), (4, 1)]
    assert summary["best"] == {
        "step": 1, "version": 1, "mean_reward": 1.0, "pass_at_1": 1.0, "checkpoint": "checkpoints/step-000001",
    }  # fmt: skip


async def test_the_order_of_writes(config):
    control, policy = ScriptedControl(spread), CountingPolicy(config.run_dir)
    await loop(
        config.model_copy(
            update={"eval": config.eval.model_copy(update={"every": 0, "at_start": False, "at_end": False})}
        ),
        control,
        policy,
    ).run()
    names = [call[0] for call in control.calls]
    assert names[:2] == ["recover", "put_model"]
    assert names[2:7] == ["create", "rollouts", "turns", "put_model", "consume"]


@pytest.mark.parametrize("call", ["create", "rollouts", "turns", "put_model", "consume"])
@pytest.mark.parametrize("nth", [2, 3, 4])
async def test_a_crash_anywhere_repeats_and_skips_nothing(config, call, nth):
    """The gateway goes away at the n-th call of a kind; nothing is saved on the way out, as with kill -9."""
    control, policy = ScriptedControl(spread), CountingPolicy(config.run_dir)
    crashed = loop(config, control, policy)
    seen = 0

    original = control._call

    def counting(name, *details):
        nonlocal seen
        seen += name == call
        policy.dead = seen == nth
        control.die_on = call if policy.dead else None
        original(name, *details)

    control._call = counting
    with pytest.raises(GatewayError):
        await crashed.run()
    control._call, control.die_on = original, None
    resumed = CountingPolicy(config.run_dir)
    await loop(config, control, resumed).run()
    assert resumed.weights == 4
    assert trained_tasks(control) == expected_tasks(4)
    assert trained_tasks(control, "active") == {}
    kept = current(read_metrics(config.run_dir / "metrics.jsonl"))
    assert [line["step"] for line in kept if line["event"] == "step"] == [1, 2, 3, 4]
    assert [line["step"] for line in kept if line["event"] == "eval"] == [0, 2, 4]
    trained = [r for g in control.group_list if g.kind == "train" and g.state == "consumed" for r in g.rollouts]
    assert len(trained) == 16
    assert all(
        r.max_version < g.step
        for g in control.group_list
        if g.state == "consumed"
        for r in g.rollouts
        if g.kind == "train"
    )


async def test_a_finished_run_only_reports(config):
    control, policy = ScriptedControl(spread), CountingPolicy(config.run_dir)
    first = await loop(config, control, policy).run()
    again = CountingPolicy(config.run_dir)
    second = await loop(config, control, again).run()
    assert again.weights == 4
    assert second["counts"] == first["counts"]
    assert second["pass_at_1_after"] == first["pass_at_1_after"]


async def test_steps_without_a_trained_token_are_skipped_then_stop_the_run(config):
    """T03: four rollouts, none reaches the gateway."""
    control, policy = ScriptedControl(lambda r: NO_CALLS), CountingPolicy(config.run_dir)
    with pytest.raises(TrainingError) as caught:
        await loop(config, control, policy).run()
    assert str(caught.value).splitlines() == [
        "no trained token in 3 steps in a row (trainer.max_empty_steps): no_calls 4. The harness's own output is in "
        f"{config.run_dir}/attempts/ROLLOUT/ATTEMPT/harness.log",
        *(
            f"  train-00003-{slot:04d}-{member:03d}: no_calls: the harness ended with exit 0"
            for slot in (0, 1)
            for member in (0, 1)
        ),
    ]
    assert policy.weights == 0
    assert policy.load() == Cursor(3, 0)
    skips = [line for line in read_metrics(config.run_dir / "metrics.jsonl") if line["event"] == "skip"]
    assert [(s["step"], s["version"], s["why"], s["excluded"]) for s in skips] == [
        (s, 0, "no rollout has a trained token", {"no_calls": 4}) for s in (1, 2, 3)
    ]


async def test_an_empty_step_in_between_is_only_counted(config):
    control = ScriptedControl(lambda r: INFRASTRUCTURE if r.step in (1, 2) and r.kind == "train" else spread(r))
    policy = CountingPolicy(config.run_dir)
    summary = await loop(config, control, policy).run()
    assert policy.weights == 2
    assert policy.load() == Cursor(4, 2)
    assert (summary["skipped_steps"], summary["policy_version"]) == (2, 2)
    assert summary["counts"]["excluded"] == {"infrastructure": 8}


async def test_equal_rewards_change_nothing_and_are_said(config):
    """L04, U04: the step advances, the weights do not, and the user is told."""
    control, policy, screen = ScriptedControl(lambda r: Ending(0.3)), CountingPolicy(config.run_dir), io.StringIO()
    await loop(config, control, policy, screen).run()
    assert policy.weights == 0
    assert policy.load() == Cursor(4, 0)
    text = screen.getvalue()
    assert "step 1/4 | skipped: every advantage is 0 | reward 0.300, pass 0.00 | groups without spread 2/2" in text
    assert "warning: all 2 groups of this step have equal rewards (mean 0.3): nothing was learned from it" in text


async def test_a_stop_finishes_the_writes_of_the_step_and_saves_it(config):
    control, policy = ScriptedControl(spread), CountingPolicy(config.run_dir)
    running = asyncio.get_running_loop()
    task = running.create_task(loop(config, control, policy).run())
    policy.before_update = partial(running.call_soon_threadsafe, task.cancel)  # type: ignore[assignment]
    with pytest.raises(asyncio.CancelledError):
        await task
    assert policy.weights == 1
    assert policy.load() == Cursor(1, 1)
    assert trained_tasks(control) == {1: expected_tasks(1)[1]}
    resumed = CountingPolicy(config.run_dir)
    await loop(config, control, resumed).run()
    assert resumed.weights == 4
    assert trained_tasks(control) == expected_tasks(4)


def test_when_to_evaluate(config):
    def due(steps=10, **settings):
        chosen = config.eval.model_copy(update={"every": 0, "at_start": True, "at_end": True} | settings)
        return [s for s in range(steps + 1) if eval_due(s, steps, chosen)]

    assert due(every=4) == [0, 4, 8, 10]
    assert due() == [0, 10]
    assert due(at_start=False, every=5) == [5, 10]
    assert due(at_end=False, every=5) == [0, 5, 10]
    assert due(at_start=False, at_end=False) == []


async def test_what_harnesses_asked_for_and_did_not_get_stands_in_the_step_line(config):
    """What is new since the step before; a gateway that starts again counts from 0."""
    counts = iter([{"tool_choice": 3}, {"tool_choice": 5, "text": 1}, {"text": 1}, {"text": 1}])

    async def unmet():
        return next(counts)

    screen = io.StringIO()
    control = ScriptedControl(spread)
    control.unmet = unmet
    summary = await loop(config, control, CountingPolicy(config.run_dir), screen).run()
    steps = [line for line in read_metrics(config.run_dir / "metrics.jsonl") if line["event"] == "step"]
    assert [line["unmet"] for line in steps] == [{"tool_choice": 3}, {"tool_choice": 2, "text": 1}, {"text": 1}, {}]
    assert summary["counts"]["unmet"] == {"tool_choice": 5, "text": 2}
    assert " | asked for and not given: tool_choice 2, text 1 | " in screen.getvalue()


@pytest.mark.parametrize("call", ["unmet", "put_model", "consume"])
async def test_a_step_that_is_trained_has_its_line_whichever_call_fails(config, monkeypatch, call):
    """The gateway goes away in the third step; the run ends, and goes on from the checkpoint that it leaves."""
    control, policy = ScriptedControl(spread), CountingPolicy(config.run_dir)
    answer, calls = getattr(control, call), []

    async def away(*args, **kwargs):
        calls.append(call)
        if len(calls) == 3 + (call == "put_model"):
            raise GatewayError("no gateway")
        return await answer(*args, **kwargs)

    monkeypatch.setattr(control, call, away)
    with pytest.raises(GatewayError):
        await loop(config, control, policy).run()
    await loop(config, control, policy).run()
    steps = [
        line["step"] for line in current(read_metrics(config.run_dir / "metrics.jsonl")) if line["event"] == "step"
    ]
    assert (steps, policy.weights) == ([1, 2, 3, 4], 4)
    assert trained_tasks(control) == expected_tasks(4)
