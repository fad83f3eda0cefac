"""Inspect four parts of a machine, use the named tool on each that is broken, and start
it: seven turns or more."""

import json
import random

import turnwright as tw

PARTS = ("pump", "valve", "motor", "fan", "belt", "gear")
TOOLS = ("wrench", "oil", "tape", "file")


class Machine:
    """A machine whose parts need a tool each, or none."""

    def __init__(self, needs: dict | None = None):
        self.needs = needs or {}
        self.used = {}
        self.started = False

    def inspect(self, part: str) -> str:
        """Say what a part needs.

        Args:
            part: the part.
        """
        if part not in self.needs:
            raise ValueError(f"no {part} here")
        return f"{part} needs {self.needs[part] or 'nothing'}"

    def apply(self, tool: str, part: str) -> str:
        """Use a tool on a part.

        Args:
            tool: the tool.
            part: the part.
        """
        if part not in self.needs:
            raise ValueError(f"no {part} here")
        self.used[part] = tool
        return f"{part} treated"

    def start(self) -> str:
        """Start the machine."""
        self.started = True
        return "started"

    def calc_reward(self):
        broken = {part: tool for part, tool in self.needs.items() if tool}
        return float(self.started and self.used == broken)


def tasks(split, n, seed):
    rng = random.Random(f"{split} {seed}")
    tasks = {}
    for _ in range(40 * n):
        parts = rng.sample(PARTS, 4)
        tools = [rng.choice(TOOLS), rng.choice(TOOLS), rng.choice((*TOOLS, "")), ""]
        rng.shuffle(tools)
        needs = dict(zip(parts, tools, strict=True))
        if (sum(map(PARTS.index, parts[:2])) % 4 == 0) == (split == "eval"):
            task = tw.Task(
                f"repair {' '.join(parts)}",
                info={"tools_kwargs": {"Machine": {"create_kwargs": {"needs": needs}}}},
            )
            tasks[task.id] = task
    return list(tasks.values())[:n]


def call(name, **arguments):
    return "<tool_call>" + json.dumps({"name": name, "arguments": arguments}) + "</tool_call>"


def solver(messages, rng):
    parts = messages[0].text.split()[1:]
    found = [message.text for message in messages if message.role == "tool"]
    if found and " needs " in found[-1] and not found[-1].endswith("nothing"):
        part, _, tool = found[-1].split()
        return call("apply", tool=tool, part=part)
    inspected = {text.split()[0] for text in found if " needs " in text}
    left = [part for part in parts if part not in inspected]
    if left:
        return call("inspect", part=left[0])
    return "done" if found[-1] == "started" else call("start")


def demonstrator(messages, rng):
    parts = messages[0].text.split()[1:]
    chance = rng.random()
    if chance < 0.05:
        return call("start")
    if chance < 0.13:
        return call("apply", tool=rng.choice(TOOLS), part=rng.choice(parts))
    return solver(messages, rng)


env = tw.tool_env([Machine], max_turns=13, tasks=tasks, solver=solver, demonstrator=demonstrator)
