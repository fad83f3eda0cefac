"""Run by a test in an interpreter of its own: what is seen is rendered and processed where
torch cannot be imported.

With the directory of a vision-language model for each argument.
"""

from __future__ import annotations

import sys

HEAVY = ("torch", "torchvision", "numba", "safetensors", "ray")


class Hidden:
    """A finder of modules that finds none of the heavy ones, as if they were not installed;
    transformers asks for them."""

    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, fullname, path=None, target=None):
        return (
            None
            if fullname.partition(".")[0] in HEAVY
            else self.finder.find_spec(fullname, path, target)
        )

    def __getattr__(self, name):
        return getattr(self.finder, name)


sys.meta_path[:] = [Hidden(finder) for finder in sys.meta_path]

import numpy as np  # noqa: E402

from turnwright.media import MediaStore  # noqa: E402
from turnwright.renderers import load_renderer  # noqa: E402
from turnwright.renderers.vision import PixelCache  # noqa: E402
from turnwright.types import Message, VideoRef  # noqa: E402

store = MediaStore()
images = [
    store.add(np.random.default_rng(n).integers(0, 256, (40 + n, 90, 3), dtype=np.uint8))
    for n in range(2)
]
for directory in sys.argv[1:]:
    renderer = load_renderer(directory)
    seen = (
        images
        if "qwen" not in directory
        else [*images, VideoRef((images[0],) * 3, (0.0, 0.5, 1.0))]
    )
    opened = renderer.open([Message("user", ("look", *seen))])
    assert [block.media for block in opened.media] == seen
    pixels = PixelCache(renderer.vision, store)
    merged = pixels.merged([block.media for block in opened.media])
    pads = sum(token in renderer.vision.pad_ids for token in opened.ids)
    print(directory.rpartition("/")[2], pads, {name: array.shape for name, array in merged.items()})
    renderer.vision.positions(len(opened.ids), opened.media)
assert not any(name in sys.modules for name in HEAVY)
print("seen without torch")
