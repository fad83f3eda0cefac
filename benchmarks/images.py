"""What an image a turn costs the rollout loop, over the floor: work W2.

One episode of T turns, a new 224 x 224 image in each, runs through the public
`turnwright.rollout` with its defaults on (media store, journal and records on disk), against an
engine that answers at once with fixed ids and asks for the pixel values of each image that is
new to it, as an engine in the same process does. Behind it the pixel values of the whole
episode are merged for training. The floor is what no loop can do without: each image through
the processor once, one PNG, one encode of the text, ids appended, one merge at the end; the
same processor, the same compression. CPU time, medians of the repeats.

Checked in the same run: every image processed exactly once and written once; each grid's patches /
4 are the pads of its block; the merged pixel values are those of the processor run over all images
at once, bit by bit; merging n chunks copies n chunks. Peak memory is that of Python's and numpy's
allocations (tracemalloc).

    python benchmarks/images.py            # about a minute
    python benchmarks/images.py --quick
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

import turnwright as tw
from turnwright.engines import Generation
from turnwright.media import MediaStore
from turnwright.renderers import load_renderer, template_source
from turnwright.renderers.vision import PixelCache

SIDE = 224
SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.content is "
    "string %}{{ message.content }}{% else %}{% for part in message.content %}{% if "
    "part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ "
    "part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{% if "
    "add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT = (
    "This is what stands before you now; say in one short sentence what has changed and what "
    "you would do next."
)


def make_directory(folder: Path) -> Path:
    """A model directory without weights: the tokenizer, the processor's settings and a chat
    template of the Qwen-VL kind."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2000,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        min_frequency=1,
    )
    tokenizer.train_from_iterator([TEXT, template_source("chatml")] * 4, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = {text: tokenizer.token_to_id(text) for text in SPECIAL}
    vision = {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3}
    config = {
        "model_type": "qwen2_vl",
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "vocab_size": tokenizer.get_vocab_size(),
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "vision_config": vision,
    }
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2VLProcessor",
        "patch_size": 14,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "min_pixels": 56 * 56,
        "max_pixels": 28 * 28 * 1280,
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "do_convert_rgb": True,
        "resample": 3,
        "rescale_factor": 1 / 255,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    }
    for name, value in (
        ("config", config),
        ("preprocessor_config", processor),
        ("generation_config", {}),
    ):
        (folder / f"{name}.json").write_text(json.dumps(value))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"})
    )
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


class Fixed:
    """An engine that answers at once with fixed ids, and looks at each new image once, as a
    cache across turns allows."""

    context = None
    version = 0

    def __init__(self, reply: list[int]) -> None:
        self.reply = reply
        self.logprobs = [-0.5] * len(reply)
        self.pixels: PixelCache | None = None
        self.seen: dict[str, int] = {}
        self.bytes = 0
        self.stamps: list[float] = []

    def add_pixel_source(self, pixels: PixelCache) -> None:
        self.pixels = pixels

    async def generate(self, request: tw.Request) -> Generation:
        self.stamps.append(time.process_time())
        known = self.seen.get(request.session, 0)
        for block in request.media[known:]:
            assert self.pixels is not None
            self.bytes += sum(array.nbytes for array in self.pixels.get(block.media).values())
        self.seen[request.session] = len(request.media)
        return Generation(list(self.reply), list(self.logprobs), "stop", 0)

    def release(self, session: str) -> None:
        pass

    async def close(self) -> None:
        pass


def make_env(images: list[np.ndarray], turns: int, *, shift: int = 0) -> type[tw.Env]:
    """Shows the next image, `turns` of them."""

    class Show(tw.Env):
        async def reset(self, task: tw.Task, *, seed: int | None = None) -> tw.Message:
            self.turn, self.first = 0, shift * int(task.answer)
            return self.look()

        async def step(self, action: tw.Action) -> tw.Step:
            self.turn += 1
            return tw.Step(None, 0.0, True) if self.turn >= turns else tw.Step(self.look())

        def look(self) -> tw.Message:
            return tw.Message(
                "user", (tw.Image(images[(self.first + self.turn) % len(images)]), TEXT)
            )

        async def close(self) -> None:
            pass

    return Show


def png(image: np.ndarray) -> bytes:
    out = BytesIO()
    Image.fromarray(image).save(out, "PNG", compress_level=1)
    return out.getvalue()


def floor(
    process: Callable[[np.ndarray], Any],
    tokenizer: Tokenizer,
    reply: list[int],
    images: list[np.ndarray],
    turns: int,
    to: Path,
) -> Any:
    """The yardstick; the time at which each turn begins goes with what it gives."""
    vocab = tokenizer.get_vocab()
    pad = vocab["<|image_pad|>"]
    before = [
        vocab["<|im_start|>"],
        *tokenizer.encode("user\n", add_special_tokens=False).ids,
        vocab["<|vision_start|>"],
    ]
    after = [vocab["<|im_end|>"], *tokenizer.encode("\n", add_special_tokens=False).ids]
    ids: list[int] = []
    mask: list[int] = []
    chunks, stamps = [], []
    for turn in range(turns):
        image = images[turn]
        (to / f"{turn}.png").write_bytes(png(image))
        values = process(image)
        chunks.append(values)
        text = tokenizer.encode(TEXT, add_special_tokens=False).ids
        delta = [
            *before,
            *[pad] * (int(values["image_grid_thw"].prod()) // 4),
            vocab["<|vision_end|>"],
            *text,
            *after,
        ]
        ids += delta
        mask += [0] * len(delta)
        stamps.append(time.process_time())
        ids += reply
        mask += [1] * len(reply)
    merged = {key: np.concatenate([chunk[key] for chunk in chunks]) for key in chunks[0]}
    return ids, mask, merged, stamps


def cpu(work: Callable[[], Any]) -> tuple[float, Any]:
    gc.collect()
    began = time.process_time()
    result = work()
    return time.process_time() - began, result


def peak(work: Callable[[], Any]) -> int:
    """Most bytes allocated at once while a call runs."""
    gc.collect()
    tracemalloc.start()
    work()
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return most


def growth(stamps: list[float]) -> float:
    """The last four gaps between turns over the first four."""
    return (stamps[-1] - stamps[-5]) / (stamps[4] - stamps[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    repeats = 3 if parser.parse_args().quick else 9
    with tempfile.TemporaryDirectory() as temporary:
        print(json.dumps(measure(Path(temporary), repeats)))


def measure(root: Path, repeats: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    images = [rng.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8) for _ in range(256)]
    renderer = load_renderer(make_directory(root))
    eyes = renderer.vision
    assert eyes is not None
    tokenizer = Tokenizer.from_file(str(root / "tokenizer.json"))
    reply = [
        *tokenizer.encode(TEXT, add_special_tokens=False).ids,
        tokenizer.token_to_id("<|im_end|>"),
    ]
    runs = iter(range(10**9))

    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    theirs = Qwen2VLImageProcessorPil.from_pretrained(root)
    bare = MediaStore()

    def hugging_face(image: np.ndarray) -> Any:
        return dict(theirs(images=[Image.fromarray(image)], return_tensors="np"))

    def own(image: np.ndarray) -> Any:
        return dict(eyes.process(bare.add(image), bare))

    def play(
        turns: int, env: type[tw.Env], engine: Fixed, store: MediaStore | None = None, n: int = 1
    ) -> Any:
        folder = root / f"run{next(runs)}"
        limits = tw.Limits(turns=turns)
        rows = tw.rollout(
            env,
            [tw.Task(answer=i) for i in range(n)],
            engine,
            renderer=renderer,
            limits=limits,
            out=folder,
        )
        assert engine.pixels is not None
        merged = None
        for row in rows:  # as a trainer does: the pixel values of one forward pass at a time
            merged = None
            merged = engine.pixels.merged(
                [block.media for block in row.media_placements(len(row.spans) - 1)]
            )
        return rows, merged, engine, folder

    print("CPU ms a turn          floor   floor, own processor   ours   ours / floor   ours / own")
    rows: dict[int, tuple[float, ...]] = {}
    for turns in (4, 16):
        measured = []
        for _ in range(repeats):
            folder = root / f"floor{next(runs)}"
            folder.mkdir()
            a, _ = cpu(
                lambda t=turns, to=folder: floor(hugging_face, tokenizer, reply, images, t, to)
            )
            bare = MediaStore()
            b, _ = cpu(lambda t=turns, to=folder: floor(own, tokenizer, reply, images, t, to))
            c, _ = cpu(lambda t=turns: play(t, make_env(images, t), Fixed(reply)))
            measured.append((a / turns * 1e3, b / turns * 1e3, c / turns * 1e3, c / a, c / b))
        rows[turns] = tuple(statistics.median(column) for column in zip(*measured, strict=True))
        a, b, c, ratio, fast = rows[turns]
        print(f"T={turns:<18}{a:8.2f}{b:23.2f}{c:7.2f}{ratio:15.2f}{fast:13.2f}")
    grown = [growth(play(16, make_env(images, 16), Fixed(reply))[2].stamps) for _ in range(repeats)]
    (trajectory,), merged, engine, folder = play(16, make_env(images, 16), Fixed(reply))
    return {
        "ratio": round(rows[16][3], 3),
        "ratio_own_processor": round(rows[16][4], 3),
        "ms_per_turn": round(rows[16][2], 2),
        "growth": round(statistics.median(grown), 3),
        **exact(trajectory, merged, engine, folder, hugging_face, images),
        **memory(play, images, reply),
    }


def exact(
    trajectory: tw.Trajectory,
    merged: Any,
    engine: Fixed,
    folder: Path,
    process: Any,
    images: list[np.ndarray],
) -> dict[str, Any]:
    """What must hold, whatever it costs."""
    placed = trajectory.media_placements(len(trajectory.spans) - 1)
    ids = trajectory.path(len(trajectory.spans) - 1)
    whole = [process(image) for image in images[: len(placed)]]
    theirs = {key: np.concatenate([row[key] for row in whole]) for key in whole[0]}
    assert engine.pixels is not None
    pads = [
        sum(i in engine.pixels.vision.pad_ids for i in ids[block.start : block.end])
        for block in placed
    ]
    counted = [int(np.prod(row)) // 4 for row in theirs["image_grid_thw"]]
    chunk_bytes = sum(
        array.nbytes for block in placed for array in engine.pixels.get(block.media).values()
    )
    extra = peak(lambda: engine.pixels.merged([block.media for block in placed]))
    return {
        "images": len(placed),
        "images_processed": engine.pixels.processed,
        "pngs": len(list((folder / "media").glob("*.png"))),
        "bytes_to_engine": engine.bytes,
        "pads_equal_grids": pads == counted
        and sum(pads) == sum(i in engine.pixels.vision.pad_ids for i in ids),
        "pixels_equal": all(np.array_equal(np.asarray(merged[key]), theirs[key]) for key in theirs),
        "merge_bytes_over_chunks": round(extra / chunk_bytes, 3),
    }


def memory(play: Any, images: list[np.ndarray], reply: list[int]) -> dict[str, Any]:
    """Peak memory of a group of 16 episodes over that of one: siblings that see the same images,
    and such that do not."""
    one = peak(lambda: play(16, make_env(images, 16), Fixed(reply)))
    same = peak(lambda: play(16, make_env(images, 16), Fixed(reply), n=16))
    unlike = peak(lambda: play(16, make_env(images, 16, shift=16), Fixed(reply), n=16))
    return {
        "group_memory_ratio": round(same / one, 3),
        "group_memory_ratio_unlike": round(unlike / one, 3),
        "mb_of_one": one >> 20,
    }


if __name__ == "__main__":
    main()
