"""pydantic-ai with a tool; the second argument is the API: chat, responses or anthropic."""

import subprocess
import sys

from pydantic_ai import Agent

names = {
    "chat": "openai-chat:turnwright",
    "responses": "openai-responses:turnwright",
    "anthropic": "anthropic:turnwright",
}
agent = Agent(names[sys.argv[2]], instructions="You use a shell.")


@agent.tool_plain
def shell(command: str) -> str:
    """Run a command."""
    return subprocess.run(command, shell=True, capture_output=True, text=True).stdout


print(agent.run_sync(sys.argv[1]).output)
