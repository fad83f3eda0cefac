"""Rows of sums for recipes/compat/swift_tips.toml: `python recipes/compat/swift_rows.py`
writes swift_tips/*.jsonl.

The warm-up's conversations are mostly wrong, with and without a second look in the same message:
the sum is left to learn.
"""

import json
import random
from pathlib import Path

NAMES = ("Ava", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hana")
THINGS = ("apples", "books", "coins", "eggs", "figs", "hats")
RIGHT, RIGHT_AFTER_TIP = 0.15, 0.25
TIP = "But wait. "


def problems() -> list[tuple[str, int, int]]:
    """All questions with their two numbers, in one random order."""
    numbers = [(first, second) for first in range(1, 6) for second in range(1, 6)]
    found = [
        (f"{name} has {a} {thing} and gets {b} more. How many now?", a, b)
        for name in NAMES
        for thing in THINGS
        for a, b in numbers
    ]
    random.Random(0).shuffle(found)
    return found


def work(first: int, second: int, rng: random.Random, chance: float) -> tuple[str, str]:
    """A demonstrator's line and answer, mostly wrong by at most two."""
    total = first + second + (0 if rng.random() < chance else rng.choice((-2, -1, 1, 2)))
    return f"{first} + {second} = {total}\n", f"#### {total}"


def row(question: str, first: int, second: int) -> dict:
    return {"messages": [{"role": "user", "content": question}], "solution": str(first + second)}


def conversation(question: str, first: int, second: int, rng: random.Random) -> dict:
    line, answer = work(first, second, rng, RIGHT)
    if rng.random() < 0.5:
        again, answer = work(first, second, rng, RIGHT_AFTER_TIP)
        line += TIP + again
    return {
        "messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": line + answer},
        ]
    }


def write(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    rng, found = random.Random(1), problems()
    train, held_out = found[:-200], found[-200:]
    files = {
        "train": [row(*one) for one in train],
        "eval": [row(*one) for one in held_out],
        "warmup": [conversation(*one, rng) for one in train * 3],
    }
    for name, rows in files.items():
        (folder / f"{name}.jsonl").write_text(
            "".join(json.dumps(one) + "\n" for one in rows), "utf-8"
        )


if __name__ == "__main__":
    write(Path(__file__).parent / "swift_tips")
