"""Fill a form field by field, mend what it refuses, and send it: two tools, seven turns or more."""

import json
import random

import turnwright as tw

FIELDS = ("size", "count", "floor", "shelf", "door")


class Form:
    """A form with a digit for each field, of which it accepts another one than
    was ordered for some."""

    def __init__(self, right: dict | None = None):
        self.right = right or {}
        self.filled = {}
        self.sent = False

    def fill(self, field: str, value: int) -> str:
        """Fill a field.

        Args:
            field: its name.
            value: a digit.
        """
        if field not in self.right:
            raise ValueError(f"no field {field}")
        if self.sent:
            raise ValueError("the form is sent")
        self.filled[field] = value
        return "ok" if value == self.right[field] else f"{field} must be {self.right[field]}"

    def send(self) -> str:
        """Send the form."""
        self.sent = True
        return "sent"

    def calc_reward(self):
        return float(self.sent and self.filled == self.right)


def tasks(split, n, seed):
    rng = random.Random(f"{split} {seed}")
    tasks = {}
    for _ in range(40 * n):
        ordered = {field: rng.randrange(1, 10) for field in FIELDS}
        changed = {field: rng.randrange(1, 10) for field in rng.sample(FIELDS, rng.choice((1, 2)))}
        if (sum(ordered.values()) % 5 == 0) == (split == "eval"):
            row = {"Form": {"create_kwargs": {"right": ordered | changed}}}
            order = " ".join(f"{field} {value}" for field, value in ordered.items())
            task = tw.Task(order, info={"tools_kwargs": row})
            tasks[task.id] = task
    return list(tasks.values())[:n]


def call(name, **arguments):
    return "<tool_call>" + json.dumps({"name": name, "arguments": arguments}) + "</tool_call>"


def solver(messages, rng):
    words = messages[0].text.split()
    ordered = dict(zip(words[::2], words[1::2], strict=True))
    found = [message.text for message in messages if message.role == "tool"]
    if "sent" in found:
        return "done"
    if found and "must be" in found[-1]:
        field, *_, value = found[-1].split()
        return call("fill", field=field, value=int(value))
    done = found.count("ok")
    if done < len(FIELDS):
        return call("fill", field=FIELDS[done], value=int(ordered[FIELDS[done]]))
    return call("send")


def demonstrator(messages, rng):
    found = [message.text for message in messages if message.role == "tool"]
    chance = rng.random()
    if chance < 0.08 and found.count("ok") < len(FIELDS):
        return call("send")
    if chance < 0.2:
        return call("fill", field=FIELDS[min(found.count("ok"), 4)], value=rng.randrange(1, 10))
    return solver(messages, rng)


env = tw.tool_env([Form], max_turns=12, tasks=tasks, solver=solver, demonstrator=demonstrator)
