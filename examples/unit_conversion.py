"""Convert a length with a tool, then say the result."""

import json
import random

import turnwright as tw

UNITS = {"hand": 4, "foot": 12, "yard": 36, "fathom": 72, "rod": 198}


def convert(count: int, unit: str) -> str:
    """Convert to inches.

    Args:
        count: how many.
        unit: the unit.
    """
    if unit not in UNITS:
        raise ValueError(f"no unit {unit}")
    return str(count * UNITS[unit])


def correct(trajectory):
    return float(trajectory.final_text.strip() == trajectory.task.answer)


def tasks(split, n, seed):
    pairs = [(count, unit) for count in range(2, 60) for unit in UNITS]
    kept = [pair for number, pair in enumerate(pairs) if (number % 7 == 0) == (split == "eval")]
    chosen = random.Random(seed).sample(kept, min(n, len(kept)))
    return [
        tw.Task(f"inches of {count} {unit}", answer=str(count * UNITS[unit]))
        for count, unit in chosen
    ]


def solver(messages, rng):
    if messages[-1].role == "tool":
        return messages[-1].text
    _, _, count, unit = messages[-1].text.split()
    return (
        "<tool_call>"
        + json.dumps({"name": "convert", "arguments": {"count": int(count), "unit": unit}})
        + "</tool_call>"
    )


def demonstrator(messages, rng):
    if messages[-1].role != "tool" and rng.random() < 0.6:
        unit = rng.choice(list(UNITS))
        return solver([tw.Message("user", f"inches of {messages[-1].text.split()[2]} {unit}")], rng)
    return solver(messages, rng)


env = tw.tool_env(
    [convert], correct, max_turns=3, tasks=tasks, solver=solver, demonstrator=demonstrator
)
