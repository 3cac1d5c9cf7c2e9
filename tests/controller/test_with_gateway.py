"""The controller against the real gateway: what a rollout leaves there, and mini through preload and fork."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from leyden.client import Rollout, control_key
from leyden.config import RunConfig
from leyden.controller.reconcile import run_controller
from leyden.gateway.render import ModelRenderer
from leyden.types import FailureClass, RolloutState
from tests.gateway.conftest import SECRET, Gateway, ScriptedEngine, make_config, serving

pytestmark = pytest.mark.slow
Left = Callable[[], list[str]]
AGENT = """
import json, os, urllib.request as u
def call(messages):
    body = json.dumps({"model": os.environ["LEYDEN_MODEL"], "messages": messages}).encode()
    headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
    answer = json.load(u.urlopen(u.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)))
    return answer["choices"][0]["message"]
messages = [{"role": "user", "content": json.load(open(os.environ["LEYDEN_TASK"]))["prompt"]}]
messages += [call(messages), {"role": "user", "content": "more"}]
open("answer.txt", "w").write(call(messages)["content"])
"""
GRADER = """
def grade(task, workspace):
    return 0.5 * ("reply" in (workspace / "answer.txt").read_text())
"""
MINI_CONFIG = """
agent: {system_template: "Be brief.", instance_template: "{{task}}", step_limit: 4, cost_limit: 0, mode: yolo}
environment: {timeout: 100}
model:
  model_class: litellm_textbased
  model_name: openai/policy
  cost_tracking: ignore_errors
  action_regex: "```bash\\\\s*\\\\n(.*?)\\\\n```"
  observation_template: "{{output.output}}"
  model_kwargs: {drop_params: true}
"""


async def run(gateway: Gateway, config: RunConfig, size: int, task: dict[str, Any]) -> list[Rollout]:
    """The rollouts of one group, after the controller brought them to their end."""
    stop = asyncio.Event()
    controller = asyncio.create_task(run_controller(config, gateway.url, control_key(SECRET), "local", stop=stop))
    (group,) = await gateway.client.create_groups([{"kind": "train", "step": 0, "slot": 0, "size": size, "task": task}])
    ended: dict[str, Rollout] = {}
    cursor = 0
    async with asyncio.timeout(500):
        while len(ended) < size and not controller.done():
            states = [s for s in RolloutState if s.terminal]
            rollouts, cursor = await gateway.client.rollouts(after=cursor, states=states, wait_s=2)
            ended |= {r.rollout_id: r for r in rollouts}
    stop.set()
    await controller
    return [ended[r.rollout_id] for r in group.rollouts]


async def test_rollouts_with_turns_and_rewards(tmp_path: Path, tokenizer_path: Path, gone: Left) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "grading.py").write_text(GRADER)
    config = make_config(
        tmp_path,
        tokenizer_path,
        harness={"command": [sys.executable, "{{ config_dir }}/agent.py"]},
        grader={"command": None, "function": "grading:grade"},
    )
    renderer = ModelRenderer(str(tokenizer_path), "qwen3", "template")
    async with serving(config, renderer) as gateway:
        rollouts = await run(gateway, config, 3, {"prompt": "hello"})
        turns = await gateway.client.turns([r.rollout_id for r in rollouts])
    assert [(r.state, r.attempt, r.turns, r.reward) for r in rollouts] == [(RolloutState.SUCCEEDED, 1, 2, 0.5)] * 3
    assert [r.forks for r in rollouts] == [{}, {}, {}]
    assert sorted(t.rollout_id for t in turns) == sorted(r.rollout_id for r in rollouts for _ in range(2))


async def test_mini_runs_in_a_fork_and_is_trained(tmp_path: Path, tokenizer_path: Path, gone: Left) -> None:
    (tmp_path / "mini.yaml").write_text(MINI_CONFIG)
    config = make_config(
        tmp_path,
        tokenizer_path,
        harness={
            "command": [
                "mini", "--config={{ config_dir }}/mini.yaml", "--task={{ task.prompt }}", "--yolo",
                "--exit-immediately", "--output={{ workspace }}/trajectory.json",
            ],
            "env": {
                "LITELLM_LOCAL_MODEL_COST_MAP": "True",
                "MSWEA_CONFIGURED": "true",
                "MSWEA_GLOBAL_CONFIG_DIR": "{{ run_dir }}/mini",
                "MSWEA_SILENT_STARTUP": "1",
            },
            "preload": ["minisweagent.run.mini", "minisweagent.models.litellm_textbased_model"],
        },
        grader={"command": ["sh", "-c", f"test -e made && {sys.executable} -c '{POST}'"]},
    )  # fmt: skip
    renderer = ModelRenderer(str(tokenizer_path), "qwen3", "template")
    replies = ["```bash\ntouch made\n```", "```bash\necho COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\n```"]
    engine = ScriptedEngine(renderer, list(replies))
    async with serving(config, renderer, engine=engine) as gateway:
        (rollout,) = await run(gateway, config, 1, {"prompt": "make it"})
    log = (config.run_dir / "attempts" / rollout.rollout_id / "1" / "harness.log").read_text()
    assert (rollout.state, rollout.turns, rollout.reward) == (RolloutState.SUCCEEDED, 2, 1.0), log


SELF_GRADED = (
    AGENT
    + """
from leyden.client import post_reward
how = json.load(open(os.environ["LEYDEN_TASK"]))["how"]
if "post" in how:
    post_reward(0.75)
if "twice" in how:
    try:
        post_reward(1.0)
    except Exception as error:
        open("refused", "w").write(str(error.status))
raise SystemExit("fail" in how)
"""
)


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("post", (RolloutState.SUCCEEDED, None, 0.75)),
        ("post twice", (RolloutState.SUCCEEDED, None, 0.75)),
        ("post, fail", (RolloutState.FAILED, FailureClass.AGENT, 0.75)),
        ("fail", (RolloutState.FAILED, FailureClass.AGENT, 0.0)),
        ("nothing", (RolloutState.FAILED, FailureClass.INFRASTRUCTURE, None)),
    ],
)
async def test_a_harness_that_grades_itself_posts_with_its_own_key(
    tmp_path: Path,
    tokenizer_path: Path,
    gone: Left,
    how: str,
    expected: tuple[RolloutState, FailureClass | None, float | None],
) -> None:
    (tmp_path / "agent.py").write_text(SELF_GRADED)
    config = make_config(
        tmp_path,
        tokenizer_path,
        harness={"command": [sys.executable, "{{ config_dir }}/agent.py"], "max_attempts": 1},
        grader={"command": None, "harness": True},
        workspace={"keep": "all"},
    )
    renderer = ModelRenderer(str(tokenizer_path), "qwen3", "template")
    async with serving(config, renderer) as gateway:
        (rollout,) = await run(gateway, config, 1, {"prompt": "hello", "how": how})
    assert (rollout.state, rollout.failure, rollout.reward) == expected
    assert (rollout.attempt, rollout.turns) == (1, 2)
    folder = config.run_dir / "attempts" / rollout.rollout_id / "1/workspace"
    refused = [path.read_text() for path in folder.glob("refused")]
    assert refused == (["409"] if "twice" in how else [])


POST = "from leyden.client import post_reward; post_reward(1)"
