"""The worlds on which the papers compare, at the size of a tiny model."""

from __future__ import annotations

from pathlib import Path

from arms import ROOT, World

FROZEN_LAKE = World(
    name="frozen_lake",
    recipe=ROOT / "recipes" / "frozen_lake.toml",
    steps=60,
    changes={"env.0.args.size": 4},
)
SOKOBAN = World(name="sokoban", recipe=ROOT / "recipes" / "sokoban.toml", steps=40)
BANDIT = World(name="bandit", recipe=Path(__file__).with_name("bandit.toml"), steps=200)
