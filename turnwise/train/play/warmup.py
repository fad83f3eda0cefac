"""Supervised training on a scripted player's episodes, until the model does well enough for reinforcement to begin."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path

from turnwise.config import RunConfig
from turnwise.engine import ScriptedEngine
from turnwise.env.world import EnvSpec
from turnwise.errors import ConfigError, TurnwiseError
from turnwise.media import MediaStore
from turnwise.render.chat import ChatRenderer
from turnwise.render.history import History
from turnwise.rollout import Rollout
from turnwise.train.play.conversations import conversations
from turnwise.train.play.evaluate import EvalResult
from turnwise.train.play.plan import TaskChoice
from turnwise.types import Trajectory


async def demonstrations(
    worlds: Sequence[EnvSpec],
    choices: Sequence[TaskChoice],
    renderer: ChatRenderer,
    config: RunConfig,
    history: History,
    media: MediaStore | None = None,
    note: Callable[[str], None] = lambda _: None,
) -> list[Trajectory]:
    """`warmup.demos` episodes of the worlds' demonstrators, or the conversations of `warmup.dataset`, through the loop that the
    model will play in.

    Args:
        media: where their images are kept: the store that the trainer looks into.
        note: told what is left out of a dataset.

    Raises:
        ConfigError: when no world has a demonstrator or solver.
        TaskError: when a dataset cannot be read, or has nothing to learn from.
        TurnwiseError: when most of them fail.
    """
    if config.warmup.dataset is not None:
        limits, most = config.limits, config.warmup.demos
        path = Path(config.warmup.dataset)
        return await conversations(path, renderer, limits=limits, history=history, most=most, media=media, note=note)
    speakers = {world.name: world.demonstrator or world.solver for world in worlds}
    able = [choice for choice in choices if speakers[choice.world.name] is not None and choice.world.factory is not None]
    if not able:
        raise ConfigError("warmup.demos is over 0 but no environment has a demonstrator or solver; set warmup.demos = 0")
    found: list[Trajectory] = []
    total = sum(world.weight for world in {choice.world.name: choice.world for choice in able}.values())
    for world in worlds:
        speaker = speakers[world.name]
        own = [choice for choice in able if choice.world is world]
        if not own or speaker is None:
            continue
        count = max(1, round(config.warmup.demos * world.weight / total))
        rollout = Rollout(
            ScriptedEngine(speaker),
            renderer,
            limits=config.limits,
            seed=config.seed,
            stop=config.rollout.stop,
            history=history,
            media=media,
        )
        # Tasks are used again when there are fewer than demonstrations; the sample's number then tells them apart.
        episodes = [own[i % len(own)].episode("demonstrate", 0, i // len(own)) for i in range(count)]
        found.extend(await rollout.play(episodes))
    good = [trajectory for trajectory in found if trajectory.stop is not None and not trajectory.stop.failed]
    if len(good) * 2 < len(found):
        error = next(t.error for t in found if t.error is not None)
        raise TurnwiseError(
            f"{len(found) - len(good)} of {len(found)} demonstrations failed, the first with {error.type}: {error.message}"
        )
    return good


def sample_demos(demos: Sequence[Trajectory], config: RunConfig, step: int) -> list[Trajectory]:
    """The demonstrations of one step, drawn with equal chances (buckets by length would favour the middle lengths)."""
    rng = random.Random(f"{config.seed}/warmup/{step}")
    return rng.choices(demos, k=config.warmup.batch)


def learning_rate(config: RunConfig, step: int) -> float:
    """Ten steps up, then a cosine down to a tenth of the peak at `warmup.steps`."""
    warmup = config.warmup
    rise = min(1.0, (step + 1) / 10)
    fall = 0.1 + 0.45 * (1 + math.cos(math.pi * min(step / warmup.steps, 1.0)))
    return warmup.lr * rise * fall


def unmet_gate(config: RunConfig, score: EvalResult, loss: float) -> str:
    """What is still missing before reinforcement may begin; empty when nothing is."""
    warmup = config.warmup
    missing = []
    if score.success < warmup.gate_success:
        missing.append(f"success is {score.success:.2f}, warmup.gate_success {warmup.gate_success:g}")
    if warmup.gate_loss is not None and loss > warmup.gate_loss:
        missing.append(f"loss is {loss:.3f}, warmup.gate_loss {warmup.gate_loss:g}")
    return " and ".join(missing)
