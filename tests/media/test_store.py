"""Each image is kept once by its pixels, stands on disk before anybody knows its name, and is
encoded once at most."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.pictures import file_of, noise, png
from PIL import Image as Pillow

import turnwright as tw
from turnwright.errors import MediaError
from turnwright.media import MediaLimits, MediaStore
from turnwright.types import ImageRef, VideoRef


def test_one_picture_in_many_forms_is_one_image(tmp_path):
    pixels = noise(40, 30)
    store = MediaStore(tmp_path / "media")
    given_ = [
        pixels,
        png(pixels),
        Pillow.fromarray(pixels),
        file_of(Pillow.fromarray(pixels), "BMP"),
    ]
    refs = {store.put(tw.Image(one)) for one in given_}
    (ref,) = refs
    assert (ref.width, ref.height) == (40, 30)
    assert [path.name for path in (tmp_path / "media").iterdir()] == [f"{ref.sha256}.png"]
    assert store.encoded == 1
    assert np.array_equal(store.pixels(ref), pixels)
    assert store.put(ref) is ref


def test_pixels_and_size_make_the_name():
    store = MediaStore()
    flat = np.arange(24, dtype=np.uint8)
    names = {
        store.add(flat.reshape(shape)).sha256
        for shape in ((2, 4, 3), (4, 2, 3), (1, 8, 3), (8, 1, 3))
    }
    assert len(names) == 4


def test_the_canvas_may_be_drawn_on_again(tmp_path):
    canvas, store = noise(8, 8), MediaStore(tmp_path)
    before = canvas.copy()
    one = store.put(tw.Image(canvas))
    canvas[:] = 7
    two = store.put(tw.Image(canvas))
    assert one != two
    assert np.array_equal(store.pixels(one), before)
    assert (store.pixels(two) == 7).all()


def test_another_store_reads_what_stands_on_disk(tmp_path):
    pixels = noise(20, 10)
    ref = MediaStore(tmp_path).put(tw.Image(pixels, alt="noise"))
    again = MediaStore(tmp_path)
    assert again.put(ref) == ref
    assert np.array_equal(again.pixels(ref), pixels)
    assert again.put(tw.Image(pixels)) == ref
    assert again.encoded == 0
    assert again.put(ImageRef(ref.sha256)) == ref  # with the size that it lacked


def test_what_is_not_there_or_was_changed_is_an_error(tmp_path):
    store = MediaStore(tmp_path)
    for other in (ImageRef("ab" * 32, 4, 4), ImageRef("../../etc/passwd", 4, 4)):
        with pytest.raises(MediaError, match="is not in the media store"):
            store.put(other)
        with pytest.raises(MediaError, match="is not in the media store"):
            MediaStore().pixels(other)
    ref = store.put(tw.Image(noise(9, 9)))
    (tmp_path / f"{ref.sha256}.png").write_bytes(png(noise(9, 9, seed=1)))
    with pytest.raises(MediaError, match="was changed"):
        MediaStore(tmp_path).pixels(ref)


@pytest.mark.parametrize("left", [0, 20, -5])
def test_a_file_that_was_cut_off_is_written_again(tmp_path, left):
    pixels = noise(9, 9)
    ref = MediaStore(tmp_path).put(tw.Image(pixels))
    path = tmp_path / f"{ref.sha256}.png"
    path.write_bytes(path.read_bytes()[:left])
    store = MediaStore(tmp_path)
    with pytest.raises(MediaError, match="is not in the media store"):
        store.put(ref)
    assert store.put(tw.Image(pixels)) == ref
    assert np.array_equal(MediaStore(tmp_path).pixels(ref), pixels)


def test_memory_for_pixels_is_bounded_where_there_is_a_disk(tmp_path):
    store = MediaStore(tmp_path, decoded_bytes=20_000)
    taken = [(store.put(tw.Image(noise(32, 32, seed))), noise(32, 32, seed)) for seed in range(20)]
    assert sum(one.nbytes for one in store._pixels.values()) <= 20_000
    for ref, pixels in taken:
        assert np.array_equal(store.pixels(ref), pixels)
        assert store.put(tw.Image(pixels)) == ref
    assert store.encoded == 20


def test_an_image_over_the_limit_of_files_is_read_again(tmp_path):
    """The limit is for what comes in; our own file of an array may be longer."""
    store = MediaStore(tmp_path, limits=MediaLimits(bytes=500), decoded_bytes=1)
    pixels = noise(40, 40)
    ref = store.put(tw.Image(pixels))
    store.put(tw.Image(noise(3, 3)))
    assert np.array_equal(store.pixels(ref), pixels)


def test_files_are_decoded_once(tmp_path, monkeypatch):
    import turnwright.media.store as module

    decoded = []
    real = module.decode
    monkeypatch.setattr(
        module, "decode", lambda value, limits: decoded.append(value) or real(value, limits)
    )
    path, pixels, store = tmp_path / "a.png", noise(9, 9), MediaStore(tmp_path / "media")
    path.write_bytes(png(pixels))
    for form in (path, path.read_bytes()):
        refs = [store.put(tw.Image(form, alt=f"{n}", max_pixels=n)) for n in range(4)]
        assert [(ref.alt, ref.max_pixels) for ref in refs] == [(f"{n}", n) for n in range(4)]
    assert len(decoded) == 2
    path.write_bytes(png(noise(10, 9, seed=1)))
    assert store.put(tw.Image(path)).width == 10


def test_scaled_images_and_their_files():
    store = MediaStore()
    ref = store.put(tw.Image(noise(100, 50), max_pixels=1250))
    assert store.pixels(ref).shape == (25, 50, 3)
    file = store.png_bytes(ref)
    assert store.png_bytes(ref) is file
    assert store.encoded == 1
    assert store.put(tw.Image(png(store.pixels(ref)))).width == 50


# Videos


def clip(count: int = 3, **more):
    return tw.Video([noise(8, 6, seed) for seed in range(count)], **more)


def test_a_clip_is_its_frames_and_when_they_are_shown():
    store = MediaStore()
    ref = store.put(clip(fps=2.0, alt="it moves"))
    assert (len(ref.frames), ref.times, ref.alt) == (3, (0.0, 0.5, 1.0), "it moves")
    whole = np.stack([noise(8, 6, seed) for seed in range(3)])
    assert store.put(tw.Video(whole, times=np.array([0, 0.5, 1.0]))) == ref
    assert store.put(tw.Video(list(ref.frames), fps=2)) == ref
    assert store.put(ref) == ref


@pytest.mark.parametrize(
    ("video", "said"),
    [
        (clip(), "fps or times"),
        (clip(fps=1.0, times=[0, 1, 2]), "fps or times"),
        (clip(fps=0), "over 0"),
        (clip(fps=-1.0), "over 0"),
        (clip(fps=math.nan), "over 0"),
        (clip(fps="2"), "over 0"),
        (clip(times=[0, 1]), "one per frame"),
        (clip(times=[0, 2, 1]), "non-decreasing"),
        (clip(times=[0, math.nan, 1]), "non-decreasing"),
        (clip(times=[0, 1, math.inf]), "non-decreasing"),
        (clip(times=[-1, 0, 1]), "non-decreasing"),
        (clip(times=["a", "b", "c"]), "must be numbers of seconds"),
        (clip(0, fps=1), "0 frames"),
        (clip(5, fps=1), "5 frames"),
        (tw.Video([noise(8, 6), noise(6, 8)], fps=1), "6 x 8, 8 x 6"),
        (tw.Video([noise(8, 6), b"no image"], fps=1), "no image"),
        (VideoRef((ImageRef("ab" * 32, 4, 4),), (0.0,)), "not in the media store"),
    ],
)
def test_what_is_no_clip_is_refused(video, said):
    with pytest.raises(MediaError, match=said):
        MediaStore(limits=MediaLimits(frames=4)).put(video)


# Blank


@pytest.mark.parametrize("directory", [True, False])
def test_a_blank_store_shows_grey_of_the_same_size_whoever_gives_the_image(tmp_path, directory):
    place = tmp_path if directory else None
    plain, blank = MediaStore(place), MediaStore(place, blank=True)
    image = tw.Image(noise(12, 8), alt="a", max_pixels=40)
    seen, grey = plain.put(image), blank.put(image)
    assert (grey.width, grey.height, grey.alt, grey.max_pixels) == (12, 8, "a", 40)
    assert grey.sha256 != seen.sha256
    assert (blank.pixels(grey) == 128).all()
    assert blank.put(seen) == grey
    assert blank.put(grey) == grey
    movie = plain.put(tw.Video([noise(12, 8, 1), noise(12, 8, 2)], fps=1, alt="b"))
    assert {(frame.sha256, frame.max_pixels) for frame in blank.put(movie).frames} == {
        (grey.sha256, 0)
    }
    assert blank.put(movie).alt == "b"
    if directory:
        assert blank.put(ImageRef(seen.sha256)) == blank.put(tw.Image(noise(12, 8)))


# Threads


@settings(max_examples=15, deadline=None)
@given(
    order=st.lists(st.integers(0, 5), min_size=16, max_size=60),
    disk=st.booleans(),
    small=st.booleans(),
)
def test_many_threads_store_each_image_once(tmp_path_factory, order, disk, small):
    """No thread is given a name before the file stands whole, and the account of memory adds up."""
    directory = tmp_path_factory.mktemp("media") if disk else None
    store = MediaStore(directory, decoded_bytes=700 if small else 2**20)
    start = threading.Barrier(8)

    def work(seeds):
        start.wait()
        for seed in seeds:
            ref = store.put(tw.Image(noise(11, 9, seed)))
            if directory is not None:
                assert np.array_equal(
                    np.asarray(Pillow.open(directory / f"{ref.sha256}.png")), noise(11, 9, seed)
                )
            assert np.array_equal(store.pixels(ref), noise(11, 9, seed))
        return len(seeds)

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(work, [order[n::8] for n in range(8)])) == len(order)
    assert store._decoded_bytes == sum(pixels.nbytes for pixels in store._pixels.values())
    if directory is not None:
        assert store.encoded == len(set(order)) == len(list(directory.iterdir()))
        assert not store._writing


def test_a_store_that_is_killed_leaves_no_half_file_under_a_name(tmp_path):
    """Drafts have names of their own, so whatever stands under a hash is whole."""
    code = (
        "import numpy as np, os, sys, threading, time, turnwright as tw\n"
        "from turnwright.media import MediaStore\n"
        "store = MediaStore(sys.argv[1])\n"
        "rng = np.random.default_rng(0)\n"
        "def kill():\n"
        "    while len(os.listdir(sys.argv[1])) < 4: time.sleep(0.003)\n"
        "    os.kill(os.getpid(), 9)\n"
        "threading.Thread(target=kill).start()\n"
        "while True: store.put(tw.Image(rng.integers(0, 256, (300, 300, 3), dtype=np.uint8)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        capture_output=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == -9, done.stderr
    files = list(tmp_path.glob("*.png"))
    assert files
    store = MediaStore(tmp_path)
    for path in files:
        if not path.name.startswith("."):
            assert store.pixels(store.put(ImageRef(path.stem))).shape == (300, 300, 3)
