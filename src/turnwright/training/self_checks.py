"""End-to-end checks of learning and vision, as `turnwright check` runs them.

`check_vision` tests whether a model's answers depend on its images, at the first turn and at later
ones. A model can stop using images without any error: dropped pixel values after the first turn,
placeholders that do not match, or a tower whose output is unused. The check plays a short
conversation with an image per turn. It then replaces the image of one turn by a grey one of its
size, with all ids unchanged, and scores that turn's answer again.

`check_learning` trains on a toy reward with each algorithm, as in any run, and tests whether the
reward rises.
"""

from __future__ import annotations

import asyncio
import math
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from turnwright.config import (
    EvalConfig,
    Limits,
    ModelConfig,
    ResolvedConfig,
    RolloutConfig,
    RunConfig,
    TrainConfig,
)
from turnwright.config.dump import to_json_dict
from turnwright.engines.local import LocalEngine
from turnwright.envs import Action, Env, Step
from turnwright.envs.resolve import as_env_spec
from turnwright.errors import MediaError, ModelError
from turnwright.media import MediaStore
from turnwright.records import NullListener, RunDir, read_json_lines
from turnwright.rollouts import Rollout, make_episode_specs
from turnwright.rollouts.rollout_settings import RolloutSettings
from turnwright.rollouts.standalone import run_sync
from turnwright.training.run import TrainingRun
from turnwright.training.setup import load_model_and_renderer
from turnwright.training.trainer.mismatch import mismatch_bound
from turnwright.training.trainer.trainer import Trainer
from turnwright.types import Image, ImageRef, MediaPlacement, Message, Task, Trajectory

TURNS = (1, 3)
"""Turns whose image is replaced, counted from 1."""
EPISODES = 4
REPLY_TOKENS = 12
SIDE = 64
"""Side length of the images in pixels."""
MARGIN = 10.0
"""Minimum change of an answer that depends on its image, as a multiple of the engine-trainer
difference."""


@dataclass(frozen=True, slots=True)
class VisionCheck:
    """Result of `check_vision`: maximum log-probability differences over all tokens, in nats."""

    disagreement: float
    """Difference of engine and trainer, images present."""
    bound: float
    """Maximum allowed disagreement."""
    moved: dict[int, float]
    """Turn -> change of the answer's log-probabilities without its image."""

    @property
    def agrees(self) -> bool:
        """Whether engine and trainer agree."""
        return self.disagreement <= self.bound

    def depends_on_image(self, turn: int) -> bool:
        """Return whether the answer of a turn depends on its image."""
        return self.moved[turn] > MARGIN * max(self.disagreement, 1e-7)


class RandomImagesEnv(Env):
    """Environment with a new image of random color blocks each turn."""

    def reset(self, task: Task, *, seed: int | None = None) -> Message:
        """Return the first image."""
        self._rng = random.Random(f"{task.id}/{seed}")
        self._left = max(TURNS)
        return self._image()

    def step(self, action: Action) -> Step:
        """Return the next image, or end the episode."""
        self._left -= 1
        if self._left == 0:
            return Step(None, terminated=True)
        return Step(self._image())

    def _image(self) -> Message:
        import numpy as np

        rng = np.random.default_rng(self._rng.getrandbits(32))
        blocks = rng.integers(0, 256, (4, 4, 3), dtype=np.uint8)
        picture = blocks.repeat(SIDE // 4, axis=0).repeat(SIDE // 4, axis=1)
        return Message("user", (Image(picture), "What does it show?"))


def check_vision(directory: str | Path) -> VisionCheck:
    """Check a vision-language model directory in the local engine and in the trainer.

    Raises:
        ModelError: when it cannot be used, or its model has no vision.
        EngineError: when the local engine cannot run it.
    """
    source = Path(directory)
    module, renderer = load_model_and_renderer(source, source, ModelConfig(path=str(source)))
    if renderer.vision is None:
        raise ModelError(f"{source}: the model has no vision: its config.json has no vision_config")

    limits = Limits(turns=max(TURNS), turn_tokens=REPLY_TOKENS, on_turn_length="continue")
    engine = LocalEngine(module, renderer=renderer)
    store = MediaStore()
    rollout = Rollout(engine, renderer, RolloutSettings(limits=limits, sanity="off"), media=store)
    trainer = Trainer(module, TrainConfig(), banned_ids=renderer.banned_ids, pixels=rollout.pixels)
    tasks = [Task(answer=number) for number in range(EPISODES)]
    episodes = make_episode_specs(RandomImagesEnv, tasks, phase="probe", step=0)

    async def play() -> list[Trajectory]:
        try:
            return await rollout.play(episodes)
        finally:
            await engine.close()

    played = asyncio.run(play())
    complete = [trajectory for trajectory in played if len(trajectory.turns) >= max(TURNS)]
    if not complete:
        raise ModelError(
            f"{source}: no conversation reached turn {max(TURNS)}: each ended in a misplaced "
            "control token"
        )

    gaps: list[float] = []
    moved = dict.fromkeys(TURNS, 0.0)
    for trajectory, seeing in zip(complete, trainer.logprobs(complete), strict=True):
        gaps += _gaps(seeing, _engine_logprobs(trajectory))
        for number in TURNS:
            (blind,) = trainer.logprobs([_without(trajectory, number - 1, store)])
            reply = _reply_ids(trajectory, number)
            moved[number] = max(moved[number], *_gaps(seeing[reply], blind[reply]))
    return VisionCheck(max(gaps), mismatch_bound(TrainConfig(), trainer.dtype) or 5e-2, moved)


def _gaps(logprobs: Sequence[float], others: Sequence[float]) -> list[float]:
    return [abs(a - b) for a, b in zip(logprobs, others, strict=True)]


def _engine_logprobs(trajectory: Trajectory) -> list[float]:
    """Return the engine's logprobs of all sampled ids."""
    logprobs: list[float] = []
    for span in trajectory.spans:
        if span.sampled:
            logprobs += [float(logp) for logp in span.logprobs or () if logp is not None]
    return logprobs


def _reply_ids(trajectory: Trajectory, number: int) -> slice:
    """Return the place of a turn's ids among all sampled ones."""
    sizes: list[int] = []
    for turn in trajectory.turns[:number]:
        sizes.append(sum(len(trajectory.spans[index].ids) for index in turn.spans))
    return slice(sum(sizes[:-1]), sum(sizes))


def findings(check: VisionCheck) -> list[tuple[bool | None, str]]:
    """Format the result as lines, each with whether it passed."""
    rows: list[tuple[bool | None, str]] = [
        (
            check.agrees,
            f"engine and trainer agree on log-probabilities with images: {check.disagreement:.1e} "
            f"nats at most (allowed {check.bound:.0e})",
        )
    ]
    for turn, moved in check.moved.items():
        text = (
            f"turn {turn}: a grey image instead of its own changes the answer by up to "
            f"{moved:.2g} nats"
        )
        depends = check.depends_on_image(turn)
        if not depends:
            text = f"{text}: the answer does not depend on the pixels"
        rows.append((depends, text))
    return rows


def _without(trajectory: Trajectory, turn: int, store: MediaStore) -> Trajectory:
    """Replace the last image before a turn's reply by a grey one."""
    index = trajectory.turns[turn].prompt
    while not trajectory.spans[index].media:
        index = trajectory.spans[index].parent
        if index < 0:
            raise MediaError(f"turn {turn + 1} has no image")

    span = trajectory.spans[index]
    spans: list[Any] = list(trajectory.spans)
    spans[index] = replace(span, media=tuple(_grey(block, store) for block in span.media))
    return replace(trajectory, spans=spans)


def _grey(block: MediaPlacement, store: MediaStore) -> MediaPlacement:
    image = block.media
    assert isinstance(image, ImageRef)
    pixels = store.pixels(replace(image, max_pixels=0))
    return block._replace(media=replace(image, sha256=store.add(pixels * 0 + 128).sha256))


TURN_TOKENS = 8
LONG = 40
"""Characters of a turn that earn its full reward."""
STEPS = 20
ENDS = 5
"""Steps at each end of a run whose rewards are compared."""
SIGNIFICANT = 3.0
"""Minimum rise of the reward in standard errors."""


class LengthRewardEnv(Env):
    """Two-turn environment; each reply earns half a point for 40 characters, and less for fewer."""

    def __init__(self) -> None:
        self.turn = 0

    def reset(self, task: Task, *, seed: int | None = None) -> None:
        """Return no message; the task's own prompt starts the episode."""

    def step(self, action: Action) -> Step:
        """Reward the length of a reply."""
        self.turn += 1
        reward = 0.5 * min(1.0, len(action.text) / LONG)
        return Step("And more?", reward=reward, terminated=self.turn == 2)


@dataclass(frozen=True, slots=True)
class LearningResult:
    """Result of one training run."""

    algorithm: str
    before: float
    """Mean reward of the first steps, from 0 to 1."""
    after: float
    """Mean reward of the last steps."""
    errors: float
    """Difference in standard errors of the means over steps."""
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether the reward rose significantly."""
        return self.errors > SIGNIFICANT

    @property
    def text(self) -> str:
        """The result in one line."""
        text = (
            f"{self.algorithm}: reward {self.before:.2f} -> {self.after:.2f} in {STEPS} steps "
            f"({self.seconds:.0f} s)"
        )
        if self.ok:
            return text
        return f"{text}, which is not significant: {self.errors:.1f} standard errors"


def check_learning(
    algorithms: Sequence[str], *, model: Path | None = None
) -> Iterator[LearningResult]:
    """Train on a toy reward with each algorithm, from the same weights (a tiny random model by
    default), as in any run."""
    for name in algorithms:
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            rewards = _train(name, model, Path(folder) / "run")
        yield _judge(name, rewards, time.monotonic() - began)


def _train(name: str, model: Path | None, out: Path) -> list[float]:
    if model is None:
        model_config = ModelConfig(hidden=32, layers=1)
        lr = 1e-2
    else:
        model_config = ModelConfig(path=str(model))
        lr = 1e-5
    config = RunConfig(
        out=str(out),
        model=model_config,
        rollout=RolloutConfig(groups=4, group_size=8, sanity="off"),
        limits=Limits(turns=2, turn_tokens=TURN_TOKENS, on_turn_length="continue"),
        train=TrainConfig(
            algorithm=name,
            steps=STEPS,
            lr=lr,
            schedule="constant",
            overlong_tokens=1000,
        ),
        eval=EvalConfig(tasks=0, greedy=False),
    )
    tasks = [
        Task(f"Say something long about {thing}.", id=thing)
        for thing in ("rivers", "trees", "towns", "tea")
    ]
    env_spec = as_env_spec(LengthRewardEnv, name="longer", tasks=tasks)

    with RunDir(out) as run:
        run.write_json("config.json", to_json_dict(ResolvedConfig(config, {})))
        run_sync(TrainingRun(config, [env_spec], run, NullListener()).play())
    rows = read_json_lines(out / "metrics.jsonl")
    return [row["reward"] for row in rows if row.get("phase") == "train"]


def _judge(name: str, rewards: Sequence[float], seconds: float) -> LearningResult:
    """Compare the rewards of the first steps with those of the last."""
    first = rewards[:ENDS]
    last = rewards[-ENDS:]
    before = math.fsum(first) / ENDS
    after = math.fsum(last) / ENDS
    rise = after - before

    # Standard error of the difference of the two means.
    squares = sum((reward - before) ** 2 for reward in first)
    squares += sum((reward - after) ** 2 for reward in last)
    error = math.sqrt(squares / (ENDS - 1) / ENDS)
    if error:
        errors = rise / error
    else:
        errors = math.copysign(math.inf, rise) if rise else 0.0
    return LearningResult(name, before, after, errors, seconds)
