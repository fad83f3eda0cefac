"""The control of each task, and of the game of `make quickstart-llm`: the rewards of a
group's episodes change places.

So nothing can be learned. Write `shuffled.py:Lookups` in place of `lookups.py:Lookups`: the names
are the same, and so are the tasks, the draws and the warm-up. Held-out episodes keep their rewards.
"""

import random

import adventure
import copy_numbers
import higher_lower
import lookups
import page_search
import pick_animal
import reversal
import spelling
import sums
import word_problems

import turnwright as tw
from turnwright.envs.builtin.hop import Hop


def change_places(trajectories):
    """Return what turns each reward into that of another episode of the group."""
    rewards = [trajectory.reward for trajectory in trajectories]
    key = trajectories[0].key
    shuffled = random.Random(f"{key.step}/{key.task}").sample(rewards, len(rewards))
    return [other - reward for other, reward in zip(shuffled, rewards, strict=True)]


def control(env):
    """Return the class of a task with rewards that change places."""
    return type(env.__name__, (env,), {"group_reward": staticmethod(change_places)})


Hop = control(Hop)
Lookups = control(lookups.Lookups)
HigherLower = control(higher_lower.HigherLower)
Adventure = control(adventure.Adventure)
Sums = control(sums.Sums)
Reversal = control(reversal.Reversal)
Spelling = control(spelling.Spelling)
PageSearch = control(page_search.PageSearch)
PickAnimal = control(pick_animal.PickAnimal)
CopyNumbers = control(copy_numbers.CopyNumbers)
WORD_PROBLEMS = tw.tool_env(
    [word_problems.add, word_problems.subtract, word_problems.multiply],
    reward=tw.rewards(right=word_problems.right, places=tw.RewardPart(change_places, of="group")),
    max_turns=word_problems.WORD_PROBLEMS.max_turns,
    tasks=word_problems.tasks,
    solver=word_problems.solver,
    demonstrator=word_problems.demonstrator,
    single_turn_best=1.0,
)
