"""The algorithm on one page: an agent learns from the rewards of its own episodes.

A step plays several tasks, each several times, compares the episodes of a task with each other, and
makes one update of the weights; the next step samples with the updated weights. This is GRPO
(DeepSeekMath, arXiv 2402.03300) for conversations of any number of turns::

    from turnwright.simple import learn

    async for step, episodes, loss in learn(env_spec, tasks, model, renderer):
        print(step, sum(episode.reward for episode in episodes) / len(episodes), loss)

`model` is a Hugging Face module, which is trained in place; `renderer` has its tokenizer and chat
template; `tasks` are those of all steps, in order. Images need nothing more: a renderer of a vision
model has a processor for them.

Read `learn` from top to bottom: update the engine, play, credit, batch, loss, update. Each of these
functions is the one that `turnwright train` calls, so nothing is implemented here that exists
elsewhere. From the same weights, 20 steps of both are equal to the last bit (a test does both).
A name that ends in `_n` has a value for each token that carries loss in the step, one in `_m` for
each of those in one forward pass (`training/forward/batch.py`).

`turnwright train` has more, which is not needed to read the algorithm:

- a warm-up on demonstrations, without which a model of random weights earns no reward
  (`training/warmup.py`), and evaluation on held-out tasks (`training/evaluation.py`);
- checkpoints, a journal of every sampled token, and resume after a kill (`training/run.py`);
- episodes that are played while the last step trains (`training/batches.py`), by engines on other
  machines (`engines/remote`), or again where an environment failed (`rollouts/play_again.py`);
- other algorithms, credit by turn, KL, teachers, several updates a step, LoRA, sharded models, and
  the checks that engine and trainer compute the same (`Trainer.step` in `training/trainer`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import torch

from turnwright.config import TrainConfig
from turnwright.engines.local import LocalEngine
from turnwright.envs import EnvSpec
from turnwright.renderers.chat_renderer import ChatRenderer
from turnwright.rollouts import EpisodeSpec, Rollout, RolloutSettings, group_by_task
from turnwright.training.advantages import CreditSettings, advantages
from turnwright.training.algorithms.grpo import ALGORITHM as GRPO
from turnwright.training.forward.batch import LossDenominator, make_batch
from turnwright.training.forward.forward import ForwardPass, LogitDistribution
from turnwright.training.forward.packing import BatchPacker
from turnwright.training.forward.ranks import Ranks
from turnwright.training.loss import TokenBatch
from turnwright.training.model.weight_export import unique_weights
from turnwright.training.trainer.optimizer import Optimizer, schedule
from turnwright.types import EpisodeKey, Task, Trajectory

STEPS = 20

GROUPS = 16
"""Tasks of a step, each of which gives a group of episodes."""

GROUP_SIZE = 8
"""Episodes of a task."""

LR = 1e-3
"""Learning rate of the first step."""

MICRO_TOKENS = 4096
"""Tokens of a forward pass; a step's episodes take as many passes as they need."""


async def learn(
    env_spec: EnvSpec,
    tasks: Sequence[Task],
    model: torch.nn.Module,
    renderer: ChatRenderer,
    seed: int = 0,
) -> AsyncIterator[tuple[int, list[Trajectory], float]]:
    """Train `model` in place on STEPS * GROUPS tasks.

    Yields each step's number, episodes and loss.
    """
    engine = LocalEngine(model, renderer=renderer)  # samples with a copy of the weights
    rollout = Rollout(engine, renderer, RolloutSettings(seed=seed))

    model.eval()  # without dropout: the policy that is trained is the one that was sampled
    forward = ForwardPass(model)
    packer = BatchPacker("auto", forward.decoder)
    distribution = LogitDistribution(temperature=1.0, banned_ids=renderer.banned_ids)
    optimizer = Optimizer(model, TrainConfig(), Ranks())
    credit_settings = CreditSettings(kind=GRPO.advantage, on_failure="drop_group")

    try:
        for step in range(STEPS):
            # The engine samples with the weights of this step.
            await engine.update(unique_weights(model, copy=True), version=step)

            # Play each task GROUP_SIZE times. What an episode samples depends on the seed and on
            # its key alone, not on the episodes that are played beside it.
            episode_specs = []
            for task in tasks[step * GROUPS : (step + 1) * GROUPS]:
                for sample in range(GROUP_SIZE):
                    key = EpisodeKey("train", step, task.id, sample)
                    episode_specs.append(EpisodeSpec.of(env_spec, task, key))
            episodes = await rollout.play(episode_specs)

            # Credit: an episode's advantage is its reward less the mean of its group, in standard
            # deviations. A group with equal rewards, or with a failed episode, is not trained.
            step_credits = advantages(group_by_task(episodes), credit_settings)

            # Batch: every sampled token once, with its advantage and its weight in the loss. All
            # tokens weigh the same, whatever episode, turn and forward pass they are in.
            batch = make_batch(
                step_credits.trained,
                LossDenominator.of(step_credits.credits, GRPO.aggregation),
                micro_tokens=MICRO_TOKENS,
                vision=renderer.vision,
                pack=packer.pack,
            )

            # Loss and gradient, one forward pass after another.
            optimizer.zero_grad()
            step_loss = 0.0
            for micro in batch.micros:
                stats = forward.stats(micro, rollout.pixels, distribution, entropy=False)
                logprobs_m = stats.logprobs_m
                tokens = TokenBatch(
                    logp=logprobs_m,
                    old=logprobs_m.detach(),  # of the policy that sampled, which is this one
                    advantage=batch.advantages_n[micro.tokens_m].to(logprobs_m.dtype),
                    sequence=torch.zeros_like(logprobs_m),
                    turn=torch.zeros_like(logprobs_m),
                    clip_low=GRPO.clip_low,
                    clip_high=GRPO.clip_high,
                )
                loss_m = GRPO.loss(tokens).loss
                weights_m = batch.weights_n[micro.tokens_m].to(logprobs_m.dtype)
                loss = (loss_m * weights_m).sum()
                loss.backward()
                step_loss += loss.item()

            # Update: AdamW, with the gradient's norm bounded and a rate that falls to 0.
            if batch.size:
                optimizer.clip_gradient()
                optimizer.step(LR * schedule("linear", step, STEPS))

            yield step, episodes, step_loss
    finally:
        await engine.close()
