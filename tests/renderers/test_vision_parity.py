"""Blocks, pixel values and positions are those of transformers' own processors and models."""

from __future__ import annotations

import json
from importlib import import_module
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

from kit.vision import tiny_vlm_directory  # noqa: E402
from PIL import Image as Pillow  # noqa: E402
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil  # noqa: E402

from turnwright.errors import MediaError  # noqa: E402
from turnwright.media import MediaStore, scaled_size  # noqa: E402
from turnwright.renderers import load_renderer  # noqa: E402
from turnwright.types import ImageRef, Message, VideoRef, limit_pixels  # noqa: E402

QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
SIZES = ((32, 32), (96, 64), (70, 130), (1, 1), (3, 500), (640, 480), (257, 31))
SIDES = st.one_of(st.integers(1, 400), st.integers(1, 16_384))


@pytest.fixture(scope="session")
def directories(tmp_path_factory):
    root = tmp_path_factory.mktemp("vlm")
    return {
        family: tiny_vlm_directory(root / family, family, weights=False)
        for family in (*QWEN, "llava", "smolvlm", "idefics3")
    }


@pytest.fixture(scope="session")
def renderers(directories):
    return {family: load_renderer(path) for family, path in directories.items()}


@pytest.fixture(scope="session")
def store():
    return MediaStore()


def picture(store, width, height, seed=0):
    return store.add(
        np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    )


def clip(store, frames, width=64, height=48, fps=2.0):
    refs = tuple(picture(store, width, height, n) for n in range(frames))
    return VideoRef(refs, tuple(n / fps for n in range(frames)))


def own_processor(directory):
    given = json.loads((directory / "preprocessor_config.json").read_text())
    return Qwen2VLImageProcessorPil.from_dict(
        {k: v for k, v in given.items() if k != "image_processor_type"}
    )


# Blocks


@pytest.mark.parametrize("family", QWEN)
@settings(max_examples=150, deadline=None)
@given(width=SIDES, height=SIDES)
def test_qwen_blocks_are_as_large_as_the_processor_counts(
    renderers, directories, family, width, height
):
    eyes, processor = renderers[family].vision, own_processor(directories[family])
    image = ImageRef("0" * 64, width, height)
    try:
        patches = processor.get_number_of_image_patches(height, width)
    except ValueError:
        with pytest.raises(MediaError):
            eyes.block(image)
        return
    block = eyes.block(image)
    ((time, rows, columns),) = block.grid
    assert time * rows * columns == patches
    assert len(block.ids) == patches // 4


@pytest.mark.parametrize("family", ["smolvlm", "idefics3"])
@settings(max_examples=40, deadline=None)
@given(width=st.integers(1, 700), height=st.integers(1, 700))
def test_tiles_are_those_that_the_processor_cuts(renderers, family, width, height):
    eyes = renderers[family].vision
    block = eyes.block(ImageRef("0" * 64, width, height))
    shape = Pillow.new("RGB", (width, height))
    made = eyes._processor([[shape]], return_tensors="np", return_row_col_info=True)
    (rows,), (columns,) = made["rows"][0], made["cols"][0]
    assert len(block.grid) == made["pixel_values"].shape[1] == rows * columns + 1
    places = [f"<row_{r + 1}_col_{c + 1}>" for r in range(rows) for c in range(columns)]
    text = renderers[family].decode(block.ids)
    assert [place for place in places if place in text] == places
    assert text.count("<image>") == 4 * len(block.grid)


def processors(directory, family):
    """transformers' own processor around a tokenizer, for images alone: the video
    processors need torchvision."""
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(directory / "tokenizer.json")
    )
    if family in QWEN:
        name = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL"}[family]
        base = getattr(transformers, f"{name}Processor")

        class Images(base):
            def __init__(self, image_processor=None, tokenizer=None):
                super().__init__(image_processor, tokenizer, None)

            def check_argument_for_proper_class(self, name, value):
                return (
                    None
                    if name == "video_processor"
                    else super().check_argument_for_proper_class(name, value)
                )

        return Images(own_processor(directory), tokenizer)
    eyes = load_renderer(directory).vision
    if family == "llava":
        return transformers.LlavaProcessor(
            eyes._processor,
            tokenizer,
            patch_size=14,
            num_additional_image_tokens=1,
            vision_feature_select_strategy="default",
        )
    # SmolVLM's expansion is Idefics3's; its own processor wants a further package for videos.
    return transformers.Idefics3Processor(eyes._processor, tokenizer, image_seq_len=4)


@pytest.mark.parametrize("family", [*QWEN, "llava", "smolvlm", "idefics3"])
def test_a_prompt_has_the_ids_and_pixels_of_transformers_own_processor(
    renderers, directories, store, family
):
    renderer = renderers[family]
    messages = [
        Message("user", ("one", picture(store, 96, 64), "\nand", picture(store, 70, 130, 1))),
        Message("assistant", "yes"),
        Message("user", (picture(store, 300, 40, 2), "?")),
    ]
    opened = renderer.open(messages)
    text = renderer.template.render(messages, generation_prompt=True)
    pictures = [Pillow.fromarray(store.pixels(block.media)) for block in opened.media]
    given = processors(directories[family], family)(
        text=[text], images=pictures, return_tensors="np"
    )
    assert opened.ids == given["input_ids"][0].tolist()
    made = renderer.vision.merge(
        [renderer.vision.process(block.media, store) for block in opened.media]
    )
    for name, array in made.items():
        assert array.dtype == given[name].dtype
        assert np.array_equal(array, given[name]), name


# Pixel values


@pytest.mark.parametrize("family", QWEN)
@pytest.mark.parametrize("size", SIZES)
def test_qwen_pixels_are_bit_identical(renderers, directories, store, family, size):
    image = picture(store, *size)
    made = renderers[family].vision.process(image, store)
    given = own_processor(directories[family])(
        Pillow.fromarray(store.pixels(image)), return_tensors="np"
    )
    assert np.array_equal(made["pixel_values"], given["pixel_values"])
    assert np.array_equal(made["image_grid_thw"], given["image_grid_thw"])


@pytest.mark.parametrize(
    "change",
    [
        {"do_normalize": False},
        {"do_rescale": False},
        {"do_resize": False},
        {"rescale_factor": 1 / 127.5},
        {"resample": 2},
        {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]},
        {"min_pixels": 200 * 200, "max_pixels": 220 * 220},
        {"temporal_patch_size": 1},
    ],
    ids=lambda change: "-".join(change),
)
def test_every_setting_of_the_processor_counts(directories, store, tmp_path, change):
    for file in directories["qwen3_vl"].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    path = tmp_path / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    if "temporal_patch_size" in change:
        for name in ("config.json", "video_preprocessor_config.json"):
            (tmp_path / name).write_text(
                (tmp_path / name)
                .read_text()
                .replace('"temporal_patch_size": 2', '"temporal_patch_size": 1')
            )
    changed = load_renderer(tmp_path)
    image = picture(store, 128, 96)
    made = changed.vision.process(image, store)
    given = own_processor(tmp_path)(Pillow.fromarray(store.pixels(image)), return_tensors="np")
    assert np.array_equal(made["pixel_values"], given["pixel_values"])
    assert changed.vision.fingerprint != load_renderer(directories["qwen3_vl"]).vision.fingerprint


def test_a_scaled_down_reference_is_processed_as_it_is_shown(renderers, store):
    eyes = renderers["qwen3_vl"].vision
    image = limit_pixels(picture(store, 200, 120), 5000)
    assert store.pixels(image).shape[1::-1] == scaled_size(200, 120, 5000)
    made = eyes.process(image, store)
    assert tuple(made["image_grid_thw"][0]) == eyes.block(image).grid[0]
    assert len(made["pixel_values"]) == np.prod(eyes.block(image).grid[0])


# Videos


@pytest.mark.parametrize("frames", [2, 3, 6, 7])
@pytest.mark.parametrize(("width", "height"), [(64, 48), (20, 10), (200, 150)])
def test_qwen3_videos_are_resized_and_cut_as_by_transformers(
    renderers, store, frames, width, height
):
    own = import_module("transformers.models.qwen3_vl.video_processing_qwen3_vl")
    eyes = renderers["qwen3_vl"].vision
    video = clip(store, frames, width, height)
    scale = eyes._video_scale
    h, w = own.smart_resize(frames, height, width, 2, 32, scale.min_pixels, scale.max_pixels)
    block = eyes.block(video)
    assert block.grid == ((-(-frames // 2), h // 16, w // 16),)
    made = eyes.process(video, store)
    assert made["video_grid_thw"].tolist() == [list(block.grid[0])]
    images = [
        np.asarray(Pillow.fromarray(store.pixels(f)).resize((w, h), Pillow.Resampling.BICUBIC))
        for f in video.frames
    ]
    values = (
        torch.tensor(np.stack(images)).permute(0, 3, 1, 2)[None].to(torch.float64) / 255
    ).float()
    patches, *grid = own.Qwen3VLVideoProcessor.patchify(None, (values - 0.5) / 0.5, 16, 2, 2)
    assert grid == list(block.grid[0])
    assert np.array_equal(made["pixel_values_videos"], patches[0].numpy())


def test_qwen3_videos_tell_the_time_as_transformers_does(renderers, store):
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor as Own

    renderer = renderers["qwen3_vl"]
    for frames, fps in ((2, 2.0), (5, 2.0), (6, 3.0), (7, 0.7)):
        video = clip(store, frames, fps=fps)
        block = renderer.vision.block(video)
        stand_in = SimpleNamespace(
            video_processor=SimpleNamespace(merge_size=2, temporal_patch_size=2),
            vision_start_token="<|vision_start|>",
            vision_end_token="<|vision_end|>",
            video_token="<|video_pad|>",
            _calculate_timestamps=lambda *a: Own._calculate_timestamps(None, *a),
        )
        about = SimpleNamespace(fps=fps, frames_indices=list(range(frames)))
        inputs = {"video_grid_thw": np.array(block.grid), "video_metadata": [about]}
        text = Own.replace_video_token(stand_in, inputs, 0)
        assert renderer.decode(block.ids) == text
        opened = renderer.open([Message("user", ("see", video, "?"))])
        whole = renderer.template.render(
            [Message("user", ("see", video, "?"))], generation_prompt=True
        )
        assert opened.ids == renderer.codec.encode(whole.replace("<|video_pad|>", text))


@pytest.mark.parametrize("family", QWEN)
def test_a_clip_equals_the_video_processor_where_there_is_one(
    directories, renderers, store, family
):
    pytest.importorskip("torchvision", reason="transformers' video processors need torchvision")
    name = "Qwen3VLVideoProcessor" if family == "qwen3_vl" else "Qwen2VLVideoProcessor"
    given = json.loads((directories[family] / "video_preprocessor_config.json").read_text())
    processor = getattr(transformers, name)(
        **{k: v for k, v in given.items() if k != "video_processor_type"}
    )
    for frames, width, height in ((2, 64, 64), (6, 64, 96), (5, 100, 70)):
        video = clip(store, frames, width, height)
        pixels = torch.tensor(np.stack([store.pixels(frame) for frame in video.frames])).permute(
            0, 3, 1, 2
        )
        found = processor(videos=[pixels], return_tensors="np", do_sample_frames=False)
        made = renderers[family].vision.process(video, store)
        assert np.array_equal(made["video_grid_thw"], found["video_grid_thw"])
        # torchvision rounds resized 8-bit values in its own way: one level of 255
        # apart at most, normalised
        assert np.abs(made["pixel_values_videos"] - found["pixel_values_videos"]).max() <= (
            1e-6 if width == 64 else 1 / 255 / 0.26
        )


def test_a_video_of_two_equal_frames_is_an_image_of_the_same_size(renderers, store):
    eyes = renderers["qwen2_5_vl"].vision
    image = picture(store, 64, 96)
    still = eyes.process(VideoRef((image, image), (0.0, 0.5)), store)["pixel_values_videos"]
    assert np.array_equal(still, eyes.process(image, store)["pixel_values"])


# Positions


@pytest.fixture(scope="session")
def models(directories):
    made = {}
    for family in QWEN:
        config = transformers.AutoConfig.from_pretrained(directories[family])
        name = {
            "qwen2_vl": "Qwen2VLModel",
            "qwen2_5_vl": "Qwen2_5_VLModel",
            "qwen3_vl": "Qwen3VLModel",
        }[family]
        with torch.device("meta"):
            made[family] = getattr(transformers, name)(config)
    return made


def rope_index(model, renderer, ids, placed):
    eyes = renderer.vision
    kinds = [1 if i == eyes._image_id else 2 if i == eyes._video_id else 0 for i in ids]
    images = [b.grid[0] for b in placed if isinstance(b.media, ImageRef)]
    videos = [b for b in placed if isinstance(b.media, VideoRef)]
    seconds = [
        2 * (b.media.times[-1] - b.media.times[0]) / (len(b.media.times) - 1) for b in videos
    ]
    more = {"second_per_grid_ts": torch.tensor(seconds)} if eyes._rate and videos else {}
    found, _ = model.get_rope_index(
        torch.tensor([ids]),
        mm_token_type_ids=torch.tensor([kinds], dtype=torch.int32),
        image_grid_thw=torch.tensor(images) if images else None,
        video_grid_thw=torch.tensor([b.grid[0] for b in videos]) if videos else None,
        **more,
    )
    return found[:, 0].numpy()


PARTS = st.lists(
    st.one_of(st.integers(0, 9), st.sampled_from(["wide", "high", "small", "clip", "fast"])),
    max_size=8,
)


@pytest.mark.parametrize("family", QWEN)
@settings(max_examples=25, deadline=None)
@given(parts=PARTS, cuts=st.lists(st.integers(0, 10_000), max_size=4))
def test_positions_are_those_of_get_rope_index(models, renderers, store, family, parts, cuts):
    renderer = renderers[family]
    seen = {
        "wide": picture(store, 256, 64),
        "high": picture(store, 40, 200),
        "small": picture(store, 5, 5),
        "clip": clip(store, 5, fps=2.0),
        "fast": clip(store, 6, 40, 100, fps=3.0),
    }
    content = tuple("w" * part if isinstance(part, int) else seen[part] for part in parts)
    opened = renderer.open([Message("user", content)])
    whole = renderer.vision.positions(len(opened.ids), opened.media)
    assert whole.dtype == np.int64
    assert np.array_equal(whole, rope_index(models[family], renderer, opened.ids, opened.media))
    edges = sorted({0, len(opened.ids), *(cut % (len(opened.ids) + 1) for cut in cuts)})
    pieces = [renderer.vision.positions(end, opened.media, start) for start, end in pairwise(edges)]
    assert np.array_equal(np.concatenate(pieces, axis=1), whole)


def test_one_dimension_is_none(renderers):
    for family in ("llava", "smolvlm", "idefics3"):
        assert renderers[family].vision.positions(10, ()) is None


# What stands at odds


def test_check_tells_pads_and_blocks_apart(renderers, store):
    eyes = renderers["qwen3_vl"].vision
    opened = renderers["qwen3_vl"].open([Message("user", ("a", picture(store, 96, 64), "b"))])
    eyes.check(opened.ids, opened.media)
    (block,) = opened.media
    pad = opened.ids[block.start]
    with pytest.raises(MediaError, match=r"7 placeholders .* but 6 in the blocks of 1 images"):
        eyes.check([*opened.ids, pad], opened.media)
    with pytest.raises(MediaError, match="6 placeholders"):
        eyes.check(opened.ids, ())
    for wrong in (block.shifted(1), block._replace(length=5), block._replace(grid=((1, 2, 12),))):
        with pytest.raises(MediaError, match="its processor makes 6 in 6"):
            eyes.check(opened.ids, (wrong,))


def test_a_processor_for_another_tower_is_refused(directories, tmp_path):
    from turnwright.errors import ModelError

    for file in directories["qwen3_vl"].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"patch_size": 16', '"patch_size": 14'))
    with pytest.raises(
        ModelError, match=r"patch_size = 16, but config.json's vision_config has 14"
    ):
        load_renderer(tmp_path)
    config.write_text(
        config.read_text().replace(
            '"model_type": "qwen3_vl",\n "arch', '"model_type": "seer_vl",\n "arch'
        )
    )
    with pytest.raises(
        ModelError, match="a vision model of unknown type 'seer_vl'; known are qwen2_vl, qwen2_5_vl"
    ):
        load_renderer(tmp_path)


@pytest.mark.parametrize("family", QWEN)
def test_the_8_bit_values_of_patches_are_those_they_were_made_of(family, renderers, store):
    """What a server takes that scales and normalises itself comes to the same numbers."""
    eyes = renderers[family].vision
    scale = eyes._scale
    # All values there are.
    image = store.add(np.arange(64 * 96 * 3, dtype=np.uint32).reshape(64, 96, 3).astype(np.uint8))
    patches = eyes.process(image, store)["pixel_values"]
    raw = eyes.unscaled(patches)
    assert (raw.dtype, raw.shape) == (np.uint8, patches.shape)
    plain = scale._replace(factor=0.0, std=()).patches(
        [store.pixels(image)], *scale.resized(96, 64)
    )
    assert np.array_equal(raw, plain)
    assert len(np.unique(raw)) > 200
