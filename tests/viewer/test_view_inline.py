"""What the world wrote inside a reply is shown as the world's, wherever a conversation is shown."""

from __future__ import annotations

import random

import pytest

import turnwright as tw
from turnwright.cli.rollout import trajectory_lines
from turnwright.envs import play_scripted
from turnwright.envs.scripted_play import run
from turnwright.records import to_json, trajectory_row
from turnwright_view.web.episode import episode_page
from turnwright_view.web.index import RunIndex


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


def test_the_page_shows_insertions_apart_and_rewound_tails_untrained(tmp_path):
    row = to_json(trajectory_row(played(), tw.byte_renderer()))
    (tmp_path / "trajectories.jsonl").write_bytes(row + b"\n")
    index = RunIndex(tmp_path)
    index.update()
    page = episode_page(index, index.at(0))
    first, second = page["turns"]
    assert first["inserted"] is None
    assert first["messages"][0]["text"] == "6 * 7?"
    assert (second["inserted"], second["kept"], second["parent"]) == ("But wait, ", 6, 0)
    texts = ["".join(page["spans"][n]["tokens"]) for turn in (first, second) for n in turn["spans"]]
    assert texts == ["It is 41!<|im_end|>", "no, 42<|im_end|>"]
    tail = page["spans"][first["spans"][0]]
    assert (tail["untrained"], tail["untrained_from"]) == ("rewound", 6)
    assert [page["spans"][n]["text"] for n in (2,)] == ["But wait, "]


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
