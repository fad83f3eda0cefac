"""smolagents; the second argument is the kind of agent: tools or code."""

import os
import subprocess
import sys

from smolagents import CodeAgent, OpenAIServerModel, ToolCallingAgent, tool


@tool
def shell(command: str) -> str:
    """Run a command.

    Args:
        command: the command.
    """
    return subprocess.run(command, shell=True, capture_output=True, text=True).stdout


model = OpenAIServerModel(
    "turnwright", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"]
)
kind = {"tools": ToolCallingAgent, "code": CodeAgent}[sys.argv[2]]
print(kind(tools=[shell], model=model).run(sys.argv[1]))
