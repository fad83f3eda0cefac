"""The agent of react_hop.py as episodes: it stays loaded, and each episode has
an address of its own."""

import react_hop
from openai import OpenAI

from turnwright_serve import program

# One pool of connections for all episodes.
CLIENT = OpenAI(base_url="http://127.0.0.1", api_key="none")


def agent(endpoint):
    """Run the program once."""
    client = CLIENT.with_options(base_url=endpoint.base_url, api_key=endpoint.key)
    return react_hop.solve(client, endpoint.task.messages[0].text, endpoint.task.info["table"])


play = program(agent, score=lambda result: float(result.output == result.task.answer))
