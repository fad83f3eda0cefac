"""Loss scales of ms-swift: weights of sampled ids by the parts of their messages."""

import pytest
from kit.rollouts import renderer
from kit.stand_ins import USERS

import turnwright as tw
from turnwright.config.schema import EnvConfig
from turnwright.envs.resolve import resolve_env
from turnwright.errors import ConfigError

TEXT = renderer("bpe")
TWO = ["it is</think>well Answer: 5", "no Answer: 4"]


def weights(named, replies=TWO, prompt="hard?", use="tips.py:AskAgain"):
    args = {"external_plugins": ["scales.py"], "loss_scale": named}
    made = resolve_env(EnvConfig(use=use, args=args), base=USERS / "swift")
    task = tw.Task(prompt, info={"solution": "4"})
    limits = tw.Limits(turns=3, turn_tokens=200)
    (found,) = tw.rollout(
        made.agent_function, [task], tw.ScriptedEngine(replies), renderer=TEXT, limits=limits
    )
    assert found.error is None, found.error
    return [turn.weights for turn in found.turns]


def tokens(*parts):
    """What ms-swift makes of parts: each is tokenized alone, and its ids have its
    weight; then the end token."""
    return (*(weight for text, weight in parts for _ in TEXT.codec.encode(text)), 1.0)


def whole(*parts):
    """Whether the parts' ids are those of the text, so that weights can be compared id by id."""
    alone = [i for text, _ in parts for i in TEXT.codec.encode(text)]
    assert alone == TEXT.encode_reply("".join(text for text, _ in parts))[:-1]
    return parts


def test_a_users_loss_scale_has_the_weights_of_the_parts_tokenized_alone():
    first = whole(("it is</think>well ", 1.0), ("Answer: 5", 3.0))
    second = whole(("no ", 1.0), ("Answer: 4", 2.0))
    assert weights("answers") == [tokens(*first), tokens(*second)]


def test_scales_in_a_chain_are_multiplied():
    first = (("it is</think>", 0.5), ("well ", 1.0), ("Answer: 5", 3.0))
    assert weights("thoughts+scales.py:Answers")[0] == tokens(*whole(*first))


def test_the_last_round_alone():
    found = weights("last_round+answers")
    assert set(found[0]) == {0.0}
    assert found[1] == tokens(("no ", 1.0), ("Answer: 4", 2.0))
    assert weights("last_round")[1] is None


def test_masks_and_scales_are_multiplied_in_a_continued_message():
    found = weights("answers", ["so. Answer: 5", " it is Answer: 4"], use="tips.py:GoBack")
    assert 0.0 in found[0]
    assert 3.0 not in found[0]
    assert found[1] == tokens(*whole((" it is ", 1.0), ("Answer: 4", 3.0)))


@pytest.mark.parametrize(
    ("named", "words"),
    [
        ("answer", r"loss_scale_map has no 'answer'; did you mean 'answers'"),
        ("all", "only replies are trained"),
    ],
)
def test_what_is_wrong_is_named(named, words):
    with pytest.raises(ConfigError, match=words):
        weights(named)
