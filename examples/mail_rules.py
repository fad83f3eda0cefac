"""File letters by the rule of the opening: read one, move it, four times; nine turns."""

import json
import random

import turnwright as tw

KINDS = ("bill", "offer", "note", "card")
FOLDERS = ("red", "blue", "gold", "gray")
LETTERS = 4


class Mailbox:
    """Letters that are read in turn, and the folder of each kind."""

    def __init__(self, letters: list | None = None, rule: dict | None = None):
        self.letters = list(letters or [])
        self.rule = rule or {}
        self.open = None
        self.right = 0

    def read(self) -> str:
        """Open the next letter."""
        self.open = self.letters[0] if self.letters else None
        return f"a {self.open}" if self.open else "no more letters"

    def move(self, folder: str) -> str:
        """Move the open letter.

        Args:
            folder: the folder.
        """
        if self.open is None:
            raise ValueError("no letter is open")
        self.right += self.rule[self.letters.pop(0)] == folder
        self.open = None
        return f"{len(self.letters)} left"

    def calc_reward(self):
        return float(self.right == LETTERS)


def tasks(split, n, seed):
    rng = random.Random(f"{split} {seed}")
    tasks = {}
    for _ in range(40 * n):
        rule = dict(zip(KINDS, rng.sample(FOLDERS, 4), strict=True))
        letters = [rng.choice(KINDS) for _ in range(LETTERS)]
        number = FOLDERS.index(rule["bill"]) + sum(map(KINDS.index, letters))
        if (number % 5 == 0) == (split == "eval"):
            row = {"Mailbox": {"create_kwargs": {"letters": letters, "rule": rule}}}
            words = " ".join(f"{kind} {folder}" for kind, folder in rule.items())
            task = tw.Task(words, info={"tools_kwargs": row})
            tasks[task.id] = task
    return list(tasks.values())[:n]


def call(name, **arguments):
    return "<tool_call>" + json.dumps({"name": name, "arguments": arguments}) + "</tool_call>"


def solver(messages, rng):
    words = messages[0].text.split()
    rule = dict(zip(words[::2], words[1::2], strict=True))
    found = [message.text for message in messages if message.role == "tool"]
    if found and found[-1].startswith("a "):
        return call("move", folder=rule[found[-1].split()[1]])
    return "done" if found and found[-1] in ("0 left", "no more letters") else call("read")


def demonstrator(messages, rng):
    found = [message.text for message in messages if message.role == "tool"]
    if found and found[-1].startswith("a ") and rng.random() < 0.3:
        return call("move", folder=rng.choice(FOLDERS))
    return solver(messages, rng)


env = tw.tool_env([Mailbox], max_turns=10, tasks=tasks, solver=solver, demonstrator=demonstrator)
