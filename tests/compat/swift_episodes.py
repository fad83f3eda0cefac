"""Plays user files of ms-swift and prints what was recorded:
`python swift_episodes.py [originals]`."""

import copy
import json
import random
import sys
import tempfile
from functools import wraps
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from kit import originals  # noqa: E402
from kit.rollouts import renderer  # noqa: E402
from kit.stand_ins import USERS  # noqa: E402
from kit.vision import tiny_vlm_directory  # noqa: E402

from turnwright.envs.user_imports import STAND_INS  # noqa: E402

TEXT = renderer("bpe")
WRONG, RIGHT = "<think>it is</think><answer>5</answer>", " four</think><answer>4</answer>"
EPISODES = {
    "new turns": (
        "swift:memory",
        {"external_plugins": ["own_loops.py"], "reward_funcs": ["kept"]},
        {},
        ["a", "bcd", "e"],
    ),
    "a tool in the message": (
        "swift:calculate",
        {"external_plugins": ["calculate.py", "rewards.py"], "reward_funcs": ["sums", "kept"]},
        {"solution": "3"},
        ["Action: 1+2\n", "It is 3"],
    ),
    "tips": (
        "swift:math_tip_trick",
        {"reward_funcs": ["accuracy", "kept"]},
        {"solution": "\\boxed{4}"},
        [WRONG, RIGHT],
    ),
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
    "a step of 3.6": (
        "swift:ask_again",
        {"reward_funcs": ["said", "kept"]},
        {"solution": "4"},
        ["three", "4"],
    ),
    "appended ids": (
        "own_loops.py:Half",
        {"reward_funcs": ["kept"]},
        {},
        ["one", "two", "three", "four"],
    ),
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
    "most turns": (
        "swift:ask_again",
        {"reward_funcs": ["said", "kept"]},
        {"solution": "4"},
        ["1", "2", "3", "5"],
    ),
}
PLUGINS = [
    "own_loops.py",
    "calculate.py",
    "rewards.py",
    "lights.py",
    "tips.py",
    "scales.py",
    "kept.py",
    "paths.py",
    "keys.py",
    "../cut/cut_swift.py",
]
CUT = {
    "the first reply is cut": (
        "swift:cut",
        {"reward_funcs": ["punished", "kept"]},
        {},
        ["long" * 9, "good"],
    ),
    "the second reply is cut": (
        "swift:cut",
        {"reward_funcs": ["punished", "kept"]},
        {},
        ["good", "long" * 9],
    ),
    "no reply is cut": ("swift:cut", {"reward_funcs": ["punished", "kept"]}, {}, ["good", "good"]),
    "a cut round has its own total": (
        "swift:rounds",
        {"reward_funcs": ["kept"], "use_gym_env": True},
        {},
        ["a", "long" * 9],
    ),
    "a scheduler that asks on": (
        "swift:stubborn",
        {"reward_funcs": ["kept"], "use_gym_env": True},
        {},
        ["a", "long" * 9, "b"],
    ),
    "an environment whose action is cut": (
        "swift:gym_scheduler",
        {"gym_env": "lights", "reward_funcs": ["kept"]},
        {"goal": 2},
        ["on", "off" * 20, "on"],
    ),
    "a message that goes on is cut": (
        "own_loops.py:Half",
        {"reward_funcs": ["kept"]},
        {},
        ["one", "two" * 20, "three"],
    ),
}
"""Episodes whose replies are cut at `CUT_AT` tokens."""
CUT_AT = 6
SAMPLES = {
    "samples of one scheduler": ("swift:memory", {"reward_funcs": ["kept"]}, {}, ["a", "bcd", "e"]),
    "samples of an environment": (
        "swift:gym_scheduler",
        {"gym_env": "lights", "reward_funcs": ["kept"]},
        {"goal": 1},
        ["on"],
    ),
    "paths of a tree": (
        "swift:paths",
        {"reward_funcs": ["length", "kept"]},
        {"branches": [2, 2]},
        list("abcdefg"),
    ),
}
"""Episodes that are played `MANY` times at once."""
MANY = 3
PICTURES = {
    "a picture that a step adds": (
        "zoom.py:Zoom",
        {"reward_funcs": ["kept"]},
        {},
        ["zoom", "done"],
    ),
    "a picture, and a message that goes on": (
        "zoom.py:Zoom",
        {"reward_funcs": ["kept"]},
        {},
        ["zoom on", "done"],
    ),
}


MATH = {"solution": "\\boxed{4}", "problem": "2+2?"}
MATH_ENV = {**MATH, "env_config": {"name": "math_env"}}
ACCURACY = {"reward_funcs": ["accuracy", "kept"]}
BUILT_IN = {
    "single_turn": [({**ACCURACY}, MATH, ["\\boxed{4}"]), ({**ACCURACY}, MATH, ["\\boxed{5}"])],
    "math_tip_trick": [({**ACCURACY}, MATH, ["\\boxed{4}"]), ({**ACCURACY}, MATH, [WRONG, RIGHT])],
    "math_tip_trick_multi_turn": [
        ({**ACCURACY}, MATH, ["\\boxed{4}"]),
        ({**ACCURACY}, MATH, [WRONG, RIGHT]),
    ],
    "thinking_tips_scheduler": [
        ({**ACCURACY}, MATH, ["\\boxed{4}"]),
        ({**ACCURACY}, MATH, [WRONG, RIGHT]),
        ({**ACCURACY, "loss_scale": "last_round"}, MATH, [WRONG, WRONG]),
    ],
    "gym_scheduler": [
        ({"reward_funcs": ["kept"]}, MATH_ENV, [WRONG, RIGHT]),
        ({"reward_funcs": ["kept"], "gym_env": "lights"}, {"goal": 1}, ["off", "on"]),
    ],
    "openenv_scheduler": [
        (
            {"reward_funcs": ["kept"]},
            {"env_config": {"system_message": "Count."}},
            ['{"add": 1}', '{"add": 2}'],
        ),
        (
            {"reward_funcs": ["kept"]},
            {"env_config": {"reset_kwargs": {"start": 2}}},
            ['```json\n{"add": 5}\n```'],
        ),
    ],
}
"""Arguments, columns and replies for each name that ms-swift or our stand-in registers."""
REWARDED = {
    "rewards of one turn": (
        "swift:single_turn",
        {"reward_funcs": ["keys"]},
        {"nums": [1, 2], "none": None, **MATH},
        ["a"],
    ),
    "rewards of turns": (
        "swift:cut",
        {"reward_funcs": ["keys", "punished"]},
        {"objects": {"ref": ["a"]}},
        ["a", "good"],
    ),
    "rewards of ids": (
        "own_loops.py:Half",
        {"reward_funcs": ["keys"]},
        {"audio_codes": [1]},
        ["a", "b", "c", "d"],
    ),
    "rewards of an environment": (
        "swift:gym_scheduler",
        {"gym_env": "lights", "reward_funcs": ["keys", "short"], "reward_weights": [2.0, 0.5, 3.0]},
        {"goal": 1},
        ["off", "on"],
    ),
    "rewards of rows": (
        "swift:paths",
        {"reward_funcs": ["keys", "length"]},
        {"branches": [2]},
        ["a", "bc", "def"],
    ),
}
"""Episodes whose rewards ms-swift computes too, from what its scheduler returned."""


class Client:
    """A client of an OpenEnv server whose game is over at three."""

    def __init__(self, base_url):
        self.sum = 0

    def sync(self):
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_): ...

    def reset(self, start=0):
        self.sum = start
        return SimpleNamespace(observation={"sum": self.sum}, reward=None, done=False)

    def step(self, action):
        self.sum += action["add"]
        return SimpleNamespace(
            observation={"sum": self.sum}, reward=float(self.sum), done=self.sum >= 3
        )


def place_client():
    """Put a stub in place of OpenEnv's client."""
    for name in ("openenv", "openenv.core", "openenv.core.generic_client"):
        module = sys.modules[name] = ModuleType(name)
        module.__path__ = []
    module.GenericEnvClient = Client


def _without_ends(output):
    """ms-swift 4.6.0 keeps earlier replies as ids, and decodes them with their end token."""
    rows = [
        [{**one, "content": one["content"].removesuffix("<|im_end|>")} for one in row]
        for row in output["messages"]
    ]
    return {**output, "messages": rows}


def main(original: bool) -> None:
    if original:
        originals.use()
        import swift.rollout.multi_turn as theirs

        assert "stand_ins" not in theirs.__file__
        # It downloads a tokenizer.
        import_module("swift.rollout.gym_env").count_qwen_tokens = lambda *_: (
            0,
            False,
        )
    import turnwright as tw

    names = set(import_module(f"{STAND_INS}.swift.rollout.multi_turn").multi_turns)
    if original:
        names |= set(theirs.multi_turns)
    place_client()
    with tempfile.TemporaryDirectory() as folder:
        tiny_vlm_directory(folder, weights=False)
        vision = tw.load_renderer(folder)
    found = {}
    for name, episode in EPISODES.items():
        (found[name],) = played(tw, name, *episode)
    for name, episode in CUT.items():
        (found[name],) = played(tw, name, *episode, tokens=CUT_AT)
    for name, episode in SAMPLES.items():
        for number, one in enumerate(played(tw, name, *episode, samples=MANY)):
            found[f"{name}, {number}"] = one
    for name, episode in PICTURES.items():
        (found[name],) = played(tw, name, *episode, model=vision)
    for name in sorted(names):
        for number, episode in enumerate(BUILT_IN.get(name, ())):
            (found[f"built in: {name}, {number}"],) = played(tw, name, f"swift:{name}", *episode)
    for name, episode in REWARDED.items():
        (found[name],) = played(tw, name, *episode)
        if original:
            found[name]["of ms-swift"] = scored(*episode)
    print(
        json.dumps(
            {"names": sorted(names), "episodes": found}, default=lambda value: type(value).__name__
        )
    )


def played(tw, name, use, args, columns, replies, *, tokens=300, samples=1, model=TEXT):
    """Return what was recorded of the samples of an episode."""
    from PIL import Image

    from turnwright.config.schema import EnvConfig
    from turnwright.envs.resolve import resolve_env

    made = resolve_env(
        EnvConfig(use=use, args={**args, "external_plugins": PLUGINS}), base=USERS / "swift"
    )
    prompt = (
        "Go on."
        if model is TEXT
        else [tw.Message("user", [tw.Image(Image.new("RGB", (64, 64), "red")), "Go on."])]
    )
    task = tw.Task(prompt, info=columns, id=name)
    limits = tw.Limits(turns=20 if "branches" in columns else 4, turn_tokens=tokens)
    engine = tw.ScriptedEngine(replies)
    rows = tw.rollout(
        made.agent_function, [task], engine, renderer=model, limits=limits, samples=samples
    )
    kept = getattr(made.agent_function.rewards[-1][1], "seen", [])
    found = []
    for number, row in enumerate(sorted(rows, key=lambda row: row.key.sample)):
        found.append(
            {
                "error": row.error and row.error.message,
                "home": made.agent_function.scheduler.__mro__[-3].__module__,
                "contexts": [row.prompt_ids(number) for number in range(len(row.turns))],
                "replies": [
                    [i for index in turn.spans for i in row.spans[index].ids] for turn in row.turns
                ],
                "weights": [turn.weights for turn in row.turns],
                "turn rewards": [turn.reward for turn in row.turns],
                "rewards by row": [[one.reward, one.turns] for one in row.row_rewards],
                "reward": row.reward,
                "parts": row.rewards,
                "stop": str(row.stop),
                "output": [
                    _without_ends(one)
                    for one in (kept if samples == 1 else kept[number : number + 1])
                ],
            }
        )
    return found


def scored(use, args, columns, replies):
    """Return the keyword arguments of the first reward, from us and from ms-swift, and the
    rewards that it computes."""
    import torch
    from swift.rl_core.data import GRPOSample
    from swift.rl_core.grpo_algorithm import score_completions

    import turnwright as tw
    from turnwright.config.schema import EnvConfig
    from turnwright.envs.resolve import resolve_env

    made = resolve_env(
        EnvConfig(use=use, args={**args, "external_plugins": PLUGINS}), base=USERS / "swift"
    )
    play = made.agent_function
    returned = []
    run = play.scheduler.run

    @wraps(run)
    async def recorded(self, *given, **options):
        output = await run(self, *given, **options)
        returned.extend(copy.deepcopy(output if isinstance(output, list) else [output]))
        return output

    play.scheduler = type(play.scheduler.__name__, (play.scheduler,), {"run": recorded})
    limits = tw.Limits(turns=4, turn_tokens=300)
    task = tw.Task("Go on.", info=columns, id="rewarded")
    tw.rollout(play, [task], tw.ScriptedEngine(replies), renderer=TEXT, limits=limits)

    samples = []
    for output in returned:
        sample = GRPOSample.from_row(
            {"messages": [{"role": "user", "content": "Go on."}], **columns}
        )
        sample.request_id = sample.prompt_id = "one"
        sample.apply_rollout_output(rollout_output=output)
        samples.append(sample)
    functions, weights = (
        [function for _, function, _ in play.rewards],
        [weight for *_, weight in play.rewards],
    )
    environment = play.environment_weight is not None and "total_reward" in samples[0].rollout_infos
    weights += [play.environment_weight] if environment else []
    inputs = {"one": [sample.to_reward_row() for sample in samples]}
    table = score_completions(
        samples,
        functions,
        None,
        environment,
        torch.device("cpu"),
        "state",
        {"trajectory_inputs": inputs},
    )
    ours, theirs = functions[0].seen
    return {
        "ours": {key: _comparable(key, value) for key, value in ours.items()},
        "theirs": {key: _comparable(key, value) for key, value in theirs.items()},
        "rewards": (table * torch.tensor(weights)).nansum(dim=1).tolist(),
    }


def _comparable(key, value):
    """Return what must be equal: no ids of requests, and texts without end tokens."""
    if key in ("trainer_state", "trajectory_inputs", "prompt_id", "request_id"):
        return None
    if key != "messages":
        return value
    rows = [[dict(one) for one in row] for row in value]
    for one in (one for row in rows for one in row):
        if isinstance(one["content"], list):
            one["content"] = TEXT.decode(one["content"])
        one["content"] = one["content"].removesuffix("<|im_end|>")
    return rows


if __name__ == "__main__":
    random.seed(0)
    main(sys.argv[1:] == ["originals"])
