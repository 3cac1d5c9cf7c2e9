"""Runs mini-swe-agent's own command-line function once for each line of stdin: its imports are paid once.

A line is `{"url", "key", "mode", "task"}`; the answer to it `{"status", "calls"}`. What mini prints goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

TEXT_MODE: dict[str, Any] = {"model_class": "litellm_textbased", "config_spec": ["mini_textbased.yaml"]}
TOOL_MODE: dict[str, Any] = {"model_class": None, "config_spec": ["mini.yaml"]}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with tempfile.TemporaryDirectory() as home:
        os.environ |= {
            "MSWEA_GLOBAL_CONFIG_DIR": home,
            "MSWEA_CONFIGURED": "true",
            "MSWEA_SILENT_STARTUP": "1",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        }
        from minisweagent.run import mini

        for line in sys.stdin:
            answers.write(json.dumps(run(mini, json.loads(line))) + "\n")
            answers.flush()


def run(mini: Any, asked: dict[str, str]) -> dict[str, Any]:
    os.environ |= {"OPENAI_BASE_URL": asked["url"], "OPENAI_API_KEY": asked["key"]}
    started = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            agent = mini.main(
                model_name="openai/policy",
                agent_class=None,
                environment_class=None,
                task=asked["task"],
                yolo=True,
                cost_limit=None,
                output=None,
                exit_immediately=True,
                **(TEXT_MODE if asked["mode"] == "text" else TOOL_MODE),
            )
        finally:
            os.chdir(started)
    return {"status": agent.messages[-1].get("extra", {}).get("exit_status"), "calls": agent.n_calls}


if __name__ == "__main__":
    main()
