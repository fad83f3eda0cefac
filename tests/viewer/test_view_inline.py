"""What the world wrote inside a reply is shown as the world's, wherever a conversation is shown."""

from __future__ import annotations

import random

import pytest

import turnwright as tw
from turnwright.cli.rollout import trajectory_lines
from turnwright.envs import play_scripted
from turnwright.envs.scripted_play import run
from turnwright.records import trajectory_row
from turnwright_view.conversation import prepare


class Tip(tw.Env):
    def reset(self, task, *, seed=None):
        self.tipped = False
        return "6 * 7?"

    def step(self, action):
        if self.tipped or "41" not in action.raw:
            return tw.Step(reward=float("42" in action.text), terminated=True)
        self.tipped = True
        return tw.Step(
            tw.InlineObservation("But wait, ", keep_chars=action.raw.index("41"), tail="untrained")
        )


def played():
    (trajectory,) = tw.rollout(Tip, [tw.Task(id="t")], tw.ScriptedEngine(["It is 41!", "no, 42"]))
    return trajectory


def test_the_report_shows_insertions_apart_and_rewound_tails_on_their_branch():
    rendered = prepare(trajectory_row(played(), tw.byte_renderer()), "best")
    assert [
        (expected.role, expected.text, "".join(t.text for t in expected.tokens))
        for expected in rendered.messages
    ] == [
        ("user", "6 * 7?", ""),
        ("main", "", "It is 41!<|im_end|>"),
        ("environment", "But wait, ", ""),
        ("main", "", "no, 42<|im_end|>"),
    ]
    assert (
        rendered.messages[2].facts == "inside the model's message, after 6 of the 10 tokens before"
    )
    assert "1 of 4 spans are fully or partly on other branches" in rendered.notes[0]
    first = rendered.spans[1].facts
    assert "on another branch" in first
    assert "untrained from" in first
    assert [span.on_path for span in rendered.spans] == [True] * 4


def test_the_terminal_shows_insertions_apart():
    text = list(trajectory_lines([played()]))
    assert [line.strip() for line in text[1:5]] == [
        "user | 6 * 7?",
        "assistant | It is 41!",
        "inserted | [6 of 10 tokens kept] But wait,",
        "assistant | no, 42",
    ]


def test_by_hand_an_episode_goes_as_with_an_engine():
    """Without a tokenizer tokens are bytes; the player sees the message as it stands."""
    seen = []

    def speak(messages, rng):
        seen.append([(message.role, message.text) for message in messages])
        return ["It is 41!", "no, 42"][len(seen) - 1]

    hand = run(play_scripted(Tip(), tw.Task(id="t"), speak, random.Random(0))).trajectory
    assert seen[1] == [("user", "6 * 7?"), ("assistant", "It is But wait, ")]
    output = played()
    assert hand.messages == output.messages
    assert (hand.turns[1].inserted, hand.turns[1].kept, hand.reward) == (
        "But wait, ",
        6,
        output.reward,
    )
    assert [turn.reply.text for turn in hand.turns] == [turn.reply.text for turn in output.turns]


@pytest.mark.parametrize(
    ("inline", "kept"),
    [
        (tw.InlineObservation(keep_chars=1), "é"),
        (tw.InlineObservation(keep_tokens=1), "\ufffd"),
        (tw.InlineObservation("x"), "é!"),
    ],
)
def test_by_hand_a_reply_is_cut_as_the_built_in_renderer_does(inline, kept):
    assert inline.kept_text("é!") == kept
    with pytest.raises(tw.EnvError, match="only 3"):
        tw.InlineObservation(keep_tokens=4).kept_text("é!")


def test_a_script_sees_the_message_as_it_stands():
    seen = []

    def speak(messages, rng):
        seen.append([(message.role, message.text) for message in messages])
        return ["It is 41!", "no, 42"][len(seen) - 1]

    (trajectory,) = tw.rollout(Tip, [tw.Task(id="t")], tw.ScriptedEngine(speak))
    assert trajectory.reward == 1.0
    assert seen[1] == [("user", "6 * 7?"), ("assistant", "It is But wait, ")]
