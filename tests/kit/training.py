"""Trajectories and models by hand, for the tests of training."""

from __future__ import annotations

import hashlib
import random

import torch
from torch import nn

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
from turnwright.envs import as_env_spec
from turnwright.records import NullListener, RunDir
from turnwright.training import Trainer, TrainingRun, resolve_settings
from turnwright.training.advantages import CreditSettings
from turnwright.training.baselines import RunningBaselines
from turnwright.training.self_checks import LengthRewardEnv
from turnwright.types import (
    EpisodeKey,
    Group,
    Message,
    Origin,
    Span,
    StopReason,
    Task,
    Trajectory,
    Turn,
)

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
    return CreditSettings.of(config, resolve_settings(config).credit_choice, RunningBaselines().of)


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


def with_turns(trajectory: Trajectory, states=(), rewards=()) -> Trajectory:
    """The same episode with a turn for each reply; `states` are the names of the states after
    them, `rewards` what each earned."""
    trajectory.turns = []
    for index, span in enumerate(trajectory.spans):
        if not span.sampled:
            continue
        number = len(trajectory.turns)
        trajectory.turns.append(
            Turn(
                "main",
                prompt=span.parent,
                context=span.start,
                spans=(index,),
                messages=(Message("user", str(trajectory.spans[span.parent].ids)),),
                reply=Message("assistant", str(span.ids)),
                parent=number - 1,
                reward=rewards[number] if rewards else None,
                info={"state": states[number]} if states else {},
            )
        )
    return trajectory


def fork_last_reply(trajectory: Trajectory) -> None:
    """Let the last reply of an episode with turns follow a history of its own, so that it is
    another row."""
    turn = trajectory.turns[-1]
    (index,) = turn.spans
    context, reply = trajectory.spans[index - 1 : index + 1]
    context.parent, context.start = -1, 0
    reply.start = turn.context = len(context.ids)
    if index + 1 < len(trajectory.spans):
        trajectory.spans[index + 1].start = reply.end


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


ANY = {"max_mismatch": 1e9}
STILL = {
    "lr": 0.0,
    "schedule": "constant",
    "max_grad_norm": 1e9,
    "max_mismatch": 1e9,
    "weight_decay": 0.0,
}
"""Settings with which a step leaves the weights as they are, and the whole gradient on them."""


def learn(model, made, **settings):
    """One step that leaves the weights as they are: its metrics, and the gradient that it left on
    them."""
    trainer = Trainer(model, TrainConfig(**{**STILL, **settings}))
    return trainer.step(made, step=0, steps=10).metrics, gradient(model)


def fingerprint(model):
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(
            name.encode()
            + parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
        )
    return digest.hexdigest()


def with_logprobs(model, made, temperature=1.0, banned=()):
    """The groups as an engine with the same weights would have sampled them."""
    for g in made:
        for t in g.trajectories:
            for index, span in enumerate(t.spans):
                if span.sampled:
                    ids = t.path(index)
                    with torch.no_grad():
                        logits = model(
                            input_ids=torch.tensor([ids]), position_ids=torch.arange(len(ids))[None]
                        ).logits[0]
                    logits[:, list(banned)] = -torch.inf
                    logp = torch.log_softmax(logits / temperature, -1)
                    span.logprobs = [
                        float(logp[place - 1, ids[place]]) for place in range(span.start, span.end)
                    ]
    return made


def played(out, *, min_p=0.0, **train):
    config = RunConfig(
        out=str(out),
        model=ModelConfig(hidden=32, layers=1),
        rollout=RolloutConfig(
            groups=4, group_size=4, sanity="off", temperature=0.8, top_p=0.8, top_k=40, min_p=min_p
        ),
        limits=Limits(turns=2, turn_tokens=8, on_turn_length="continue"),
        train=TrainConfig(
            **{"steps": 2, "schedule": "constant", "epochs": 2, "minibatches": 2, "kl": 0.05}
            | train
        ),
        eval=EvalConfig(tasks=0, greedy=False),
    )
    tasks = [
        Task(f"Say something long about {thing}.", id=thing)
        for thing in ("rivers", "trees", "towns", "tea")
    ]
    run = RunDir(out)
    run.write_json("config.json", to_json_dict(ResolvedConfig(config, {})))
    return TrainingRun(
        config, [as_env_spec(LengthRewardEnv, name="longer", tasks=tasks)], run, NullListener()
    ), run
