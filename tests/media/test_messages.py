"""Images in messages: every shape that people write them in, as words, as
references, and as plain data."""

from __future__ import annotations

import base64
import pickle
from pathlib import Path

import numpy as np
import pytest
from kit.pictures import noise, png
from PIL import Image as Pillow

import turnwright as tw
from turnwright.errors import MediaError
from turnwright.media import MediaLimits, MediaStore, media_as_bytes, media_as_text, store_media
from turnwright.media.images import decode
from turnwright.types import ImageRef, Message, VideoRef, as_messages, is_media

PIXELS = noise(6, 5)
URI = f"data:image/png;base64,{base64.b64encode(png(PIXELS)).decode()}"
SHAPES = [
    tw.Image(PIXELS),
    PIXELS,
    Pillow.fromarray(PIXELS),
    {"type": "image", "image": PIXELS},
    {"type": "image", "image": tw.Image(PIXELS)},
    {"type": "image", "image": URI},
    {"type": "image", "image": {"bytes": png(PIXELS), "path": "a/b.png"}},
    {"type": "image", "url": URI},
    {"type": "image_url", "image_url": {"url": URI, "detail": "low"}},
    {"type": "image_url", "image_url": URI},
    {"type": "input_image", "image_url": URI},
]


@pytest.mark.parametrize("part", SHAPES, ids=range(len(SHAPES)))
def test_every_shape_of_a_part_is_the_same_image(part):
    store = MediaStore()
    ref = store.put(tw.Image(PIXELS))
    (message,) = store_media([Message.of({"role": "user", "content": ["look", part]})], store)
    assert message.content == ("look", ref)


@pytest.mark.parametrize("said", [tw.Image(PIXELS), PIXELS, Pillow.fromarray(PIXELS)])
def test_an_image_alone_is_a_message_of_the_user(said):
    (message,) = as_messages(said)
    assert (message.role, message.has_raw_media, message.text) == ("user", True, "")
    (message,) = as_messages(["Look:", said, "What is it?"])
    assert message.text == "Look:\nWhat is it?"
    assert len(message.content) == 3
    two = as_messages(["Look:", {"role": "user", "content": [said]}])
    assert [m.has_raw_media for m in two] == [False, True]


def test_references_survive_as_dicts():
    ref = ImageRef("ab" * 32, 6, 5, 12, "a cat")
    clip = VideoRef((ref, ImageRef("cd" * 32, 6, 5, 12)), (0.0, 0.5), "a clip")
    message = Message("tool", ("x", ref, clip), name="t", tool_call_id="1")
    again = Message.of(message.to_dict())
    assert again == message
    assert [part.alt for part in again.media] == ["a cat", "a clip"]
    assert [part.max_pixels for part in again.images] == [12]


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ({"type": "audio", "audio": b"x"}, "of audio.*transcript"),
        ({"type": "audio_url", "audio_url": {"url": "x"}}, "of audio"),
        ({"type": "input_audio", "input_audio": {"data": "x", "format": "wav"}}, "of audio"),
        ({"audio": b"x"}, "of audio"),
        ({"type": "image"}, "without an image"),
        ({"type": "smell", "smell": 1}, "text, an image or a video"),
        ({"type": "video", "video": "a.mp4"}, "list of frames"),
        ({"type": "video_url", "video_url": {"url": "https://x/a.mp4"}}, "list of frames"),
        ({"type": "video", "video": b"\0\0\0\x18ftyp"}, "list of frames"),
        (7, "text, an image or a video"),
    ],
)
def test_what_is_no_part_is_refused_by_name(part, said):
    with pytest.raises(TypeError, match=said):
        Message.of({"role": "user", "content": [part]})


def test_a_message_with_audio_is_refused():
    with pytest.raises(TypeError, match="audio"):
        Message.of({"role": "assistant", "content": "x", "audio": {"id": "audio_1"}})
    assert Message.of({"role": "assistant", "content": "x", "audio": None}).text == "x"


@pytest.mark.parametrize("part", [
    {"type": "video", "frames": [PIXELS, PIXELS], "fps": 2},
    {"type": "video", "video": [URI, {"type": "image", "image": PIXELS}], "times": [0, 0.5]},
    {"type": "video", "video": {"frames": [PIXELS, PIXELS], "fps": 2.0}},
    {"type": "video", "video": np.stack([PIXELS, PIXELS]), "fps": 2, "alt": "still"},
    tw.Video([PIXELS, PIXELS], fps=2),
])  # fmt: skip
def test_every_shape_of_a_clip(part):
    store = MediaStore()
    (message,) = store_media([Message.of({"role": "user", "content": [part]})], store)
    ref = store.put(tw.Image(PIXELS))
    assert message.content == (VideoRef((ref, ref), (0.0, 0.5)),)


def test_paths_in_texts_are_not_opened(tmp_path):
    path = tmp_path / "a.png"
    path.write_bytes(png(PIXELS))
    store = MediaStore()
    assert store.put(tw.Image(path)).width == 6
    for value in (
        str(path),
        f"file://{path}",
        f"data:image/png;base64,{path}",
        "http://127.0.0.1:1/a.png",
    ):
        for part in (
            {"type": "image", "image": value},
            {"type": "image_url", "image_url": {"url": value}},
        ):
            with pytest.raises(MediaError):
                store_media([Message.of({"role": "tool", "content": [part]})], store)


def test_words_stand_for_images_where_nothing_is_seen():
    clip = tw.Video([PIXELS], fps=1, alt="it turns")
    message = Message.of(
        {"role": "user", "content": ["A ", tw.Image(PIXELS, alt="a cat"), " B ", clip]}
    )
    (plain,) = media_as_text([message])
    assert plain.text == "A a cat B it turns" == message.text_with_alt
    bare = Message.of({"role": "tool", "content": [tw.Image(PIXELS), tw.Video([PIXELS], fps=1)]})
    assert bare.text_with_alt == "[image]\n[video]"
    with pytest.raises(
        MediaError, match=r"sees no images.*role tool.*tw.Image\(..., alt="
    ) as found:
        media_as_text([bare])
    assert found.value.bug
    assert media_as_text([bare], strict=False)[0].text == "[image]\n[video]"
    text = Message("user", "x")
    assert media_as_text([text])[0] is text


def test_messages_without_images_stay_the_very_objects():
    store = MediaStore()
    messages = (
        Message("user", "x"),
        Message("user", ("x", "y")),
        Message("user", ("x", store.put(tw.Image(PIXELS)))),
    )
    assert all(a is b for a, b in zip(store_media(messages, store), messages, strict=True))
    assert all(a is b for a, b in zip(media_as_bytes(messages), messages, strict=True))


@pytest.mark.parametrize(
    "value",
    [PIXELS, PIXELS[::-1], Pillow.fromarray(PIXELS), png(PIXELS), URI, "path", noise(4, 4, 1, 4)],
)
def test_what_crosses_to_another_process_is_plain_data(value, tmp_path):
    if isinstance(value, str) and value == "path":
        value = tmp_path / "x.png"
        value.write_bytes(png(PIXELS))
    message = Message("user", ("x", tw.Image(value, alt="a", max_pixels=9)))
    (across,) = media_as_bytes([message])
    image = across.content[1]
    assert type(image.value) is bytes
    assert (image.alt, image.max_pixels) == ("a", 9)
    assert np.array_equal(decode(image, MediaLimits()), decode(value, MediaLimits()))
    (clip,) = media_as_bytes([Message("user", (tw.Video([value, value], times=np.array([0, 1])),))])
    assert [type(frame.value) for frame in clip.content[0].frames] == [bytes, bytes]
    data = pickle.dumps((across, clip))
    assert b"numpy" not in data
    assert b"PIL" not in data
    assert b"pathlib" not in data


def test_a_broken_image_does_not_cross():
    with pytest.raises(MediaError, match="float64"):
        media_as_bytes([Message("user", (tw.Image(np.zeros((4, 4, 3))),))])


def test_names_of_tasks_follow_what_is_seen(tmp_path):
    one = tw.Task([{"role": "user", "content": ["x", PIXELS]}])
    assert one == tw.Task([{"role": "user", "content": ["x", PIXELS.copy()]}])
    assert one.id != tw.Task([{"role": "user", "content": ["x", noise(6, 5, 1)]}]).id
    assert one.id != tw.Task([{"role": "user", "content": ["x", tw.Image(PIXELS, alt="a cat")]}]).id
    assert tw.Image(PIXELS, name="a.png") == tw.Image(noise(4, 4), name="a.png")
    assert tw.Image(Path("a.png")) == tw.Image(Path("a.png"), alt="b")
    assert hash(tw.Image(PIXELS)) == hash(tw.Image(PIXELS.copy()))
    assert tw.Image(PIXELS.astype(np.int32)) != tw.Image(PIXELS)
    broken = tmp_path / "broken.png"
    broken.write_bytes(png(noise(64, 64))[:2000])
    picture = Pillow.open(broken)
    assert tw.Task([picture]).id == tw.Task([picture]).id
    huge = np.broadcast_to(np.uint8(7), (60_000, 60_000, 3))
    assert tw.Task(images=[huge]).id == tw.Task(images=[huge]).id


def test_numbers_of_numpy_are_no_pictures():
    assert not is_media(np.float64(3.5))
    assert not is_media(np.str_("x"))
    assert as_messages(np.str_("x"))[0].text == "x"
