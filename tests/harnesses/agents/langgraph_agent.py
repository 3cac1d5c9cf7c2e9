"""LangChain's create_agent (LangGraph). API: chat (default), responses, anthropic. STREAM=1: streamed."""

import os
import subprocess
import sys

from langchain.agents import create_agent


def bash(command: str) -> str:
    """Run a shell command."""
    return subprocess.run(command, shell=True, capture_output=True, text=True, check=False).stdout


def chat_model():
    api, streaming = os.environ.get("API", "chat"), bool(os.environ.get("STREAM"))
    if api == "anthropic":
        from langchain_anthropic import ChatAnthropic

        return ChatAnthropic(model=os.environ["LEYDEN_MODEL"], streaming=streaming)
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(model=os.environ["LEYDEN_MODEL"], streaming=streaming, use_responses_api=api == "responses")


agent = create_agent(chat_model(), [bash], system_prompt="You run commands.")
result = agent.invoke({"messages": [("user", sys.argv[1])]})
print(repr(result["messages"][-1].content))
