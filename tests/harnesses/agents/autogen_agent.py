"""AutoGen AssistantAgent. STREAM=1: model_client_stream."""

import asyncio
import os
import subprocess
import sys

from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient


def bash(command: str) -> str:
    """Run a shell command."""
    return subprocess.run(command, shell=True, capture_output=True, text=True, check=False).stdout


async def main() -> None:
    info = {"vision": False, "function_calling": True, "json_output": True, "structured_output": True}
    client = OpenAIChatCompletionClient(model=os.environ["LEYDEN_MODEL"], model_info={**info, "family": "unknown"})
    agent = AssistantAgent(
        "agent",
        model_client=client,
        tools=[bash],
        max_tool_iterations=5,
        model_client_stream=bool(os.environ.get("STREAM")),
    )
    result = await agent.run(task=sys.argv[1])
    print(repr(result.messages[-1].content))
    await client.close()


asyncio.run(main())
