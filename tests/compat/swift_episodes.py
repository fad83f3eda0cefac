"""Plays user files of ms-swift and prints what was recorded: `python swift_episodes.py [originals]`."""

import json
import random
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import originals  # noqa: E402
from rollout_kit import renderer  # noqa: E402
from stand_ins_kit import USERS  # noqa: E402

TEXT = renderer("bpe")
WRONG, RIGHT = "<think>it is</think><answer>5</answer>", " four</think><answer>4</answer>"
EPISODES = {
    "new turns": ("swift:memory", {"external_plugins": ["own_loops.py"], "reward_funcs": ["kept"]}, {}, ["a", "bcd", "e"]),
    "a tool in the message": (
        "swift:calculate",
        {"external_plugins": ["calculate.py", "rewards.py"], "reward_funcs": ["sums", "kept"]},
        {"solution": "3"},
        ["Action: 1+2\n", "It is 3"],
    ),
    "tips": ("swift:math_tip_trick", {"reward_funcs": ["accuracy", "kept"]}, {"solution": "\\boxed{4}"}, [WRONG, RIGHT]),
    "tips, right at once": (
        "swift:math_tip_trick",
        {"reward_funcs": ["accuracy", "kept"]},
        {"solution": "4"},
        [f"<answer>4{RIGHT}"],
    ),
    "an environment": (
        "swift:gym_scheduler",
        {"gym_env": "lights", "reward_funcs": ["short", "kept"]},
        {"goal": 2},
        ["on", "off", "on"],
    ),
    "an environment of the row": (
        "swift:gym_scheduler",
        {"reward_funcs": ["kept"]},
        {"goal": 1, "env_config": {"name": "lights", "step": 2.0}},
        ["on"],
    ),
    "a loop of its own": ("own_loops.py:TwoDrafts", {"reward_funcs": ["kept"]}, {}, ["a", "b"]),
    "a step of 3.6": ("swift:ask_again", {"reward_funcs": ["said", "kept"]}, {"solution": "4"}, ["three", "4"]),
    "appended ids": ("own_loops.py:Half", {"reward_funcs": ["kept"]}, {}, ["one", "two", "three", "four"]),
    "loss scales": (
        "swift:ask_again",
        {"reward_funcs": ["kept"], "loss_scale": "last_round+answers+thoughts"},
        {"solution": "4"},
        ["so Answer: 5", "no</think>Answer: 4"],
    ),
    "a shortened text": (
        "swift:go_back",
        {"reward_funcs": ["kept"]},
        {"solution": "4"},
        ["I see. Answer: 5", " it is 4", "a Answer: 1", "b"],
    ),
    "most turns": ("swift:ask_again", {"reward_funcs": ["said", "kept"]}, {"solution": "4"}, ["1", "2", "3", "5"]),
}
PLUGINS = ["own_loops.py", "calculate.py", "rewards.py", "lights.py", "tips.py", "scales.py", "kept.py"]


def _without_ends(output):
    """ms-swift 4.6.0 keeps earlier replies as ids, and decodes them with their end token."""
    rows = [[{**one, "content": one["content"].removesuffix("<|im_end|>")} for one in row] for row in output["messages"]]
    return {**output, "messages": rows}


def main(original: bool) -> None:
    if original:
        originals.use()
        import swift.rollout.multi_turn as theirs

        assert "stand_ins" not in theirs.__file__
    import turnwise as tw
    from turnwise.config.schema import EnvConfig
    from turnwise.envs.resolve import resolve_env

    found = {}
    for name, (use, args, columns, replies) in EPISODES.items():
        made = resolve_env(EnvConfig(use=use, args={**args, "external_plugins": PLUGINS}), base=USERS / "swift")
        task = tw.Task("Go on.", info=columns, id=name)
        limits = tw.Limits(turns=4, turn_tokens=300)
        engine = tw.ScriptedEngine(replies)
        (row,) = tw.rollout(made.agent_function, [task], engine, renderer=TEXT, limits=limits)
        kept = made.agent_function.rewards[-1][1].seen
        found[name] = {
            "error": row.error and row.error.message,
            "home": made.agent_function.scheduler.__mro__[-3].__module__,
            "contexts": [row.prompt_ids(number) for number in range(len(row.turns))],
            "replies": [[i for index in turn.spans for i in row.spans[index].ids] for turn in row.turns],
            "weights": [turn.weights for turn in row.turns],
            "turn rewards": [turn.reward for turn in row.turns],
            "reward": row.reward,
            "parts": row.rewards,
            "output": [_without_ends(one) for one in kept],
        }
    print(json.dumps(found))


if __name__ == "__main__":
    random.seed(0)
    main(sys.argv[1:] == ["originals"])
