"""Every form of an image ends as the right pixels or as a MediaError that says what is wrong;
nothing large is decoded."""

from __future__ import annotations

import base64
import os
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.pictures import SVG, bomb, chunk, file_of, noise, png, png16
from PIL import Image as Pillow

from turnwright.errors import MediaError
from turnwright.media import MediaLimits
from turnwright.media.images import decode

LIMITS = MediaLimits()


def same(value, pixels) -> bool:
    found = decode(value, LIMITS)
    return found.dtype == np.uint8 and found.shape == pixels.shape and np.array_equal(found, pixels)


def data_uri(content: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


@pytest.mark.parametrize("size", [(1, 1), (1, 300), (33, 7), (224, 224)])
def test_all_forms_of_one_image_are_the_same_pixels(size, tmp_path):
    pixels = noise(*size)
    path = tmp_path / "x.png"
    path.write_bytes(png(pixels))
    content = path.read_bytes()
    forms = [
        pixels,
        Pillow.fromarray(pixels),
        Pillow.open(path),
        path,
        content,
        bytearray(content),
        memoryview(content),
    ]
    for form in (*forms, data_uri(content), data_uri(content, "image/png;name=a")):
        assert same(form, pixels), form


def test_what_was_decoded_is_nobody_elses_memory():
    canvas = noise(5, 4)
    found = decode(canvas, LIMITS)
    before = found.copy()
    canvas[:] = 0
    assert np.array_equal(found, before)
    with pytest.raises(ValueError, match="read-only"):
        found[0, 0] = 1


@pytest.mark.parametrize(
    ("view", "wanted"),
    [
        (lambda a: a[::-1, ::-1], lambda a: a[::-1, ::-1]),
        (lambda a: a[:, :, ::-1], lambda a: a[:, :, ::-1]),
        (lambda a: a[::2, 1::3], lambda a: a[::2, 1::3]),
        (lambda a: np.asfortranarray(a), lambda a: a),
        (lambda a: a[:, :, 0], lambda a: np.repeat(a[:, :, :1], 3, 2)),
        (lambda a: a[:, :, :1], lambda a: np.repeat(a[:, :, :1], 3, 2)),
        (lambda a: np.broadcast_to(a[:1, :1], (6, 5, 3)), lambda a: np.tile(a[:1, :1], (6, 5, 1))),
        (lambda a: a.view(np.recarray), lambda a: a),
    ],
)
def test_arrays_of_any_layout(view, wanted):
    pixels = noise(12, 9)
    pixels.flags.writeable = False
    assert same(view(pixels), np.asarray(wanted(pixels)))


BAD_ARRAYS = [
    np.zeros((4, 4, 3), np.float32),
    np.full((4, 4, 3), np.nan),
    np.zeros((4, 4, 3), np.int64),
    np.zeros((4, 4, 3), bool),
    np.zeros((4, 4, 3), np.uint16),
    np.zeros((4, 4, 3), object),
    np.zeros((4, 4, 2), np.uint8),
    np.zeros((4, 4, 5), np.uint8),
    np.zeros((2, 4, 4, 3), np.uint8),
    np.zeros(4, np.uint8),
    np.uint8(4),
    np.zeros((0, 4, 3), np.uint8),
    np.zeros((4, 0, 3), np.uint8),
]


@pytest.mark.parametrize("array", BAD_ARRAYS, ids=lambda a: f"{a.dtype}{np.shape(a)}")
def test_arrays_that_are_no_images_are_refused(array):
    with pytest.raises(MediaError, match=r"no image|pixels|not uint8"):
        decode(array, LIMITS)


def test_transparency_is_shown_on_white():
    pixels = noise(6, 5, channels=4)
    alpha = pixels[:, :, 3:].astype(float) / 255
    wanted = pixels[:, :, :3] * alpha + 255 * (1 - alpha)
    for form in (pixels, Pillow.fromarray(pixels), png(pixels)):
        assert np.abs(decode(form, LIMITS) - wanted).max() <= 1
    clear = np.zeros((2, 2, 4), np.uint8)
    assert (decode(png(clear), LIMITS) == 255).all()
    grey = Pillow.fromarray(
        np.dstack([np.full((2, 2), 9, np.uint8), np.array([[0, 255], [255, 0]], np.uint8)]), "LA"
    )
    assert decode(file_of(grey), LIMITS)[:, :, 0].tolist() == [[255, 9], [9, 255]]


def test_a_palette_with_a_transparent_colour():
    picture = Pillow.new("P", (2, 1))
    picture.putpalette([10, 20, 30, 40, 50, 60])
    picture.putdata([0, 1])
    assert decode(file_of(picture), LIMITS).tolist() == [[[10, 20, 30], [40, 50, 60]]]
    assert decode(file_of(picture, transparency=1), LIMITS).tolist() == [
        [[10, 20, 30], [255, 255, 255]]
    ]
    assert decode(file_of(picture, "GIF", transparency=0), LIMITS)[0, 0].tolist() == [255, 255, 255]


def test_sixteen_bits_keep_their_upper_eight():
    rows = np.array([[0, 255, 256, 32768, 65535]], np.uint16)
    assert decode(png16(rows), LIMITS)[0, :, 0].tolist() == [0, 0, 1, 128, 255]


def test_a_cmyk_jpeg_has_its_colours():
    red = Pillow.new("RGB", (16, 16), (250, 10, 10)).convert("CMYK")
    found = decode(file_of(red, "JPEG", quality=95), LIMITS)
    assert np.abs(found.astype(int) - (250, 10, 10)).max() <= 6


@pytest.mark.parametrize(("tag", "turn"), [(1, 0), (3, 2), (6, -1), (8, 1)])
def test_photographs_stand_upright(tag, turn):
    pixels = noise(16, 8)
    exif = Pillow.Exif()
    exif[0x0112] = tag
    assert same(file_of(Pillow.fromarray(pixels), exif=exif), np.rot90(pixels, turn))


def test_of_a_moving_image_the_first_frame_is_shown():
    frames = [Pillow.new("RGB", (8, 8), colour) for colour in ("red", "lime")]
    for kind in ("GIF", "PNG", "TIFF"):
        content = file_of(frames[0], kind, save_all=True, append_images=frames[1:])
        assert (decode(content, LIMITS) == (255, 0, 0)).all(), kind


BROKEN = {
    "nothing": b"",
    "no image": b"hello " * 50,
    "a truncated PNG": png(noise(64, 64))[:-3000],
    "a header alone": png(noise(64, 64))[:33],
    "a truncated JPEG": file_of(Pillow.fromarray(noise(64, 64)), "JPEG")[:400],
    "a broken checksum": png(noise(9, 9)).replace(b"IDAT", b"IDAX"),
    "an SVG": SVG,
    "a sound": b"RIFF\x24\0\0\0WAVEfmt " + bytes(30),
    "a PDF": b"%PDF-1.7\n" + bytes(30),
    "PostScript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
    "too long text": b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", bytes(13)),
    "a path": "/etc/hostname",
    "an address": "https://example.org/x.png",
    "a file address": "file:///etc/hostname",
    "a data URI without base64": "data:image/png,%89PNG",
    "a data URI of no base64": "data:image/png;base64,@@@@",
    "a data URI that is cut off": "data:image/png;base64",
    "a data URI of an SVG": data_uri(SVG, "image/svg+xml"),
    "a number": 7,
    "None": None,
    "a list": [[0, 0], [0, 0]],
    "floats": Pillow.new("F", (4, 4)),
    "whole numbers": Pillow.new("I", (4, 4)),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_a_typed_error(name):
    with pytest.raises(MediaError) as told:
        decode(BROKEN[name], LIMITS)
    assert "0x" not in str(told.value)


def test_an_svg_is_called_by_its_name():
    with pytest.raises(MediaError, match="SVG drawing"):
        decode(SVG, LIMITS)


@pytest.mark.parametrize("size", [(60_000, 60_000), (20_000, 100), (100, 20_000), (10_000, 10_000)])
def test_what_is_too_large_is_refused_from_its_header(size):
    content = bomb(*size)
    assert len(content) < 20_000
    tracemalloc.start()
    try:
        for form in (content, data_uri(content)):
            with pytest.raises(MediaError, match=r"pixels|exceeds limit"):
                decode(form, LIMITS)
        taken = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert taken < 2**20


def test_what_is_too_large_in_memory_is_refused_before_it_is_copied():
    tracemalloc.start()
    try:
        with pytest.raises(MediaError, match="60000 x 60000 pixels"):
            decode(np.broadcast_to(np.uint8(7), (60_000, 60_000, 3)), LIMITS)
        with pytest.raises(MediaError, match="20000 x 1 pixels"):
            decode(np.zeros((1, 20_000), np.uint8), LIMITS)
        taken = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert taken < 2**20


def test_files_that_are_too_long_are_not_read(tmp_path):
    limits = MediaLimits(bytes=1000)
    path = tmp_path / "x.png"
    with path.open("wb") as file:
        file.truncate(10**12)  # a hole
    for form in (path, bytes(1001), data_uri(bytes(1001))):
        with pytest.raises(MediaError, match="1000"):
            decode(form, limits)


def test_paths_are_of_files(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path, said in (
        (tmp_path, "not a file"),
        (tmp_path / "pipe", "not a file"),
        (tmp_path / "none", "No such file"),
    ):
        with pytest.raises(MediaError, match=said):
            decode(path, LIMITS)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_damaged_files_are_pixels_or_a_typed_error(data):
    """Any change of any byte, and any cut."""
    kind = data.draw(st.sampled_from(("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP")))
    content = bytearray(file_of(Pillow.fromarray(noise(19, 11)), kind))
    for _ in range(data.draw(st.integers(0, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    content = content[: data.draw(st.integers(0, len(content)))]
    try:
        found = decode(bytes(content), MediaLimits(pixels=10_000, side=500))
    except MediaError:
        return
    assert found.dtype == np.uint8
    assert found.ndim == 3
    assert found.shape[0] * found.shape[1] <= 10_000
