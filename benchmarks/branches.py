"""What branches cost: ids to train on as chains and branches, against a row
for each call of the model.

    python benchmarks/branches.py

Played are the solvers of hop and hop_json, which think aloud, and a walk of more turns, under a
template that strips thinking (`--template` takes another, by name or file). Counted are the ids
that a trainer computes: a row per leaf as it does today, the nodes of the tree (each shared id
once, what a trainer of trees would compute), and a row for each call, prompt and reply; and the CPU
time of a turn, all of it but the model. Last line JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import turnwright as tw
from turnwright.envs import as_env_spec
from turnwright.renderers import ChatRenderer, ChatTemplate, HFTokenizer
from turnwright.renderers.template import find_source
from turnwright.training.model.models import train_tokenizer

COLUMNS = (
    "turns",
    "rows",
    "ids_leaves",
    "ids_tree",
    "ids_calls",
    "leaves_of_calls",
    "tree_of_calls",
    "ms_per_turn",
)


class Walk(tw.Env):
    """A walk of so many steps; the model says where it is and goes on."""

    def __init__(self, turns: int) -> None:
        self.turns = turns

    def reset(self, task: tw.Task, *, seed: int | None = None) -> str:
        self.left = self.turns
        return "You stand at a gate. Which way do you go, and why?"

    def step(self, action: tw.Action) -> tw.Step:
        self.left -= 1
        return tw.Step(
            f"You went on for a while. {self.left} crossings are left. Which way?",
            terminated=self.left == 0,
        )

    @staticmethod
    def tasks(split: str, n: int, seed: int) -> list[tw.Task]:
        return [tw.Task(id=f"{split} {number}") for number in range(n)]

    @staticmethod
    def solver(messages: Sequence[tw.Message], rng: Any) -> str:
        way = rng.choice(("left", "right"))
        return (
            f"<think>\nI was told: {messages[-1].text} I have no map. The {way} path looks "
            f"dry.\n</think>\n\nI go {way}."
        )


def renderer_of(name: str, texts: Sequence[str]) -> ChatRenderer:
    source, origin = find_source(name)
    return ChatRenderer(HFTokenizer(train_tokenizer(texts)), ChatTemplate(source, origin=origin))


def measure(world: Any, template: str, history: str, episodes: int) -> dict[str, Any]:
    """One set of episodes: its ids by layout, and its branches by reason."""
    text = renderer_of(template, list(world.texts(200, 0)))
    tasks = world.tasks("train", episodes, 0)
    engine = tw.ScriptedEngine(world.solver)
    limits = tw.Limits(turns=64, turn_tokens=512)
    began = time.process_time()
    rows = tw.rollout(world.factory, tasks, engine, renderer=text, limits=limits, history=history)
    spent = time.process_time() - began
    assert all(row.error is None for row in rows), next(row.error for row in rows if row.error)
    branches: Counter[str] = Counter()
    for row in rows:
        branches.update(row.branches)
    samples = [list(row.samples()) for row in rows]
    calls = sum(
        turn.context + sum(len(row.spans[i].ids) for i in turn.spans)
        for row in rows
        for turn in row.turns
    )
    leaves = sum(len(sample.ids) for own in samples for sample in own)
    tree = sum(len(span.ids) for row in rows for span in row.spans)
    sampled = sum(row.sampled_tokens for row in rows)
    assert sampled == sum(sum(sample.weights) for own in samples for sample in own)
    return {
        "turns": round(sum(len(row.turns) for row in rows) / len(rows), 2),
        "rows": round(sum(map(len, samples)) / len(rows), 2),
        "sampled": sampled,
        "ids_leaves": leaves,
        "ids_tree": tree,
        "ids_calls": calls,
        "leaves_of_calls": round(leaves / calls, 3),
        "tree_of_calls": round(tree / calls, 3),
        "ms_per_turn": round(1e3 * spent / sum(len(row.turns) for row in rows), 2),
        "branches": dict(branches),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--template", default="qwen3_without_thinking")
    parser.add_argument("--episodes", type=int, default=64)
    given = parser.parse_args()
    worlds = {
        "hop": tw.resolve_env(_env("hop")),
        "hop_json": tw.resolve_env(_env("hop_json")),
    }
    for turns in (4, 8, 16, 32):
        worlds[f"walk of {turns}"] = as_env_spec(Walk, args={"turns": turns})
    found: dict[str, Any] = {}
    heads = ("turns", "rows", "leaves", "tree", "calls", "leaves/calls", "tree/calls", "ms/turn")
    print(
        f"{'episodes':12} {'history':9}" + "".join(f" {head:>12}" for head in heads) + "  branches"
    )
    for name, world in worlds.items():
        for history in ("append", "template"):
            row = found[f"{name}, {history}"] = measure(
                world, given.template, history, given.episodes
            )
            cells = [row[key] for key in COLUMNS]
            print(
                f"{name:12} {history:9}"
                + "".join(f" {cell:12}" for cell in cells)
                + f"  {row['branches'] or ''}"
            )
    print(json.dumps(found))


def _env(name: str) -> Any:
    from turnwright.config import EnvConfig

    return EnvConfig(use=name, args={"think": True})


if __name__ == "__main__":
    main()
