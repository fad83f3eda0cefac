"""openai-agents with a tool; `chat` as an argument uses chat completions in place of Responses."""

import subprocess
import sys

from agents import Agent, Runner, function_tool, set_default_openai_api, set_tracing_disabled

set_tracing_disabled(True)
if sys.argv[2:] == ["chat"]:
    set_default_openai_api("chat_completions")


@function_tool
def shell(command: str) -> str:
    """Run a command."""
    return subprocess.run(command, shell=True, capture_output=True, text=True).stdout


agent = Agent("worker", instructions="You use a shell.", model="turnwright", tools=[shell])
print(Runner.run_sync(agent, sys.argv[1]).final_output)
