"""Find an hour at which two people are free, with two tools."""

import json
import random

import turnwright as tw

PEOPLE = ("ann", "bob", "cleo", "dan", "eve")
HOURS = ("8", "9", "10", "11", "12", "13", "14", "15")


class Calendar:
    """The calendars of a task."""

    def __init__(self, free: dict | None = None):
        self.free = free or {}
        self.booked = ""

    def hours(self, person: str) -> str:
        """Show the free hours of a person.

        Args:
            person: a name.
        """
        return " ".join(self.free[person]) if person in self.free else "nobody"

    def book(self, hour: str) -> str:
        """Book an hour for both.

        Args:
            hour: the hour.
        """
        self.booked = hour
        return "booked"

    def calc_reward(self):
        return float(bool(self.free) and all(self.booked in hours for hours in self.free.values()))


def tasks(split, n, seed):
    rng = random.Random(f"{split} {seed}")
    tasks = {}
    for _ in range(20 * n):
        one, other = rng.sample(PEOPLE, 2)
        both, *rest = rng.sample(HOURS, 3)
        free = {one: sorted([both, rest[0]], key=int), other: sorted([both, rest[1]], key=int)}
        if (sum(map(int, rest)) % 5 == 0) == (split == "eval"):
            row = {"Calendar": {"create_kwargs": {"free": free}}}
            task = tw.Task(f"meet {one} {other}", info={"tools_kwargs": row})
            tasks[task.id] = task
    return list(tasks.values())[:n]


def call(name, **arguments):
    return "<tool_call>" + json.dumps({"name": name, "arguments": arguments}) + "</tool_call>"


def solver(messages, rng):
    _, one, other = messages[0].text.split()
    found = [message.text for message in messages if message.role == "tool"]
    if len(found) < 2:
        return call("hours", person=(one, other)[len(found)])
    return (
        call("book", hour=next(hour for hour in found[0].split() if hour in found[1].split()))
        if len(found) == 2
        else "done"
    )


def demonstrator(messages, rng):
    found = [message.text for message in messages if message.role == "tool"]
    if len(found) == 2 and rng.random() < 0.6:
        return call("book", hour=rng.choice(found[0].split()))
    return solver(messages, rng)


env = tw.tool_env([Calendar], max_turns=5, tasks=tasks, solver=solver, demonstrator=demonstrator)
