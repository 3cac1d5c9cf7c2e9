"""OpenHands SDK with its terminal and file editor. STREAM=1: streamed."""

import os
import sys
from pathlib import Path

from openhands.sdk import LLM, Agent, Conversation, Tool
from openhands.tools.file_editor import FileEditorTool
from openhands.tools.preset.default import get_default_condenser
from openhands.tools.terminal import TerminalTool

stream = bool(os.environ.get("STREAM"))
llm = LLM(
    model=f"openai/{os.environ['LEYDEN_MODEL']}",
    api_key=os.environ["OPENAI_API_KEY"],
    base_url=os.environ["OPENAI_BASE_URL"],
    usage_id="agent",
    stream=stream,
)
agent = Agent(
    llm=llm,
    tools=[Tool(name=TerminalTool.name), Tool(name=FileEditorTool.name)],
    condenser=get_default_condenser(llm.model_copy(update={"usage_id": "condenser"})),
)
callbacks = {"token_callbacks": [lambda chunk: None]} if stream else {}
conversation = Conversation(agent=agent, workspace=str(Path.cwd()), **callbacks)
conversation.send_message(sys.argv[1])
conversation.run()
print(conversation.state.execution_status)
