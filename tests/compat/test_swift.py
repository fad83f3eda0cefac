"""Schedulers, environments and rewards of ms-swift over our engine, with our stand-ins."""

import pytest
from kit.rollouts import renderer
from kit.stand_ins import USERS

import turnwright as tw
from turnwright.config.schema import EnvConfig
from turnwright.envs.resolve import resolve_env

HOME = USERS / "swift"
LIMITS = tw.Limits(turns=4, turn_tokens=200)


def spec(use, **args):
    return resolve_env(EnvConfig(use=use, args=args), base=HOME)


def play(made, tasks, replies, limits=LIMITS, **options):
    engine = replies if hasattr(replies, "generate") else tw.ScriptedEngine(replies)
    return tw.rollout(
        made.agent_function, tasks, engine, renderer=renderer("bpe"), limits=limits, **options
    )


def one(made, task, replies, **options):
    (found,) = play(made, [task], replies, **options)
    assert found.error is None, found.error
    return found


def trained(found):
    row = list(found.samples())[-1]
    return renderer("bpe").decode(
        [i for i, weight in zip(row.ids, row.weights, strict=True) if weight]
    )


def text(found, turn):
    return renderer("bpe").decode(found.prompt_ids(turn))


def test_a_scheduler_of_3_6_takes_new_turns_and_its_dict_reaches_the_reward():
    made = spec("swift:ask_again", external_plugins="tips.py", reward_funcs=["said"])
    found = one(made, tw.Task("2+2?", info={"solution": "4"}), ["five", "it is 4"])
    assert [turn.reply.text for turn in found.turns] == ["five", "it is 4"]
    assert text(found, 1).endswith(
        "five<|im_end|>\n<|im_start|>user\nWrong, try 2.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert found.reward == 0.5
    assert trained(found) == "five<|im_end|>it is 4<|im_end|>"


def test_going_back_by_text_keeps_the_sampled_ids_and_does_not_train_the_rest():
    made = spec("tips.py:GoBack", external_plugins=["tips.py"], reward_funcs=["said"])
    first = "let me think. Answer: 5"
    found = one(made, tw.Task("2+2?", info={"solution": "4"}), [first, " it is 4"])
    assert text(found, 1) == text(found, 0) + "let me think. But wait,"
    kept = renderer("bpe").encode_reply(first)
    shared = found.prompt_ids(1)[len(found.prompt_ids(0)) :]
    same = next(n for n, (a, b) in enumerate(zip(kept, shared, strict=False)) if a != b)
    # The tip begins with an id that was sampled there too.
    assert renderer("bpe").decode(kept[:same]) == "let me think. "
    assert found.turns[0].weights == tuple([1.0] * same + [0.0] * (len(kept) - same))
    assert found.reward == 1.0


@pytest.mark.parametrize("first", ["zoom", "zoom on"])
def test_images_of_rows_and_of_steps(tmp_path, first):
    """In a new turn, and where the message with its image before is continued by ids."""
    from kit.vision import tiny_vlm_directory
    from PIL import Image

    sees = tw.load_renderer(tiny_vlm_directory(tmp_path / "vlm", "qwen3_vl", weights=False))
    picture = Image.new("RGB", (64, 64), (9, 0, 0))
    task = tw.Task(
        [{"role": "user", "content": [{"type": "image", "image": picture}, "What is it?"]}],
        info={"audios": []},
    )
    made = spec("zoom.py:Zoom")
    limits = tw.Limits(turns=4, turn_tokens=100, context=4000)
    (found,) = tw.rollout(
        made.agent_function, [task], tw.ScriptedEngine([first, "red"]), renderer=sees, limits=limits
    )
    assert found.error is None, found.error
    sample = list(found.samples())[-1]
    assert len(sample.media) == (2 if first == "zoom" else 1)
    assert [turn.reply.text.strip() for turn in found.turns] == [first, "red"]
