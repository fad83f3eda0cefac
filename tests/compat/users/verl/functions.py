"""Function tools: sync and async, text, dicts, responses, rewards, types of many kinds."""

import asyncio
from typing import Literal

from verl.tools.function_tool import function_tool
from verl.tools.schemas import ToolResponse


@function_tool
def get_weather(city: str) -> dict:
    """Get the current weather for a city.

    Args:
        city: The city to look up, e.g. "Tokyo".
    """
    return {"city": city, "temperature_c": 17.3}


@function_tool("calculator")
def evaluate(expression: str) -> str:
    """Add numbers.

    Args:
        expression: Numbers and plus signs, e.g. "3+4".
    """
    return str(sum(int(one) for one in expression.split("+")))


@function_tool
async def rate(
    thing: str, stars: Literal[1, 2, 3], note: str | None = None, tags: list[str] | None = None
) -> tuple:
    """Rate a thing.

    Args:
        thing: What to rate.
        stars: How good it is.
        note: A remark.
        tags: Words for it.
    """
    await asyncio.sleep(0)
    return (
        ToolResponse(text=f"{thing}: {stars} {note} {tags}"),
        0.5 if stars == 3 else None,
        {"stars": stars},
    )


@function_tool(
    "ping",
    schema={
        "type": "function",
        "function": {
            "name": "ping",
            "description": "Ping.",
            "parameters": {
                "type": "object",
                "properties": {"n": {"type": "integer"}},
                "required": ["n"],
            },
        },
    },
)
def ping(n):
    return "pong " * n, None


@function_tool
def fail(reason: str) -> str:
    """Fail.

    Args:
        reason: Why.
    """
    raise RuntimeError(reason)
