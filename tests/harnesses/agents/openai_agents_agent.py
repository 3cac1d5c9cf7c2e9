"""OpenAI Agents SDK. API: responses (default), chat. STREAM=1: run_streamed."""

import asyncio
import os
import subprocess
import sys

from agents import Agent, Runner, function_tool, set_default_openai_api

if os.environ.get("API") == "chat":
    set_default_openai_api("chat_completions")


@function_tool
def bash(command: str) -> str:
    """Run a shell command."""
    return subprocess.run(command, shell=True, capture_output=True, text=True, check=False).stdout


async def main() -> None:
    agent = Agent(name="agent", instructions="You run commands.", tools=[bash], model=os.environ["LEYDEN_MODEL"])
    if os.environ.get("STREAM"):
        result = Runner.run_streamed(agent, sys.argv[1])
        async for _ in result.stream_events():
            pass
    else:
        result = await Runner.run(agent, sys.argv[1])
    print(repr(result.final_output))


asyncio.run(main())
