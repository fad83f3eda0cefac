"""User code of ms-swift by its conventions: totals, the state of the trainer, the engine's
attributes, pictures and videos."""

import base64
import io
import textwrap

import pytest
from kit.vision import tiny_vlm_directory
from PIL import Image

import turnwright as tw
from turnwright.config.schema import EnvConfig
from turnwright.envs.resolve import resolve_env
from turnwright.rollouts import Rollout, make_episode_specs
from turnwright.rollouts.rollout_settings import RolloutSettings
from turnwright_compat.sampled_rows import image_of

HEAD = """
from swift.rewards import ORM, orms
from swift.rollout.multi_turn import MultiTurnScheduler, multi_turns
"""
LIMITS = tw.Limits(turns=5, turn_tokens=50)


def spec(folder, source, use, **args):
    (folder / "plugin.py").write_text(HEAD + textwrap.dedent(source))
    return resolve_env(
        EnvConfig(use=use, args={"external_plugins": ["plugin.py"], **args}), base=folder
    )


def played(made, replies, *, task=None, renderer=None):
    engine = tw.ScriptedEngine(list(replies))
    (found,) = tw.rollout(
        made.agent_function, [task or tw.Task("Go.")], engine, renderer=renderer, limits=LIMITS
    )
    return found


TOTALS = """
class Counts(MultiTurnScheduler):
    async def on_turn_end(self, infer_request, response_choice, current_turn):
        infos = {{"total_reward": {total}, "step_rewards": {steps}, "gym_done": current_turn == 3}}
        return {{"done": current_turn == 3, "rollout_infos": infos}}

    def step(self, infer_request, response_choice, current_turn):
        infer_request.messages.append({{"role": "user", "content": "Go on."}})
        return {{"infer_request": infer_request}}

multi_turns["counts"] = Counts
"""


@pytest.mark.parametrize(
    ("total", "steps", "reward", "by_turn"),
    [
        ("0.5", "[0.5] * current_turn", 0.5, False),
        ("1.5", "[0.5] * current_turn", 1.5, True),
        ("2.0", "[]", 2.0, False),
        ("0.0", "[1.0] * current_turn", 0.0, False),
        ("-1.0", "[0.0] * current_turn", -1.0, False),
        ("None", "[1.0] * current_turn", 0.0, False),
    ],
)
def test_the_total_is_the_reward_and_steps_only_divide_it(total, steps, reward, by_turn, tmp_path):
    found = played(
        spec(tmp_path, TOTALS.format(total=total, steps=steps), "swift:counts", use_gym_env=True),
        "abc",
    )
    assert found.error is None, found.error
    assert found.reward == reward
    assert [turn.reward for turn in found.turns] == (
        [0.5, 0.5, 0.5] if by_turn else [None, None, None]
    )


STATE = """
class Seen(ORM):
    def __call__(self, completions, trainer_state, **kwargs):
        assert getattr(trainer_state, "absent", None) is None
        return [float(trainer_state.global_step) for _ in completions]

orms["seen"] = Seen
"""


def test_rewards_see_the_step(tmp_path):
    import asyncio

    made = spec(tmp_path, STATE, "swift:single_turn", reward_funcs=["seen"])

    async def play():
        rollout = Rollout(
            tw.ScriptedEngine(["a"]), tw.byte_renderer(), RolloutSettings(limits=LIMITS)
        )
        return await rollout.play(
            make_episode_specs(made.agent_function, [tw.Task("Go.")], phase="train", step=7)
        )

    (found,) = asyncio.run(play())
    assert found.error is None, found.error
    assert found.reward == 7.0


ENGINE = """
class Asks(MultiTurnScheduler):
    def __init__(self, infer_engine=None, max_turns=None, *args, **kwargs):
        super().__init__(infer_engine, max_turns, *args, **kwargs)
        assert getattr(infer_engine, "max_model_len", 77) == 77
        assert getattr(infer_engine, "tokenizer", None) is not None

    def check_finished(self, infer_request, response_choice, current_turn):
        assert getattr(self.infer_engine, "tokenizer", None) is not None
        return True

    def step(self, infer_request, response_choice, current_turn): ...

multi_turns["asks"] = Asks
"""


def test_the_engine_answers_getattr_with_a_default(tmp_path):
    found = played(spec(tmp_path, ENGINE, "swift:asks"), "a")
    assert found.error is None, found.error


@pytest.mark.parametrize("size", [(1, 1), (28, 28), (280, 224), (900, 700)])
@pytest.mark.parametrize(
    "form", ["base64", "data URL", "bytes", "a dict of bytes", "a dict of base64"]
)
def test_pictures_of_every_size_are_decoded_and_not_taken_for_paths(size, form):
    buffer = io.BytesIO()
    Image.effect_noise(size, 50).convert("RGB").save(buffer, format="PNG")
    text = base64.b64encode(buffer.getvalue()).decode()
    given = {
        "base64": text,
        "data URL": f"data:image/png;base64,{text}",
        "bytes": buffer.getvalue(),
        "a dict of bytes": {"bytes": buffer.getvalue(), "path": None},
        "a dict of base64": {"path": text},
    }[form]
    assert isinstance(image_of(given), tw.Image)


VIDEO = """
from PIL import Image

class Shows(MultiTurnScheduler):
    def check_finished(self, infer_request, response_choice, current_turn):
        return current_turn == 2

    def step(self, infer_request, response_choice, current_turn):
        infer_request.messages.append({{"role": "user", "content": "{text}"}})
        infer_request.videos.append({video})
        return {{"infer_request": infer_request}}

multi_turns["shows"] = Shows
"""


@pytest.fixture(scope="module")
def vlm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vlm")
    tiny_vlm_directory(folder)
    return tw.load_renderer(folder)


def test_a_video_that_a_step_sets_is_seen(vlm, tmp_path):
    video = "[Image.new('RGB', (56, 56), color) for color in ('red', 'blue')]"
    made = spec(tmp_path, VIDEO.format(text="Look: <video> well?", video=video), "swift:shows")
    found = played(made, ["a", "b"], renderer=vlm)
    assert found.error is None, found.error
    (block,) = found.media_placements(found.turns[1].prompt)
    assert len(block.media.frames) == 2


@pytest.mark.parametrize(
    ("text", "video", "words"),
    [
        ("Look: <video>", "'a.mp4'", "give its frames"),
        ("Look.", "[Image.new('RGB', (56, 56))]", "write <video>"),
    ],
)
def test_a_video_that_cannot_be_shown_is_an_error(text, video, words, vlm, tmp_path):
    found = played(
        spec(tmp_path, VIDEO.format(text=text, video=video), "swift:shows"),
        ["a", "b"],
        renderer=vlm,
    )
    assert words in found.error.message
