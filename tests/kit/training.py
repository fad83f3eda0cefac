"""Trajectories and models by hand, for the tests of training."""

from __future__ import annotations

import random

import torch
from torch import nn

from turnwright.config import TrainConfig
from turnwright.training import resolve_settings
from turnwright.training.advantages import CreditSettings
from turnwright.training.baselines import RunningBaselines
from turnwright.types import EpisodeKey, Group, Origin, Span, StopReason, Task, Trajectory

WORDS = ["amber", "birch", "cedar", "dune", "ember", "fjord", "grove", "heath", "islet", "jade"]


def example_texts(count: int = 60) -> list[str]:
    rng = random.Random(0)
    return [
        f"<|im_start|>user\ncode of {rng.choice(WORDS)}<|im_end|>\n<|im_start|>assistant\nlookup "
        f"{rng.choice(WORDS)}<|im_end|>\n<|im_start|>user\nsee "
        f"{rng.choice(WORDS)}<|im_end|>\n<|im_start|>assistant\nanswer "
        f"{rng.randint(0, 9)}<|im_end|>"
        for _ in range(count)
    ]


def credit_settings(config: TrainConfig) -> CreditSettings:
    """How a trainer of this configuration makes advantages of rewards."""
    settings = resolve_settings(config)
    running = RunningBaselines().of
    return CreditSettings.of(config, settings.advantage, settings.refill, running)


M, E, P = Origin.MODEL, Origin.ENV, Origin.PROMPT


def chain(pieces, *, task="t", sample=0, reward=0.0, logprob=-1.0) -> Trajectory:
    """A trajectory of one path from (origin, ids) pieces."""
    spans: list[Span] = []
    for origin, ids in pieces:
        start = spans[-1].end if spans else 0
        more = {"logprobs": [logprob] * len(ids), "version": 0} if origin is M else {}
        spans.append(Span(origin, list(ids), len(spans) - 1, start, **more))
    return Trajectory(
        Task(task, id=task),
        EpisodeKey("train", 0, task, sample),
        spans,
        reward=reward,
        stop=StopReason.DONE,
    )


def branched(trajectory: Trajectory) -> Trajectory:
    """The same episode with every reply on a root of its own, as if history had been
    written anew each turn."""
    spans: list[Span] = []
    for index, span in enumerate(trajectory.spans):
        if span.sampled:
            spans.append(Span(P, trajectory.path(span.parent)[: span.start]))
            spans.append(
                Span(
                    M,
                    span.ids,
                    len(spans) - 1,
                    span.start,
                    span.logprobs,
                    span.version,
                    untrained=span.untrained,
                )
            )
        assert index >= 0
    return Trajectory(
        trajectory.task, trajectory.key, spans, reward=trajectory.reward, stop=trajectory.stop
    )


def random_groups(
    seed=0, *, groups=4, size=4, vocabulary=50, turns=3, low=2, high=6, rewards=(0.0, 1.0)
) -> list[Group]:
    """Groups of multi-turn chains of uneven lengths."""
    rng = random.Random(seed)

    def ids(shift=0):
        return [rng.randrange(vocabulary) for _ in range(rng.randint(low, high) + shift)]

    made = []
    for g in range(groups):
        prompt = ids(3)
        rows = []
        for sample in range(size):
            pieces = [(P, prompt)]
            for _ in range(rng.randint(1, turns)):
                pieces += [(M, ids()), (E, ids())]
            reward = rewards[sample % len(rewards)]
            rows.append(chain(pieces, task=f"t{g}", sample=sample, reward=reward))
        made.append(Group(Task(f"t{g}", id=f"t{g}"), rows))
    return made


def gradient(model: nn.Module) -> torch.Tensor:
    """The whole gradient as one float64 vector."""
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return torch.cat([grad.flatten().double() for grad in grads])


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """The L2 norm of the difference, relative to that of `b`."""
    return float((a - b).norm() / b.norm())
