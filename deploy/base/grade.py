"""The example's grader: 1 for the right answer, else 0. Runs in the agent's image, in what the agent left."""

import json
import os
import urllib.request
from pathlib import Path

task = json.loads(Path(os.environ["LEYDEN_TASK"]).read_text())
answer = Path("answer.txt")
reward = float(answer.is_file() and answer.read_text().strip() == task["answer"])
request = urllib.request.Request(  # noqa: S310  (Leyden's own URL)
    os.environ["LEYDEN_REWARD_URL"],
    data=json.dumps({"value": reward}).encode(),
    headers={"Authorization": f"Bearer {os.environ['LEYDEN_KEY']}", "Content-Type": "application/json"},
)
urllib.request.urlopen(request).close()  # noqa: S310
