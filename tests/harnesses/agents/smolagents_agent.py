"""smolagents ToolCallingAgent. STREAM=1: stream_outputs."""

import os
import subprocess
import sys

from smolagents import OpenAIModel, ToolCallingAgent, tool


@tool
def bash(command: str) -> str:
    """Run a shell command.

    Args:
        command: the command
    """
    return subprocess.run(command, shell=True, capture_output=True, text=True, check=False).stdout


model = OpenAIModel(
    model_id=os.environ["LEYDEN_MODEL"],
    api_base=os.environ["OPENAI_BASE_URL"],
    api_key=os.environ["OPENAI_API_KEY"],
)
agent = ToolCallingAgent(tools=[bash], model=model, stream_outputs=bool(os.environ.get("STREAM")))
print(agent.run(sys.argv[1]))
