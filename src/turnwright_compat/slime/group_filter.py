"""slime's dynamic sampling filters, `function(args, samples, **kwargs)`, as
`train.group_filter`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from turnwright.types import Trajectory
from turnwright_compat.common import attribute_config
from turnwright_compat.slime.adapter import finish_sample, new_sample
from turnwright_compat.slime.shape import parameter_names

PARAMETERS = ("args", "samples")


def adapt_filter(function: Callable[..., Any]) -> Callable[[Sequence[Trajectory]], Any] | None:
    """Return the function of a group's trajectories; None where it has not the
    parameters of slime's filters."""
    if parameter_names(function)[: len(PARAMETERS)] != PARAMETERS:
        return None

    args = attribute_config({"reward_key": None, "eval_reward_key": None})

    def filter_group(trajectories: Sequence[Trajectory]) -> Any:
        return function(args, [_sample_of(trajectory) for trajectory in trajectories])

    return filter_group


def _sample_of(trajectory: Trajectory) -> Any:
    """Return a trajectory as a sample; its response is the text of the replies."""
    task = trajectory.task
    sample = new_sample(task, [message.to_dict() for message in task.messages], images=False)
    vars(sample).update(index=trajectory.key.sample, reward=trajectory.reward)
    replies = (message.text for message in trajectory.messages if message.role == "assistant")
    return finish_sample(sample, trajectory, "".join(replies))
