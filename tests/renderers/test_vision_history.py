"""Images over several turns: images of tools, policies, the sanity check; each prompt holds whole
blocks, as many as images."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import corpus
from kit.vision import tiny_vlm_directory

from turnwright.media import MediaStore
from turnwright.renderers import Branch, Extend, SampledReply, load_renderer
from turnwright.renderers.contract import explain_contract
from turnwright.renderers.full_render import BuiltConversation, OriginRun, compare_with_render
from turnwright.renderers.history import (
    ConversationState,
    downscale_images,
    keep_images,
    render_next,
)
from turnwright.types import (
    Message,
    Origin,
    ToolCall,
    VideoRef,
    ids_with_media_keys,
    placements_between,
)

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "llava", "smolvlm")
TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "d",
            "parameters": {"type": "object", "properties": {}},
        },
    },
)
CALL = Message("assistant", "", (ToolCall("look", {}, "call_1"),))
CALLED = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'


@pytest.fixture(scope="session")
def renderers(tmp_path_factory):
    root = tmp_path_factory.mktemp("vlm")
    made = {
        family: load_renderer(tiny_vlm_directory(root / family, family, weights=False))
        for family in FAMILIES
    }
    made["blind tools"] = load_renderer(
        tiny_vlm_directory(root / "blind", "qwen3_vl", weights=False, tool_images=False)
    )
    return made


@pytest.fixture(scope="session")
def store():
    return MediaStore()


def picture(store, width, height, seed=0):
    return store.add(
        np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    )


def text_of(renderer, rendered):
    return renderer.decode(renderer.vision.compact(rendered.ids, rendered.media))


# Images of tools


def answers(store):
    one, other = picture(store, 64, 64), picture(store, 96, 64, 1)
    return (
        one,
        other,
        [
            Message("tool", ("first", one), tool_call_id="call_1", name="look"),
            Message("tool", (other, "second"), tool_call_id="call_1", name="look"),
        ],
    )


def test_a_template_that_shows_images_of_tools_keeps_them_there(renderers, store):
    renderer = renderers["qwen3_vl"]
    one, other, told = answers(store)
    rendered = renderer.extend(
        [Message("user", "u"), CALL], renderer.encode_reply(CALLED), told, TOOLS
    )
    shown = text_of(renderer, rendered)
    assert shown.count("<tool_response>") == 2
    assert shown.index("first<|vision_start|><|image_pad|>") < shown.index(
        "<|image_pad|><|vision_end|>second"
    )
    assert [block.media for block in rendered.media] == [one, other]
    assert rendered.tool_images_moved == 0
    assert renderer.contract.tool_images is True


def test_images_that_the_template_drops_from_tools_follow_as_a_users(renderers, store):
    renderer = renderers["blind tools"]
    one, other, told = answers(store)
    assert renderer.contract.tool_images is False
    assert any("tool_media_moved" in line for _, line in explain_contract(renderer.contract))
    history = [Message("user", "u"), CALL]
    reply = renderer.encode_reply(CALLED)
    rendered = renderer.extend(history, reply, told, TOOLS)
    shown = text_of(renderer, rendered)
    place = "<|vision_start|><|image_pad|><|vision_end|>"
    assert shown.endswith(
        f"second\n</tool_response><|im_end|>\n<|im_start|>user\n{place * 2}<|im_end|>\n<|im_start|>assistant\n"  # noqa: E501
    )
    assert [block.media for block in rendered.media] == [one, other]
    assert rendered.tool_images_moved == 2
    spoken = renderer.extend(history, reply, [*told, Message("user", "and now?")], TOOLS)
    assert f"<|im_start|>user\n{place * 2}and now?<|im_end|>" in text_of(renderer, spoken)
    opened = renderer.open(history[:1], TOOLS)
    path = [*opened.ids, *reply]
    composed = renderer.compose(
        [*history, *told], [SampledReply(1, reply, len(opened.ids))], path, TOOLS, opened.media
    )
    assert isinstance(composed, Extend)
    assert (composed.ids, composed.media, composed.tool_images_moved) == (
        rendered.ids,
        rendered.media,
        2,
    )
    later = renderer.encode_reply("well")
    whole = [*history, *told, Message("assistant", "well"), Message("user", "go on")]
    longer = [*path, *composed.ids]
    replies = [SampledReply(1, reply, len(opened.ids)), SampledReply(4, later, len(longer))]
    placed = [block.shifted(len(path)) for block in composed.media]
    again = renderer.compose(whole, replies, [*longer, *later], TOOLS, placed)
    assert isinstance(again, Extend)
    assert (again.media, again.tool_images_moved, again.replies) == (
        (),
        0,
        (len(opened.ids), len(longer)),
    )


# Templates in use


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("qwen3_vl", "qwen3_vl"),
        ("qwen2_5_vl", "qwen2_5_vl"),
        ("smolvlm", "smolvlm"),
        ("idefics3", "idefics3"),
        ("llava", "llava_next"),
    ],
)
def test_templates_in_use_place_images_in_prompts_appends_and_results(
    tmp_path, store, family, name
):
    template = corpus.CACHE / "trl" / f"{name}.jinja"
    if not template.is_file():
        pytest.skip(
            "the templates in use are not here; PYTHONPATH=tests python -m kit.corpus fetches them"
        )
    renderer = load_renderer(
        tiny_vlm_directory(tmp_path, family, weights=False), template=str(template)
    )
    one, other = picture(store, 96, 64), picture(store, 70, 130, 1)
    asked, said = Message("user", (one, "what is here")), Message("assistant", "up")
    told = Message("user", ("look", other, "again"))
    opened, reply = renderer.open([asked]), renderer.encode_reply("up")
    followed = renderer.extend([asked, said], reply, [told])
    ids = [*opened.ids, *reply]
    composed = renderer.compose(
        [asked, said, told], [SampledReply(1, reply, len(opened.ids))], ids, (), opened.media
    )
    assert isinstance(composed, Extend)
    assert (composed.ids, composed.media) == (followed.ids, followed.media)
    check_prompt(renderer, opened.ids, opened.media, [one])
    check_prompt(renderer, followed.ids, followed.media, [other])
    result = renderer.extend(
        [asked, CALL],
        renderer.encode_reply("up"),
        [replace(told, role="tool", tool_call_id="call_1")],
        TOOLS,
    )
    check_prompt(renderer, result.ids, result.media, [other])


# Conversations made up


PARTS = st.lists(
    st.one_of(st.sampled_from(["go on", "", "<image><|image_pad|>", "a\n\n"]), st.integers(0, 3)),
    max_size=4,
)
TURNS = st.lists(PARTS, min_size=1, max_size=5)


def content_of(store, parts, family):
    sizes = ((64, 64), (96, 40), (33, 150), (64, 64))
    return tuple(
        part
        if isinstance(part, str)
        else VideoRef(tuple(picture(store, 48, 48, n) for n in range(3)), (0.0, 0.5, 1.0))
        if part == 2 and family.startswith("qwen")
        else picture(store, *sizes[part], part)
        for part in parts
    )


def check_prompt(renderer, ids, placed, media):
    """Placeholder runs = images = grid rows; pads = what the processor counts; there and back."""
    eyes = renderer.vision
    assert [block.media for block in placed] == media
    assert sum(i in eyes.pad_ids for i in ids) == sum(
        sum(i in eyes.pad_ids for i in eyes.block(m).ids) for m in media
    )
    assert all(block.grid == eyes.block(block.media).grid for block in placed)
    compact = eyes.compact(ids, placed)
    assert sum(i in eyes.pad_ids for i in compact) == len(media)
    assert eyes.expand(compact, media) == (list(ids), tuple(placed))
    eyes.check(ids, placed)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=12, deadline=None)
@given(
    turns=TURNS,
    history=st.sampled_from(["append", "template", "keep", "downscale"]),
    count=st.integers(0, 3),
)
def test_every_prompt_of_a_conversation_shows_its_images_whole(
    renderers, store, family, turns, history, count
):
    renderer = renderers[family]
    mode = {"keep": keep_images(count), "downscale": downscale_images(count)}.get(history, history)
    messages = [Message("user", content_of(store, turns[0], family) or "hello")]
    opened = renderer.open(messages)
    ids, placed, replies = list(opened.ids), list(opened.media), []
    for number, parts in enumerate(turns[1:]):
        reply = renderer.encode_reply(f"move {number}")
        replies.append(SampledReply(len(messages), reply, len(ids)))
        ids += reply
        messages.append(Message("assistant", f"move {number}"))
        told = [Message("user", content_of(store, parts, family))]
        found = render_next(
            mode, renderer, ConversationState(messages, replies, ids, (), placed), told
        )
        if isinstance(found, Branch):
            assert history in ("keep", "downscale")
            assert (
                ids_with_media_keys(ids, placed)[: found.keep]
                == ids_with_media_keys([*ids[: found.keep], *found.ids], placed)[: found.keep]
            )
        keep = found.keep if isinstance(found, Branch) else len(ids)
        kept = placements_between(placed, 0, keep)  # raises where a block would be cut
        placed = [*kept, *(block.shifted(keep) for block in found.media)]
        ids = [*ids[:keep], *found.ids]
        starts = found.replies or [reply.start for reply in replies]
        replies = [
            reply._replace(start=start) for reply, start in zip(replies, starts, strict=True)
        ]
        assert all(
            ids[r.start : r.start + len(r.ids)] == list(r.ids) for r in replies if r.start >= 0
        )
        messages += told
        shown = [media for message in messages for media in message.media]
        if history == "keep":
            shown = shown[max(0, len(shown) - count) :]
        elif history == "downscale":
            older = max(0, len(shown) - count)
            assert all(b.media != m for b, m in zip(placed[:older], shown, strict=False))
            assert [b.media for b in placed[older:]] == shown[older:]
            shown = [block.media for block in placed]
        check_prompt(renderer, ids, placed, shown)


def test_older_images_are_shown_at_a_quarter_of_their_area(renderers, store):
    renderer = renderers["qwen3_vl"]
    clip = VideoRef((picture(store, 128, 128),) * 2, (0.0, 0.5))
    messages = [
        Message("user", (picture(store, 256, 128), clip)),
        Message("assistant", "a"),
        Message("user", (picture(store, 64, 64),)),
    ]
    shown = downscale_images(1)(messages, (1,))
    assert shown[1] is messages[1]
    assert shown[2] is messages[2]
    image, video = shown[0].media
    assert renderer.vision.block(messages[0].media[0]).grid == ((1, 8, 16),)
    assert renderer.vision.block(image).grid == ((1, 4, 8),)
    assert renderer.vision.block(video).grid == ((1, 4, 4),)
    # Of what it is given.
    assert downscale_images(1)(shown, (1,))[0].media[0].max_pixels == 256 * 128 // 16
    assert downscale_images(3)(messages, (1,)) == messages


# The sanity check


def test_the_sanity_check_reads_past_images(renderers, store):
    renderer = renderers["qwen3_vl"]
    one, other = picture(store, 64, 64), picture(store, 64, 64, 5)
    asked = Message("user", ("see <|image_pad|>", one, "?"))
    opened = renderer.open([asked])
    reply = renderer.encode_reply("up")
    ids = [*opened.ids, *reply]
    pieces = [
        OriginRun(Origin.PROMPT, 0, len(opened.ids)),
        OriginRun(Origin.MODEL, len(opened.ids), len(ids), 0),
    ]
    plain = replace(asked, content=("see", one, "?"))
    clean = renderer.open([plain])
    right = BuiltConversation(
        [*clean.ids, *reply],
        [
            OriginRun(Origin.PROMPT, 0, len(clean.ids)),
            OriginRun(Origin.MODEL, len(clean.ids), len(clean.ids) + 3, 0),
        ],
        [plain, Message("assistant", "up")],
        placed=clean.media,
    )
    assert compare_with_render(renderer, right) is None
    found = compare_with_render(
        renderer,
        BuiltConversation(
            ids, pieces, [asked, Message("assistant", "up")], neutralised=True, placed=opened.media
        ),
    )
    assert found is not None
    assert found.cause == "control_text"
    swapped = replace(plain, content=("see", other, "?"))
    found = compare_with_render(
        renderer, replace(right, messages=[swapped, Message("assistant", "up")])
    )
    assert found is not None
    assert (found.cause, found.position) == ("image", clean.media[0].start)
    twice = replace(
        right, ids=[*right.ids[:3], 40, *right.ids[3:]], placed=[b.shifted(1) for b in clean.media]
    )
    found = compare_with_render(renderer, twice)
    assert found is not None
    assert found.position == 3
