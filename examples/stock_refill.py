"""Look at three shelves and order what is missing on each: seven turns."""

import json
import random

import turnwright as tw

GOODS = ("nuts", "rice", "salt", "tea", "oats", "corn")
FULL = 6


class Store:
    """A store with shelves that should have six of everything."""

    def __init__(self, stock: dict | None = None):
        self.stock = dict(stock or {})  # tasks are shared by the episodes of a group

    def look(self, item: str) -> str:
        """Count what is on a shelf.

        Args:
            item: the goods.
        """
        return f"{item} has {self.stock[item]}" if item in self.stock else f"no {item} here"

    def order(self, item: str, count: int) -> str:
        """Order goods.

        Args:
            item: the goods.
            count: how many.
        """
        if item not in self.stock:
            raise ValueError(f"no {item} here")
        self.stock[item] += count
        return f"{item} ordered"

    def calc_reward(self):
        return float(bool(self.stock) and all(count == FULL for count in self.stock.values()))


def tasks(split, n, seed):
    rng = random.Random(f"{split} {seed}")
    tasks = {}
    for _ in range(40 * n):
        goods = rng.sample(GOODS, 3)
        stock = {item: rng.randrange(1, FULL) for item in goods}
        if (sum(stock.values()) % 4 == 0) == (split == "eval"):
            row = {"Store": {"create_kwargs": {"stock": stock}}}
            task = tw.Task(f"fill {' '.join(goods)} to {FULL}", info={"tools_kwargs": row})
            tasks[task.id] = task
    return list(tasks.values())[:n]


def call(name, **arguments):
    return "<tool_call>" + json.dumps({"name": name, "arguments": arguments}) + "</tool_call>"


def solver(messages, rng):
    goods = messages[0].text.split()[1:4]
    found = [message.text for message in messages if message.role == "tool"]
    if found and " has " in found[-1]:
        item, _, count = found[-1].split()
        return call("order", item=item, count=FULL - int(count))
    ordered = {text.split()[0] for text in found if text.endswith("ordered")}
    left = [item for item in goods if item not in ordered]
    return call("look", item=left[0]) if left else "done"


def demonstrator(messages, rng):
    goods = messages[0].text.split()[1:4]
    if rng.random() < 0.85:
        return solver(messages, rng)
    return rng.choice(
        (
            call("look", item=rng.choice(goods)),
            call("order", item=rng.choice(goods), count=rng.randrange(1, FULL)),
        )
    )


env = tw.tool_env([Store], max_turns=10, tasks=tasks, solver=solver, demonstrator=demonstrator)
