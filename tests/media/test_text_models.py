"""Worlds that show images, played by a model that sees none: it is told words, or the episode
says what is missing."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from kit.pictures import noise

import turnwright as tw
from turnwright.media import MediaStore
from turnwright.rollouts.observations import MediaIntake, count_media
from turnwright.types import Message


class Shows(tw.Env):
    """Draws each observation on the same canvas; words stand for it where `words` says so."""

    words = True

    def reset(self, task, *, seed=None):
        self.canvas, self.turn = np.zeros((8, 8, 3), np.uint8), 0
        return [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": ["Look: ", self.draw()]},
        ]

    def draw(self):
        self.canvas[:] = self.turn
        return tw.Image(self.canvas, alt=f"all is {self.turn}" if self.words else None)

    def step(self, action):
        self.turn += 1
        return tw.Step([self.draw(), " Now?"], reward=1.0, terminated=self.turn == 3)


class Mute(Shows):
    words = False


class MuteAtLast(Shows):
    def step(self, action):
        self.words = self.turn < 2
        return super().step(action)


def play(env, **more):
    (trajectory,) = tw.rollout(
        env, [tw.Task("x")], tw.ScriptedEngine(lambda messages, rng: "yes"), **more
    )
    return trajectory


def test_a_text_model_is_told_words():
    trajectory = play(Shows)
    assert trajectory.error is None
    assert [m.text for m in trajectory.messages if m.role == "user"] == [
        "Look: all is 0",
        "all is 1 Now?",
        "all is 2 Now?",
    ]
    assert [m.text for m in trajectory.final] == ["all is 3 Now?"]
    assert not any(span.media for span in trajectory.spans)


def test_without_words_the_episode_says_so_and_it_is_the_codes_mistake():
    trajectory = play(Mute)
    assert (trajectory.error.type, trajectory.error.kind) == ("MediaError", "user_bug")
    assert "tw.Image(..., alt=...)" in trajectory.error.message
    assert trajectory.reward is None


def test_what_nobody_answers_needs_no_words():
    trajectory = play(MuteAtLast)
    assert trajectory.error is None
    assert trajectory.final[0].text == "[image] Now?"


@pytest.mark.parametrize("inline", [False, True])
def test_play_functions_are_told_words(inline):
    image = tw.Image(noise(4, 4), alt="a cat")

    async def play_it(task, model):
        asked = [{"role": "user", "content": ["What? ", image]}]
        one = await model.generate(asked)
        two = await model.generate([*asked, one.message, tw.Message("user", ("And? ", image))])
        await asyncio.gather(*(model.generate([image, "x"]) for _ in range(3)))
        return float(two.text == "yes")

    trajectory = play(play_it)
    assert trajectory.reward == 1.0, trajectory.error
    assert trajectory.conversation(1)[2].text == "And? a cat"
    assert trajectory.turns[1].parent == 0
    assert len(list(trajectory.samples())) == 4


class Eyed:
    """A renderer of a model that sees, as far as `MediaIntake` asks."""

    vision = object()


def test_limits_on_images():
    store, image = MediaStore(), tw.Image(noise(4, 4))
    sight = MediaIntake(store, Eyed(), max_per_observation=3, max_per_episode=5)
    three = (Message("user", (image, image, "x")), Message("user", (image,)))
    assert count_media(sight.take_in(three)) == 3
    with pytest.raises(
        tw.MediaError, match=r"4 images in one observation; at most 3 \(limits.images\)"
    ):
        sight.take_in((*three, Message("user", (image,))))
    episode = sight.of_episode()
    episode.count(three)
    with pytest.raises(
        tw.MediaError, match=r"6 images in one episode; at most 5 \(limits.episode_images\)"
    ):
        episode.count(three)
    sight.of_episode().count(three)
    episode.reset()
    episode.count(three)
    blind = MediaIntake(store, tw.byte_renderer(), max_per_observation=1)
    nine = Message("user", (tw.Image(b"", alt="a"),) * 9)
    assert blind.take_in((nine,))[0].text == "\n".join("a" * 9)
