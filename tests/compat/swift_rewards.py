"""Prints the verdicts of ms-swift's registered rewards beside ours, on generated completions:
`python swift_rewards.py`."""

import json
import random
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

sys.path[:0] = [str(Path(__file__).parents[1])]

from kit import originals  # noqa: E402

from turnwright.envs.user_imports import STAND_INS, import_foreign  # noqa: E402
from turnwright_compat.swift.adapter import REWARD_DEFAULTS  # noqa: E402

MANY = 300


def action(chance):
    """Return a call in ReAct's form, or what is nearly one."""
    name = chance.choice(["add", "sub", "add "])
    given = chance.choice(
        [
            '{"a": 1}',
            '{"a": 2}',
            '{"a": 1, "b": 2}',
            "{}",
            "1",
            "not JSON",
            '{"b": 2, "a": 1}',
            "[]",
        ]
    )
    form = chance.choice(
        [
            "Action: {0}\nAction Input: {1}",
            "Action: {0} {1}",
            "{0}",
            "Action Input: {1} Action: {0}",
        ]
    )
    end = chance.choice(["", "", "\nObservation:", "<|im_end|>"])
    return chance.choice(["", "<think>x</think> "]) + form.format(name, given) + end


def answer(chance):
    """Return an answer in a form that math graders read."""
    number = chance.choice(["4", "5", "\\frac{1}{2}", "0.5", "x", ""])
    form = chance.choice(
        [
            "\\boxed{%s}",
            "<answer>%s</answer>",
            "<think>x</think><answer>%s</answer>",
            "It is %s",
            "$%s$",
        ]
    )
    return form % number


def main() -> None:
    originals.use()
    theirs = import_module("swift.rewards.orm").orms
    ours = dict(import_foreign(f"{STAND_INS}.swift.rewards.orm").orms)
    chance = random.Random(0)
    words = [
        " ".join(chance.choices(["a", "b", "c", "A"], k=chance.randint(0, 8))) for _ in range(MANY)
    ]
    answers, actions = [answer(chance) for _ in range(MANY)], [action(chance) for _ in range(MANY)]
    ids = [[0] * chance.randint(0, 12) for _ in range(MANY)]
    args = SimpleNamespace(
        **REWARD_DEFAULTS, cosine_max_len=10, soft_max_length=10, soft_cache_length=4
    )
    completions = {
        "toolbench": actions,
        "react_format": actions,
        "repetition": words,
        "soft_overlong": words,
    }
    solutions = {"toolbench": chance.sample(actions, MANY)}
    found = {}
    for name, made in ours.items():
        given = completions.get(name, answers)
        columns = {
            "solution": solutions.get(name, ["\\boxed{4}", "$\\frac{1}{2}$", "5"] * (MANY // 3)),
            "response_token_ids": ids,
        }
        found[name] = [one(args)(given, **columns) for one in (made, theirs[name])]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
