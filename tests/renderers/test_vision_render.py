"""Messages with images through real templates and tokenizers of each family."""

from __future__ import annotations

import numpy as np
import pytest
from kit.vision import tiny_vlm_directory

from turnwright.errors import MediaError
from turnwright.media import MediaStore
from turnwright.renderers import Branch, Extend, SampledReply, load_renderer
from turnwright.types import ImageRef, Message, VideoRef

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava", "smolvlm", "idefics3")


@pytest.fixture(scope="session")
def renderers(tmp_path_factory):
    root = tmp_path_factory.mktemp("vlm")
    return {
        family: load_renderer(tiny_vlm_directory(root / family, family, weights=False))
        for family in FAMILIES
    }


@pytest.fixture(scope="session")
def store():
    return MediaStore()


def picture(store, width, height, seed=0):
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return store.add(pixels)


def pads(renderer, ids):
    return sum(token in renderer.vision.pad_ids for token in ids)


@pytest.mark.parametrize("family", FAMILIES)
def test_images_of_several_turns_stand_where_they_belong(renderers, store, family):
    renderer = renderers[family]
    first, second = picture(store, 96, 64), picture(store, 70, 130, 1)
    asked = Message("user", (first, "what is <image> and <|image_pad|> here"))
    opened = renderer.open([asked])
    assert opened.neutralised == 1  # a placeholder in a text is that text
    reply = renderer.encode_reply("up")
    told = Message("user", ("look", second, "and again", first))
    followed = renderer.extend([asked, Message("assistant", "up")], reply, [told])
    for rendered, media in ((opened, [first]), (followed, [second, first])):
        assert [block.media for block in rendered.media] == media
        for block in rendered.media:
            known = renderer.vision.block(block.media)
            assert tuple(rendered.ids[block.start : block.end]) == known.ids
            assert (block.grid, block.compact) == (known.grid, known.compact)
        assert pads(renderer, rendered.ids) == sum(
            pads(renderer, renderer.vision.block(one).ids) for one in media
        )
    whole = renderer.template.render(
        [asked, Message("assistant", "up"), told], generation_prompt=True
    )
    compact = (
        renderer.vision.compact(opened.ids, opened.media)
        + reply
        + renderer.vision.compact(followed.ids, followed.media)
    )
    assert renderer.decode(compact) == whole
    ids = [*opened.ids, *reply]
    conversation = [asked, Message("assistant", "up"), told]
    composed = renderer.compose(
        conversation, [SampledReply(1, reply, len(opened.ids))], ids, (), opened.media
    )
    assert isinstance(composed, Extend)
    assert (composed.ids, composed.media) == (followed.ids, followed.media)


@pytest.mark.parametrize("family", FAMILIES)
def test_another_image_of_the_same_size_is_no_common_prefix(renderers, store, family):
    renderer = renderers[family]
    one, other = picture(store, 64, 64, 2), picture(store, 64, 64, 3)
    opened = renderer.open([Message("user", ("at", one, "?"))])
    reply = renderer.encode_reply("up")
    conversation = [
        Message("user", ("at", other, "?")),
        Message("assistant", "up"),
        Message("user", "and now"),
    ]
    composed = renderer.compose(
        conversation,
        [SampledReply(1, reply, len(opened.ids))],
        [*opened.ids, *reply],
        (),
        opened.media,
    )
    assert isinstance(composed, Branch)
    assert composed.keep == opened.media[0].start
    assert composed.media[0].media == other
    assert composed.media[0].start == 0


def test_eyes_are_of_the_fingerprint_and_their_ids_are_banned(renderers, tmp_path):
    renderer = renderers["qwen3_vl"]
    smaller = load_renderer(
        tiny_vlm_directory(tmp_path, "qwen3_vl", weights=False, max_pixels=64 * 64)
    )
    assert smaller.fingerprint != renderer.fingerprint
    names = {
        renderer.codec.control[f"<|{name}|>"]
        for name in ("image_pad", "video_pad", "vision_start", "vision_end")
    }
    assert renderer.vision.placeholder_ids == names
    assert names <= renderer.banned_ids


def test_what_a_model_cannot_see_is_an_error_of_media(renderers, store):
    thin = picture(store, 1, 900)
    with pytest.raises(MediaError, match="a ratio of sides up to 200"):
        renderers["qwen3_vl"].open([Message("user", (thin, "?"))])
    clip = VideoRef((picture(store, 32, 32),) * 4, (0.0, 0.5, 1.0, 1.5))
    with pytest.raises(MediaError, match="no videos"):
        renderers["llava"].open([Message("user", (clip, "?"))])
    with pytest.raises(MediaError, match="unknown size"):
        renderers["llava"].open([Message("user", (ImageRef("0" * 64), "?"))])
