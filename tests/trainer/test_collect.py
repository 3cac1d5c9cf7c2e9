from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from leyden.algorithms.batch import build_batch
from leyden.config import AlgorithmConfig, EvalConfig, SamplingConfig
from leyden.errors import GatewayError, TrainingError
from leyden.trainer.collect import (
    Progress,
    assemble,
    collect,
    exclusion,
    failed_alike,
    group_request,
    merge,
    progress,
    wait_until_terminal,
)
from leyden.trainer.evaluate import evaluate
from leyden.trainer.run import NEVER_REACHED, step_of_its_own
from leyden.types import FailureClass, RolloutState
from tests.trainer.scripted_control import CANCELLED, INFRASTRUCTURE, NO_CALLS, Ending, ScriptedControl


def requests(groups=2, size=2, kind="train", step=1):
    return [group_request(kind, step, slot, size=size, task={"n": slot}) for slot in range(groups)]


def by_member(*endings):
    return lambda rollout: endings[rollout.slot * 10 + rollout.member] if len(endings) > 9 else endings[rollout.member]


async def run(control, groups, max_tokens=None):
    created = await control.create_groups(groups)
    final = await wait_until_terminal(control, created)
    return await collect(control, created, final, max_tokens)


def test_group_request():
    sampling = SamplingConfig(temperature=0.5, max_tokens=9)
    assert group_request("eval", 3, 1, size=2, task={"a": 1}, sampling=sampling) == {
        "kind": "eval", "step": 3, "slot": 1, "size": 2, "task": {"a": 1},
        "sampling": {"temperature": 0.5, "top_p": 1.0, "top_k": 0, "max_tokens": 9},
    }  # fmt: skip


async def test_groups_keep_their_order_and_members():
    control = ScriptedControl(lambda r: Ending(reward=float(r.member)))
    collected = await run(control, requests())
    assert [(g.group_id, [r.rollout_id for r in g.rollouts]) for g in collected.groups] == [
        ("train-00001-0000", ["train-00001-0000-000", "train-00001-0000-001"]),
        ("train-00001-0001", ["train-00001-0001-000", "train-00001-0001-001"]),
    ]
    assert [r.reward for r in collected.groups[0].rollouts] == [0.0, 1.0]
    assert collected.groups[0].rollouts[0].samples[0].ids_L.tolist() == [1, 2, 5, 6]
    assert (collected.turns, collected.sampled_tokens, collected.attempts) == (4, 8, 4)
    assert collected.excluded == {}
    assert collected.rollouts[3].task == {"n": 1}


async def test_creating_twice_gives_the_same_groups():
    control = ScriptedControl(lambda r: Ending())
    first = await control.create_groups(requests())
    await wait_until_terminal(control, first)
    again = await control.create_groups(requests())
    assert [g.group_id for g in again] == [g.group_id for g in first]
    calls = len(control.calls)
    assert set(await wait_until_terminal(control, again)) == {
        "train-00001-0000-000",
        "train-00001-0000-001",
        "train-00001-0001-000",
        "train-00001-0001-001",
    }
    assert len(control.calls) == calls


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (requests(size=3), "exists with 2 rollouts, not 3"),
        ([replace_ | {"task": {"n": 99}} for replace_ in requests()], "exists with another task"),
    ],
)
async def test_a_changed_run_file_is_noticed(other, message):
    control = ScriptedControl(lambda r: Ending())
    await control.create_groups(requests())
    with pytest.raises(GatewayError, match=message) as caught:
        await control.create_groups(other)
    assert caught.value.status == 409


async def test_exclusions_by_reason():
    endings = [Ending(1.0), INFRASTRUCTURE, CANCELLED, NO_CALLS, Ending(None), Ending(0.0)]
    control = ScriptedControl(lambda r: endings[r.member])
    collected = await run(control, requests(groups=1, size=6))
    assert collected.excluded == {"infrastructure": 1, "cancelled": 1, "no_calls": 1, "no_reward": 1}
    assert collected.reasons == {
        "train-00001-0000-001": "infrastructure: evicted",
        "train-00001-0000-002": "cancelled: cancelled",
        "train-00001-0000-003": "no_calls: the harness ended with exit 0",
        "train-00001-0000-004": "no_reward: the harness ended with exit 0",
    }  # fmt: skip
    assert collected.rewards() == [1.0, 0.0]
    assert ("turns", 2) in control.calls
    batch = build_batch(collected.groups, AlgorithmConfig())
    assert batch.counts.trained_rollouts == 2
    assert [round(s.advantage, 3) for s in batch.samples] == [0.707, -0.707]


async def test_an_agent_failure_is_trained():
    control = ScriptedControl(lambda r: Ending(0.0, state=RolloutState.FAILED, failure=FailureClass.AGENT))
    collected = await run(control, requests(groups=1))
    assert collected.excluded == {}
    assert [len(r.samples) for r in collected.groups[0].rollouts] == [1, 1]


async def test_more_completions_than_tasks(caplog):
    """T08: 32 tasks, the feed adds an unknown id and a duplicate: exactly 32 rollouts, keyed by id. A feed that is
    read from an early cursor, as after a resume, tells of many such, so nothing is said.
    """
    control = ScriptedControl(lambda r: Ending(reward=1.0))
    created = await control.create_groups(requests(groups=16))
    (stranger,) = await control.create_groups(requests(groups=1, step=7))
    with caplog.at_level(logging.WARNING):
        final = await wait_until_terminal(control, created)
    assert len(final) == 32
    assert stranger.rollouts[0].rollout_id not in final
    assert caplog.records == []


async def test_the_later_change_wins_whatever_the_order():
    control = ScriptedControl(lambda r: Ending())
    (group,) = await control.create_groups(requests(groups=1, size=1))
    rollout = group.rollouts[0]
    late = replace(rollout, state=RolloutState.SUCCEEDED, reward=1.0, change=20, task={})
    early = replace(rollout, state=RolloutState.FAILED, reward=0.0, change=10, task={})
    latest = {rollout.rollout_id: rollout}
    merge(latest, [late, early, late, replace(late, rollout_id="stranger")])
    assert set(latest) == {rollout.rollout_id}
    assert latest[rollout.rollout_id] == replace(late, task={"n": 0})


def lost(reason):
    return Ending(None, (), RolloutState.FAILED, FailureClass.INFRASTRUCTURE, reason, attempt=3)


NO_IMAGE = "not started after {0} s: ImagePullBackOff, image there/is:none: Back-off pulling image; log: /runs/{0}/log"


async def test_identical_failures_stop_the_run():
    """None of the rollouts that ended last went another way, so the others are not waited for."""
    control = ScriptedControl(lambda r: lost(NO_IMAGE.format(60 + r.member)) if r.slot else Ending(1.0))
    created = await control.create_groups(requests(groups=2, size=4))
    with pytest.raises(TrainingError) as caught:
        await wait_until_terminal(control, created, max_same_failures=4)
    assert str(caught.value) == (
        "the last 4 rollouts that ended all failed alike, each after its last attempt, and none of them by the agent's "
        f"doing (trainer.max_same_failures): {NO_IMAGE.format(63)}"
    )


async def test_a_resume_after_identical_failures_goes_on():
    """What was lost before is not counted again, or the run could never be resumed."""
    control = ScriptedControl(lambda r: lost(NO_IMAGE.format(r.member)))
    created = await control.create_groups(requests(groups=1, size=4))
    with pytest.raises(TrainingError):
        await wait_until_terminal(control, created, max_same_failures=4)
    again = await control.create_groups(requests(groups=1, size=4))
    assert len(await wait_until_terminal(control, again, max_same_failures=4)) == 4


@pytest.mark.parametrize(
    ("endings", "count"),
    [
        ([lost("a"), lost("b"), lost("b")], 2),
        ([lost("b"), Ending(1.0), lost("b")], 1),
        ([lost("b"), Ending(0.0, state=RolloutState.FAILED, failure=FailureClass.AGENT, reason="crashed")], 0),
        ([lost("node n1 is not ready for 300 s"), lost("node n2 is not ready for 301 s")], 2),
        ([lost(None), lost(None)], 2),
        ([], 0),
    ],
)
async def test_what_counts_as_alike(endings, count):
    control = ScriptedControl(lambda r: endings[r.member])
    final = await wait_until_terminal(control, await control.create_groups(requests(groups=1, size=len(endings))))
    assert failed_alike(final.values()) == (count, (endings[-1].reason or "") if endings else "")


async def test_a_record_that_is_not_complete_is_left_out():
    control = ScriptedControl(lambda r: Ending(responses=((5,), (6,))))
    created = await control.create_groups(requests(groups=1))
    final = await wait_until_terminal(control, created)
    turns = await control.turns(final)
    collected = assemble(created, final, turns[1:], None)
    assert collected.excluded == {"capture": 1}
    assert collected.reasons == {
        "train-00001-0000-000": "capture: rollout train-00001-0000-000 has 2 committed turns, 1 were read back"
    }
    wrong = [replace(t, attempt=7) if t.rollout_id == "train-00001-0000-001" else t for t in turns]
    assert assemble(created, final, wrong, None).reasons == {
        "train-00001-0000-001": "capture: rollout train-00001-0000-001 ended in attempt 1; other turns came"
    }


async def test_a_rollout_over_the_limit_stays_in_the_baseline():
    """Its row is not trained, its reward is part of the group."""
    control = ScriptedControl(lambda r: Ending(reward=float(r.member), responses=((5,) * (1 + 9 * r.member),)))
    collected = await run(control, requests(groups=1), max_tokens=4)
    assert collected.samples.left_out == 1
    assert collected.excluded == {}
    batch = build_batch(collected.groups, AlgorithmConfig())
    assert batch.counts.trained_rollouts == 1
    assert [round(s.advantage, 3) for s in batch.samples] == [-0.707]


async def test_forks_and_attempts_are_summed():
    control = ScriptedControl(lambda r: Ending(forks=("reply_dropped",) * (1 + r.member), attempt=2))
    collected = await run(control, requests(groups=1))
    assert collected.forks == {"reply_dropped": 3}
    assert collected.attempts == 4


async def test_progress_is_reported():
    seen: list[Progress] = []
    control = ScriptedControl(lambda r: Ending(reward=0.5))
    await wait_until_terminal(control, await control.create_groups(requests()), seen.append)
    assert [(p.done, p.total, p.mean_reward) for p in seen] == [(0, 4, None), (4, 4, 0.5)]
    assert Progress(2, 8, None, 3.0).eta_s == 9.0
    assert progress([], 1.0) == Progress(0, 0, None, 1.0)
    assert Progress(0, 8, None, 3.0).eta_s is None


async def test_evaluation_counts_what_is_missing():
    """T09: three tasks, one lost: n = 3, two rewarded, no NaN; the groups are consumed."""
    endings = [Ending(1.0), INFRASTRUCTURE, NO_CALLS]
    control = ScriptedControl(lambda r: endings[r.slot])
    result = await evaluate(control, [{"t": i} for i in range(3)], step=4, version=2, settings=EvalConfig())
    assert (result.tasks, result.rollouts, result.rewarded, result.mean_reward) == (3, 3, 2, 0.5)
    assert result.missing == {"infrastructure": 1}
    assert (result.no_calls, result.coverage) == (1, pytest.approx(2 / 3))
    assert result.estimates[0].value == 0.5
    assert str(result) == "mean reward 0.500, pass@1 0.500 [0.095, 0.905] n=2, 2/3 rewarded (missing: infrastructure 1)"
    assert {g.state for g in control.group_list} == {"consumed"}
    assert control.group_list[0].step == 4


async def test_evaluations_on_one_gateway_do_not_meet():
    """Each has rollouts of its own, whatever the other one's tasks; so has a training's validation."""
    control, tasks = ScriptedControl(lambda r: Ending(1.0)), [{"t": 1}, {"t": 2}]
    for chosen in (tasks, tasks, tasks[1:]):
        place = step_of_its_own()
        result = await evaluate(control, chosen, step=0, version=0, settings=EvalConfig(), filed_under=place)
        assert (result.step, result.rewarded) == (0, len(chosen))
        assert NEVER_REACHED <= place < 10**9
    await evaluate(control, [{"t": 3}], step=0, version=0, settings=EvalConfig())
    assert len(control.group_list) == 6 and len({g.step for g in control.group_list}) == 4


async def test_a_pass_is_what_the_run_file_says():
    """Rewards of 0.5 pass at a threshold of 0.5 and not at 1; their mean is reported either way."""
    for threshold, value in ((1.0, 0.0), (0.5, 1.0)):
        control = ScriptedControl(lambda r: Ending(0.5))
        result = await evaluate(control, [{"t": 1}], step=0, version=0, settings=EvalConfig(pass_threshold=threshold))
        assert (result.estimates[0].value, result.mean_reward, result.pass_threshold) == (value, 0.5, threshold)
        assert str(result).startswith(f"mean reward 0.500, pass@1 {value:.3f} [")


async def test_rollouts_are_told_of_once_as_they_end():
    control, ended = ScriptedControl(lambda r: Ending()), []
    groups = await control.create_groups(requests(groups=2))
    await wait_until_terminal(control, groups, on_ended=ended.append)
    assert [r.rollout_id for r in ended] == [
        "train-00001-0000-000",
        "train-00001-0000-001",
        "train-00001-0001-000",
        "train-00001-0001-001",
    ]
    await wait_until_terminal(control, await control.create_groups(requests(groups=2)), on_ended=ended.append)
    assert len(ended) == 4


async def test_an_evaluation_that_measured_nothing_says_why():
    for ending, why in (
        (NO_CALLS, "no rollout made a model call that was served"),
        (CANCELLED, "no rollout got a reward"),
        (Ending(), None),
    ):
        result = await evaluate(ScriptedControl(lambda r, e=ending: e), [{}], step=0, version=0, settings=EvalConfig())
        assert result.nothing_measured == why


async def test_evaluation_without_any_reward_says_so():
    result = await evaluate(
        ScriptedControl(lambda r: CANCELLED), [{}], step=0, version=0, settings=EvalConfig(), ks=(1,)
    )
    assert result.mean_reward is None
    assert str(result) == "pass@1 no data, 0/1 rewarded (missing: cancelled 1)"


async def test_exclusion_of_a_running_harness_that_was_cancelled():
    control = ScriptedControl(lambda r: Ending())
    (group,) = await control.create_groups(requests(groups=1, size=1))
    assert exclusion(replace(group.rollouts[0], state=RolloutState.CANCELLED, reward=1.0, turns=3)) == "cancelled"
