"""What tools show reaches the model: every form, in the order given, through a real template,
and nothing vanishes."""

from __future__ import annotations

import base64
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from kit.pictures import noise, png
from kit.seeing import call, play, shown
from PIL import Image as Pillow

import turnwright as tw
from turnwright.envs.tools.results import ResultLimit, read_content, read_result
from turnwright.errors import EnvError, MediaError
from turnwright.media import MediaStore
from turnwright.types import ImageRef, VideoRef

PIXELS = noise(64, 48)
CONTENT = png(PIXELS)
URI = f"data:image/png;base64,{base64.b64encode(CONTENT).decode()}"
CLIP = [noise(64, 64, seed) for seed in range(6)]

FORMS = {
    "an image": (lambda: tw.Image(PIXELS), "I"),
    "PIL": (lambda: Pillow.fromarray(PIXELS), "I"),
    "an array": (lambda: PIXELS, "I"),
    "bytes": (lambda: CONTENT, "I"),
    "a part": (lambda: {"type": "image", "image": PIXELS}, "I"),
    "a part of OpenAI's": (lambda: {"type": "image_url", "image_url": {"url": URI}}, "I"),
    "parts": (lambda: ["see ", PIXELS, " and ", tw.Image(CONTENT), {"a": 1}], "see I and I{\"a\": 1}"),  # noqa: E501
    "a message": (lambda: tw.Message("tool", ("see ", tw.Image(PIXELS))), "see I"),
    "with a reward": (lambda: (["see ", PIXELS], 0.5, {"drawn": 1}), "see I"),
    "a response": (lambda: {"text": "see", "image": [PIXELS, CONTENT]}, "IIsee"),
    "a response of one": (lambda: {"text": "see", "image": PIXELS}, "Isee"),
    "a response without text": (lambda: {"images": [Pillow.fromarray(PIXELS)]}, "I"),
    "an object": (lambda: SimpleNamespace(text="see", image=[PIXELS], video=None), "Isee"),
    "a response with a reward": (lambda: ({"text": "see", "image": [PIXELS]}, None, None), "Isee"),
    "a video": (lambda: tw.Video(CLIP, fps=2), "V"),
    "a part of video": (lambda: {"type": "video", "video": CLIP, "fps": 2}, "V"),
    "a response with a clip": (lambda: {"text": "see", "video": [{"frames": CLIP, "fps": 2}]}, "Vsee"),  # noqa: E501
    "a response with both": (lambda: {"text": "see", "image": [PIXELS], "video": [tw.Video(CLIP, fps=2)]}, "IVsee"),  # noqa: E501
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_result_is_shown(vlm, form):
    make, said = FORMS[form]

    def look():
        """Look."""
        return make()

    store = MediaStore()
    (trajectory,) = play(tw.tool_env([look]), vlm, [call("look"), "done"], store=store)
    assert trajectory.error is None, trajectory.error
    (message,) = trajectory.turns[1].messages
    image = store.put(tw.Image(PIXELS))
    clip = store.put(tw.Video(CLIP, fps=2)) if "V" in said else None
    marks = {image: "I", clip: "V"}
    assert (
        "".join(part if isinstance(part, str) else marks[part] for part in message.content) == said
    )
    assert trajectory.reward == (0.5 if form == "with a reward" else 0.0)


def test_what_is_no_picture_stays_text():
    for value, text in [
        ({"type": "image", "name": "a.png"}, '{"type": "image", "name": "a.png"}'),
        ({"type": "image", "image": "a.png"}, '{"type": "image", "image": "a.png"}'),
        ({"audio": "on", "text": "x"}, '{"audio": "on", "text": "x"}'),
        ({"image": "a.png", "text": "x"}, '{"image": "a.png", "text": "x"}'),
        ({"text": "x"}, '{"text": "x"}'),
        (np.array([1, 2]), '"[1 2]"'),
        (np.float64(1.5), "1.5"),
        (b"abc", "\"b'abc'\""),
    ]:
        assert read_content(value, "t") == text


@pytest.mark.parametrize(
    "value",
    [
        {"type": "audio", "audio": b"RIFF"},
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
        {"text": "x", "audio": [b"RIFF"]},
        {"audio": np.zeros(9)},
        ["x", {"type": "audio", "audio": {"bytes": b"RIFF"}}],
        ({"text": "x", "audio": b"RIFF"}, 1.0),
    ],
)
def test_audio_is_refused_by_name(vlm, value):
    def sing():
        """Sing."""
        return value

    with pytest.raises(MediaError, match=r"tool 'sing' returned audio: .*audio is not supported"):
        read_result(value, "sing")
    (trajectory,) = play(tw.tool_env([sing]), vlm, [call("sing"), "done"])
    assert (trajectory.error.type, trajectory.error.kind, trajectory.reward) == (
        "MediaError",
        "user_bug",
        None,
    )


@pytest.mark.parametrize(
    "value",
    [{"found": [PIXELS]}, [{"a": tw.Image(PIXELS)}], {"a": {"b": Pillow.fromarray(PIXELS)}}],
)
def test_an_image_that_nobody_would_see_is_an_error(value):
    with pytest.raises(EnvError, match="nested in other data"):
        read_content(value, "t")


@pytest.mark.parametrize(
    "value",
    [
        np.zeros((4, 4, 3)),
        CONTENT[:900],
        {"text": "x", "image": ["a.png"]},
        tw.Image("/etc/passwd"),
    ],
)
def test_a_broken_image_is_that_trajectorys_error(vlm, value):
    def look(ok: bool):
        """Look."""
        return PIXELS if ok else value

    def speak(messages, rng):
        if len(messages) > 1:
            return "done"
        return call("look", ok=messages[0].text == "ok")

    played = play(tw.tool_env([look]), vlm, speak, [tw.Task("ok"), tw.Task("broken")])
    assert [t.error is None for t in played] == [True, False]
    assert (played[1].error.type, played[1].error.kind) == ("MediaError", "environment")
    assert played[1].reward is None
    assert len(played[1].turns) == 1


def test_a_clip_at_the_second_turn_and_an_image_at_creation(vlm):
    class Camera(tw.StatefulTool):
        """A camera that shows where it stands, and what happened."""

        def create(self, place: int = 3):
            self.place = place
            return {"text": "The camera shows:", "image": [noise(64, 48, self.place)]}

        def execute(self, clip: bool):
            """Look.

            Args:
                clip: what happened lately, else what is there now.
            """
            return (
                ["It moved: ", tw.Video(CLIP, times=[0, 1, 2, 3, 4, 5])] if clip else noise(32, 32)
            )

    store = MediaStore()
    replies = [call("camera", clip=False), call("camera", clip=True), "It fell."]
    (trajectory,) = play(tw.tool_env([Camera], reward=lambda t: 1.0), vlm, replies, store=store)
    assert trajectory.error is None, trajectory.error
    assert trajectory.reward == 1.0
    first, second, third = (shown(turn.messages) for turn in trajectory.turns)
    assert first == [store.put(tw.Image(noise(64, 48, 3)))]
    assert second == [store.put(tw.Image(noise(32, 32)))]
    assert isinstance(third[0], VideoRef)
    assert (len(third[0].frames), third[0].times) == (6, (0, 1, 2, 3, 4, 5))
    assert trajectory.messages[0].text.endswith("The camera shows:")
    (sample,) = trajectory.samples()
    assert [block.media for block in sample.media] == [*first, *second, *third]
    grids = sample.media[2].grid
    patches = vlm.vision.process(third[0], store)
    assert sum(t * h * w for t, h, w in grids) == len(
        next(v for k, v in patches.items() if k.startswith("pixel_values"))
    )


@pytest.mark.parametrize("keeps", ["start", "ends", "end"])
def test_long_results_are_cut_and_their_images_stay(vlm, keeps):
    def look():
        """Look."""
        return ["a" * 50, PIXELS, "b" * 50, PIXELS]

    env = tw.tool_env([look], result_chars=20, result_keeps=keeps)
    (trajectory,) = play(env, vlm, [call("look"), "done"])
    (message,) = trajectory.turns[1].messages
    assert "[cut: 20 of 100 characters shown]" in message.text
    assert len(message.images) == 2
    ref = ImageRef("ab" * 32)
    assert ResultLimit(4, "ends")(("aaa", ref, "bbb")) == (
        ("aa\n[cut: 4 of 6 characters shown]\n", ref, "bb"),
        True,
    )


def test_a_text_model_is_told_of_what_tools_show():
    def look(named: bool):
        """Look."""
        return tw.Image(PIXELS, alt="a red square" if named else None)

    env = tw.tool_env([look])
    (trajectory,) = tw.rollout(
        env, [tw.Task("x")], tw.ScriptedEngine([call("look", named=True), "done"])
    )
    assert trajectory.turns[1].messages[0].text == "a red square"
    (trajectory,) = tw.rollout(
        env, [tw.Task("x")], tw.ScriptedEngine([call("look", named=False), "done"])
    )
    assert (trajectory.error.type, trajectory.error.kind) == ("MediaError", "user_bug")


def test_judges_are_told_of_images_in_words():
    from turnwright.envs.rewards.judge import chat_messages, quote_lines

    message = tw.Message(
        "user", ("See ", tw.Image(PIXELS, alt="a <cat>"), tw.Image(PIXELS), tw.Video(CLIP, fps=1))
    )
    assert (
        quote_lines([message])
        == '{"role": "user", "content": "See a \\u003ccat>\\n[image]\\n[video]"}'
    )
    assert chat_messages([message]) == [
        {"role": "user", "content": "See a <cat>\n[image]\n[video]"}
    ]


def test_a_server_of_mcp_shows_images_and_its_sounds_are_refused_by_name(vlm):
    server = [sys.executable, str(Path(__file__).parents[1] / "envs" / "mcp_server.py")]
    env = tw.tool_env([tw.mcp_tools(server, only=["square", "picture"])])
    store = MediaStore()
    (trajectory,) = play(env, vlm, [call("square", side=64), "done"], store=store)
    assert trajectory.error is None, trajectory.error
    (message,) = trajectory.turns[1].messages
    here, image, well = message.content
    assert here == "Here:"
    assert well.startswith("Well?\n[left out: audio/wav; models here")
    assert (store.pixels(image) == (255, 0, 0)).all()
    assert image.width == 64
    (trajectory,) = play(env, vlm, [call("picture"), "done"])
    assert (trajectory.error.type, trajectory.error.kind) == ("MediaError", "environment")
    (trajectory,) = tw.rollout(
        env, [tw.Task("x")], tw.ScriptedEngine([call("square", side=64), "done"])
    )
    assert trajectory.turns[1].messages[0].text.startswith("Here:\n[left out: image/png]\nWell?")
