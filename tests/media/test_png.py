"""What is written is read again, to the pixel, by Pillow, whatever the size
and the memory layout."""

from __future__ import annotations

import zlib
from io import BytesIO

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from PIL import Image as Pillow

from turnwright.media import images as module
from turnwright.media.images import encode_png

SIDES = st.tuples(st.integers(1, 40), st.integers(1, 40), st.just(3))


@given(hnp.arrays(np.uint8, SIDES), st.sampled_from([1, 50, 400, 2**20]), st.booleans())
def test_an_image_comes_back_to_the_pixel(pixels, band, turned):
    if turned:
        pixels = pixels[::-1, ::-1]  # no copy: rows and columns run backwards in memory
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_BAND_BYTES", band)
        content = encode_png(pixels)
    picture = Pillow.open(BytesIO(content))
    picture.verify()  # every check sum
    picture = Pillow.open(BytesIO(content))
    assert (picture.format, picture.mode, picture.size) == ("PNG", "RGB", pixels.shape[1::-1])
    assert np.array_equal(np.asarray(picture), pixels)
    assert content.endswith(module.END)


def test_the_size_of_a_photograph_is_no_larger_than_pillow_makes_it():
    down, across = np.mgrid[0:400, 0:600]
    waves = 128 + 100 * np.sin(down / 50) * np.cos(across / 70)
    pixels = np.stack([waves, waves[::-1], waves[:, ::-1]], 2) + np.random.default_rng(0).integers(
        -8, 8, (400, 600, 3)
    )
    pixels = pixels.clip(0, 255).astype(np.uint8)
    theirs = BytesIO()
    Pillow.fromarray(pixels).save(theirs, "PNG", compress_level=1)
    assert len(encode_png(pixels)) < 1.1 * len(theirs.getvalue())
    assert len(encode_png(pixels)) < len(zlib.compress(pixels.tobytes(), 1))
