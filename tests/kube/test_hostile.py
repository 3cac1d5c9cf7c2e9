"""What hostile harnesses leave in their pods is graded as it is, in the first attempt; the next one is as ever."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from leyden.types import FailureClass, RolloutState
from tests.kube.cluster import Cluster
from tests.kube.runs import CALL, FOREVER, GRADE, brief, good, run

pytestmark = [pytest.mark.kube, pytest.mark.timeout(600)]
SUCCEEDED, FAILED = RolloutState.SUCCEEDED, RolloutState.FAILED
AGENT = FailureClass.AGENT
UNTOUCHED = 0.25
GRADER = f"grep -q right-answer $LEYDEN_TASK && {{ test -f score || echo {UNTOUCHED} > score; }} && {GRADE}"
NEST = "i=0; while [ $i -lt 1500 ]; do mkdir d; cd d; i=$((i+1)); done"
KILL = 'for p in /proc/[0-9]*; do grep -q "keeper[.]py" $p/cmdline && kill -9 ${p#/proc/}; done'

STOP = KILL.replace("kill -9", "kill -STOP")


@pytest.mark.parametrize(
    ("script", "end"),
    [
        (f"{NEST}; chmod 0 /workspace/d /workspace/score /workspace", (SUCCEEDED, None, 0.5, 1)),
        ("rm -rf $LEYDEN_TASK; echo x > $LEYDEN_TASK; rm -rf /leyden; true", (SUCCEEDED, None, 0.5, 1)),
        ("rm -rf /workspace; true", (SUCCEEDED, None, UNTOUCHED, 1)),
        (
            "rm score; ln -s /etc/passwd score; mkfifo p; touch \"$(printf 'a\\nb\\377')\"",
            (SUCCEEDED, None, UNTOUCHED, 1),
        ),
        ("head -c 3000000 /dev/zero > big", (FAILED, AGENT, UNTOUCHED, 1)),
        ("i=0; while [ $i -lt 3000 ]; do echo x > f$i; i=$((i+1)); done", (FAILED, AGENT, UNTOUCHED, 1)),
        (f"{KILL}; true", (FAILED, AGENT, UNTOUCHED, 1)),
        (f"{STOP}; true", (FAILED, AGENT, UNTOUCHED, 1)),
        (f"{STOP}; {FOREVER}", (FAILED, AGENT, UNTOUCHED, 1)),
        (f"trap '' TERM HUP INT; while :; do {FOREVER}; done", (FAILED, AGENT, 0.5, 1)),
    ],
    ids=[
        "deep and closed",
        "the task's file",
        "no workspace",
        "links, pipes, names",
        "too large",
        "too many files",
        "the keeper killed",
        "the keeper stopped",
        "the keeper stopped until the time-out",
        "deaf to SIGTERM",
    ],
)
async def test_a_hostile_harness_is_graded_as_it_is(
    kube: Cluster,
    namespace: str,
    tmp_path: Path,
    tokenizer_path: Path,
    python_image: str,
    script: str,
    end: tuple[Any, ...],
) -> None:
    sections = {
        "harness": {"timeout_s": 20, "max_attempts": 2},
        "grader": {"command": ["sh", "-c", GRADER]},
        "gateway": {"max_workspace_bytes": 2_000_000},
    }
    hostile = {"script": f"{CALL} && echo 0.5 > score; {script}", "answer": "right-answer"}
    async with run(kube, namespace, tmp_path, tokenizer_path, python_image, **sections) as it:
        assert brief(await it.ended(await it.add([hostile]), 240)) == [end]
        after = await it.ended(await it.add([good(answer="right-answer")]), 120)
        assert brief(after) == [(SUCCEEDED, None, 1.0, 1)]
        await it.nothing_left()
