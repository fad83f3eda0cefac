"""Whether the whole chain learns: a toy reward, longer is better, must rise within a minute."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from turnwise.config import EvalConfig, Limits, ModelConfig, ResolvedConfig, RolloutConfig, RunConfig, TrainConfig
from turnwise.config.show import to_json_dict
from turnwise.env import Action, Env, Step
from turnwise.env.resolve import as_env_spec
from turnwise.rollout.api import run_sync
from turnwise.trace import NullListener, RunDir, read_json_lines
from turnwise.train.run import TrainingRun
from turnwise.types import Task

TURN_TOKENS = 8
LONG = 40
"""Characters of a turn that earn the whole reward of the turn."""
STEPS = 20
ENDS = 5
"""Steps at either end of a run whose rewards are compared."""
SIGNIFICANT = 3.0
"""Standard errors that the rewards must have risen by."""


class LengthRewardEnv(Env):
    """Asks twice; each reply earns half a point for 40 characters, and less for fewer."""

    def __init__(self) -> None:
        self.turn = 0

    def reset(self, task: Task, *, seed: int | None = None) -> None:
        """Nothing is hidden: the task's own message opens the episode."""

    def step(self, action: Action) -> Step:
        """Pay for the length of a reply."""
        self.turn += 1
        reward = 0.5 * min(1.0, len(action.text) / LONG)
        return Step("And more?", reward=reward, terminated=self.turn == 2)


@dataclass(frozen=True, slots=True)
class LearningResult:
    """What became of one run."""

    algorithm: str
    before: float
    """Mean reward of the first steps, from 0 to 1."""
    after: float
    """Of the last ones."""
    errors: float
    """The difference in standard errors of the means of steps."""
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether the reward rose by more than luck."""
        return self.errors > SIGNIFICANT

    @property
    def text(self) -> str:
        """One line."""
        told = f"{self.algorithm}: reward {self.before:.2f} -> {self.after:.2f} in {STEPS} steps ({self.seconds:.0f} s)"
        return told if self.ok else f"{told}, which is not more than luck: {self.errors:.1f} standard errors"


def check_learning(algorithms: Sequence[str], *, model: Path | None = None, seed: int = 0) -> Iterator[LearningResult]:
    """Train on the toy reward with each algorithm, from the same weights, through the same parts as any run.

    Args:
        algorithms: names, or `file.py:function`.
        model: a model directory; none builds a tiny one with random weights.

    Raises:
        UsageError: for an algorithm or a model that cannot be used.
        TurnwiseError: when a run cannot go on.
    """
    for name in algorithms:
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            rewards = _train(name, model, Path(folder) / "run", seed)
        yield _judge(name, rewards, time.monotonic() - began)


def _train(name: str, model: Path | None, out: Path, seed: int) -> list[float]:
    config = RunConfig(
        out=str(out),
        seed=seed,
        model=ModelConfig(hidden=32, layers=1) if model is None else ModelConfig(path=str(model)),
        rollout=RolloutConfig(groups=4, group_size=8, sanity="off"),
        limits=Limits(turns=2, turn_tokens=TURN_TOKENS, on_turn_length="continue"),
        train=TrainConfig(
            algorithm=name, steps=STEPS, lr=1e-2 if model is None else 1e-5, schedule="constant", overlong_tokens=1000
        ),
        eval=EvalConfig(tasks=0, greedy=False),
    )
    tasks = [Task(f"Say something long about {thing}.", id=thing) for thing in ("rivers", "trees", "towns", "tea")]
    world = as_env_spec(LengthRewardEnv, name="longer", tasks=tasks)
    with RunDir(out) as run:
        run.write_json("config.json", to_json_dict(ResolvedConfig(config, {})))
        run_sync(TrainingRun(config, [world], run, NullListener()).play())
    return [row["reward"] for row in read_json_lines(out / "metrics.jsonl") if row.get("phase") == "train"]


def _judge(name: str, rewards: Sequence[float], seconds: float) -> LearningResult:
    first, last = rewards[:ENDS], rewards[-ENDS:]
    before, after = (math.fsum(part) / ENDS for part in (first, last))
    squares = sum((r - before) ** 2 for r in first) + sum((r - after) ** 2 for r in last)
    error = math.sqrt(squares / (ENDS - 1) / ENDS)
    rise = after - before
    return LearningResult(
        name, before, after, rise / error if error else math.copysign(math.inf, rise) if rise else 0.0, seconds
    )
