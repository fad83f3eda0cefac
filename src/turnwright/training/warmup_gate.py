"""When a warm-up ends: the gate, further rounds while the loss falls, and whether the policy reads
its task.

`Gate.unmet` says what a policy does not reach yet, `still_falls` whether another round may help,
and `success_in_other_tasks` how often the same replies succeed where they were not meant: what a
policy that reads nothing gets. `TrainingRun._warm_up` and `_judge_missed_gate` decide by them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, variance

from turnwright.config import RunConfig
from turnwright.engines import Generation, Request, ScriptedEngine
from turnwright.rollouts import EpisodeSpec, Rollout
from turnwright.training.evaluation import EvalResult, summarize
from turnwright.training.task_plan import TaskChoice
from turnwright.types import Origin, Trajectory

GATE_SHARE = 0.75
"""Share of the demonstrations' success that the warm-up must reach by default; 0.9 was too strict
for one of six tasks."""
NO_DEMONSTRATOR = 0.15
"""Gate of a warm-up on conversations, whose success is unknown."""
SIGNAL = 0.02
"""Share of episodes whose reward differs from the most common one from which on reinforcement has
something to learn from."""


def learning_rate(peak: float, step: int, steps: int) -> float:
    """Return the warm-up learning rate: ten steps up, then a cosine to a tenth of the peak at
    `steps`."""
    rise = min(1.0, (step + 1) / 10)
    fall = 0.1 + 0.45 * (1 + math.cos(math.pi * min(step / steps, 1.0)))
    return peak * rise * fall


def round_ends(steps: Sequence[int], rounds: int) -> list[int]:
    """Return the steps at which the rounds of a warm-up may end, ascending.

    Args:
        steps: `warmup.steps`, before and after each extension of a resumed run.
        rounds: `warmup.rounds`.
    """
    return sorted({length * number for length in steps for number in range(1, rounds + 1)})


FALL = 0.01
"""Share by which the loss must fall from the middle to the end of a round for another round."""


def still_falls(losses: Sequence[float]) -> bool:
    """Return whether the losses of a round fell, by two standard errors and a hundredth, from its
    middle to its end."""
    length = max(len(losses) // 10, 1)
    half = len(losses) // 2
    middle = losses[half - length :][:length]
    end = losses[-length:]
    if not middle:
        return False

    fall = fmean(middle) - fmean(end)
    chance = 0.0
    if length > 1:
        chance = 2.0 * math.sqrt((variance(middle) + variance(end)) / length)
    return fall > max(chance, FALL * fmean(middle))


@dataclass(frozen=True, slots=True)
class Gate:
    """What a policy must reach for the warm-up to end."""

    success: float
    """Success rate of sampled episodes."""
    loss: float | None
    """Maximum loss per sampled token."""
    demo_success: float | None
    """Success rate of the demonstrations, if the gate is relative to it."""

    @classmethod
    def of(cls, config: RunConfig, demos: Sequence[Trajectory]) -> Gate:
        """Return the gate of a run, relative to its demonstrations unless the recipe sets it."""
        warmup = config.warmup
        rewards = [demo.reward for demo in demos if demo.reward is not None]
        if warmup.gate_success is not None:
            return cls(warmup.gate_success, warmup.gate_loss, None)
        if not rewards:
            # Conversations of a dataset have no rewards.
            return cls(NO_DEMONSTRATOR, warmup.gate_loss, None)

        success = sum(reward >= config.eval.success for reward in rewards) / len(rewards)
        return cls(GATE_SHARE * success, warmup.gate_loss, success)

    def unmet(self, score: EvalResult, loss: float) -> str:
        """Describe the unmet conditions; empty if the gate is met."""
        missing = []
        if score.success is None:
            missing.append(f"no episode had a reward, all {score.failed} were None")
        elif score.success < self.success:
            share = ""
            if self.demo_success is not None:
                share = f" ({GATE_SHARE:g} of the demonstrations' {self.demo_success:.2f})"
            missing.append(f"success is {score.success:.2f}, the gate {self.success:.2g}{share}")
        elif self.demo_success == 0 and score.differing < SIGNAL:
            missing.append("no demonstration succeeds, and the rewards of the policy do not differ")

        if self.loss is not None and loss > self.loss:
            missing.append(f"loss is {loss:.3f}, warmup.gate_loss {self.loss:g}")
        return " and ".join(missing)


class RecordedReplies(ScriptedEngine):
    """Engine that replays the ids of replies, by session; it repeats the last one where an episode
    asks for more."""

    def __init__(self, replies: Mapping[str, Sequence[Sequence[int]]]) -> None:
        super().__init__([])
        self.replies = replies

    async def generate(self, request: Request) -> Generation:
        """Return the next reply of the request's session."""
        # Another attempt at an episode has the same replies.
        episode, _, _ = request.session.rpartition("/")
        replies = self.replies[episode]
        reply = replies[min(request.call, len(replies) - 1)]
        return await ScriptedEngine(lambda messages, rng: reply).generate(request)


SHIFTS = (1, 2, 3)
"""Each episode's replies are played in the tasks that come so many places later."""


async def success_in_other_tasks(
    choices: Mapping[str, TaskChoice],
    trajectories: Sequence[Trajectory],
    make_rollout: Callable[[ScriptedEngine], Rollout],
    threshold: float,
) -> EvalResult | None:
    """Return the success of a policy's replies in tasks other than their own.

    Replies of a policy that does not read its task succeed as often there. None if there are no
    such tasks, or if an agent function plays them, whose conversations may be other ones.

    Args:
        choices: tasks by their ids, those of the trajectories among them.
        trajectories: what the policy played.
        make_rollout: returns a rollout with an engine.
        threshold: reward of a success.
    """
    replies_by_task: dict[str, list[list[Sequence[int]]]] = {}
    for trajectory in trajectories:
        replies = [span.ids for span in trajectory.spans if span.origin is Origin.MODEL]
        if replies:
            replies_by_task.setdefault(trajectory.task.id, []).append(replies)

    # Replies to another environment's tasks would not even be understood.
    lanes: dict[str, list[TaskChoice]] = {}
    for task in replies_by_task:
        choice = choices[task]
        if choice.env_spec.agent_function is None and choice.env_spec.factory is not None:
            lanes.setdefault(choice.env_spec.name, []).append(choice)

    # Each task gets the replies of those that come some places before it.
    episodes: list[EpisodeSpec] = []
    replies_of: dict[str, Sequence[Sequence[int]]] = {}
    for lane in lanes.values():
        for shift in SHIFTS[: len(lane) - 1]:
            for place, choice in enumerate(lane):
                for replies in replies_by_task[lane[place - shift].task.id]:
                    spec = choice.episode("chance", 0, len(episodes))
                    episodes.append(spec)
                    episode, _, _ = spec.key.session.rpartition("/")
                    replies_of[episode] = replies
    if not episodes:
        return None

    rollout = make_rollout(RecordedReplies(replies_of))
    return summarize(await rollout.play(episodes), threshold)


def exceeds(result: EvalResult, chance: EvalResult) -> bool:
    """Return whether the success of a result is above that of another by two standard errors."""
    if not result.n or not chance.n:
        return True

    share = (result.successes + chance.successes) / (result.n + chance.n)
    error = math.sqrt(share * (1.0 - share) * (1.0 / result.n + 1.0 / chance.n))
    return result.successes / result.n - chance.successes / chance.n > 2.0 * error
