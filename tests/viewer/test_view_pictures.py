"""Images in the report: those that the model saw, proven, inside the page; whatever is not
such an image is told of."""

from __future__ import annotations

import json
from base64 import b64decode
from html.parser import HTMLParser
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image as Pillow

import turnwright as tw
from turnwright.media import MediaStore
from turnwright_view import conversation
from turnwright_view.conversation import Gallery
from turnwright_view.report import render_report

HOSTILE = '"><script>alert(1)</script><img src=x onerror=alert(1)>\u202e'


class Page(HTMLParser):
    """Images with their attributes, and the text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.images: list[dict[str, str | None]] = []
        self.tags: set[str] = set()
        self.policy = ""
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)
        found = dict(attrs)
        if tag == "img":
            self.images.append(found)
        if found.get("http-equiv") == "Content-Security-Policy":
            self.policy = str(found["content"])

    def handle_data(self, data: str) -> None:
        self.text += data


def noise(number: int, height: int = 32, width: int = 32) -> Any:
    return np.random.default_rng(number).integers(0, 256, (height, width, 3), np.uint8)


def write(run: Path, *contents: Any) -> Page:
    """A run of one episode whose turns were shown these contents, as a page."""
    run.mkdir(exist_ok=True)
    turns = [
        {"messages": [{"role": "user", "content": c}], "reply": {"role": "assistant", "content": "up"}}  # noqa: E501
        for c in contents
    ]  # fmt: skip
    key = {"phase": "train", "step": 0, "task": "t", "sample": 0, "attempt": 0}
    row = {
        "key": key,
        "task": {"id": "t"},
        "stop": "done",
        "reward": 1.0,
        "spans": [],
        "turns": turns,
    }
    (run / "trajectories.jsonl").write_text(json.dumps(row) + "\n")
    return Page(render_report(run))


def test_the_page_holds_the_very_pixels(tmp_path: Path) -> None:
    store = MediaStore(tmp_path / "media")
    refs = [store.put(tw.Image(noise(n), alt=HOSTILE)) for n in range(3)]
    page = write(tmp_path, *([ref.to_dict()] for ref in refs))
    assert len(page.images) == 3
    for number, image in enumerate(page.images):
        kind, _, body = str(image["src"]).partition(",")
        assert kind == "data:image/png;base64"
        assert (np.asarray(Pillow.open(BytesIO(b64decode(body)))) == noise(number)).all()
        assert image["alt"] == HOSTILE.replace("\u202e", "⟨U+202E⟩")
    assert page.tags.isdisjoint({"script", "iframe", "link"})
    assert "default-src 'none'; img-src data:; style-src" in page.policy
    assert "(nothing)" not in page.text


def test_texts_stand_beside_images_and_large_ones_are_scaled_down(tmp_path: Path) -> None:
    store = MediaStore(tmp_path / "media")
    wide = store.put(tw.Image(noise(0, 300, 900), max_pixels=90_000))
    clip = store.put(tw.Video([noise(n) for n in range(10)], fps=2))
    page = write(tmp_path, ["Look: ", wide.to_dict(), " and there?"], [clip.to_dict()])
    assert "Look: [image" in page.text
    assert " and there?" in page.text
    assert "900 × 300, sent with at most 90000 pixels" in page.text
    assert "2 more frames" in page.text
    assert len(page.images) == 1 + conversation.MAX_FRAMES
    first = Pillow.open(BytesIO(b64decode(str(page.images[0]["src"]).partition(",")[2])))
    assert max(first.size) == conversation.MAX_SIDE


def test_what_is_no_such_image_is_told_of_and_not_shown(tmp_path: Path) -> None:
    store = MediaStore(tmp_path / "media")
    refs = [store.put(tw.Image(noise(n))) for n in range(4)]
    path = [tmp_path / "media" / f"{ref.sha256}.png" for ref in refs]
    path[0].write_bytes(path[1].read_bytes())  # another image
    path[1].write_text('<svg xmlns="http://www.w3.org/2000/svg" onload="alert(1)"/>')
    path[2].unlink()
    secret = tmp_path / "secret.png"
    secret.write_bytes(path[3].read_bytes())
    named = [
        {"type": "image", "image": name, "width": 3, "height": 3}
        for name in ("../secret", "x" * 64, HOSTILE, 7, None, "")
    ]
    odd: list[Any] = [
        {"type": "image"},
        {"type": "video", "frames": 3},
        {"type": "image", "image": {}, "width": "x"},
    ]
    page = write(
        tmp_path, *([ref.to_dict()] for ref in refs[:3]), *([part] for part in (*named, *odd))
    )
    assert page.images == []
    assert "script" not in page.tags
    assert "img-src" not in page.policy
    for piece in (
        "have another hash than its name",
        "not in the media store",
        "invalid image name",
        "unreadable image",
    ):
        assert piece in page.text, piece


def test_a_page_has_room_for_so_many(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(conversation, "MAX_PICTURES", 5)
    store = MediaStore(tmp_path / "media")
    refs = [store.put(tw.Image(noise(n))) for n in range(8)]
    page = write(tmp_path, *([ref.to_dict()] for ref in refs))
    assert len(page.images) == 5
    assert page.text.count("not rendered: the page is full") == 3
    monkeypatch.setattr(conversation, "MAX_BYTES", 4000)
    (first, second, *_) = [next(Gallery(tmp_path).pictures(ref.to_dict())) for ref in refs]
    assert first.source
    assert second.source  # each gallery has room of its own
    gallery = Gallery(tmp_path)
    rendered = [next(gallery.pictures(ref.to_dict())).source for ref in refs]
    assert 0 < sum(map(bool, rendered)) < 5


def test_the_blind_control_stands_beside_success(tmp_path: Path) -> None:
    tmp_path.joinpath("summary.json").write_text(
        json.dumps(
            {"success_before": 0.3, "success_after": 0.95, "success_after_ci": [0.92, 0.97], "success_before_ci": [0.25, 0.36],  # noqa: E501
             "success_blind": 0.04, "success_blind_ci": [0.02, 0.07], "n_eval": 256, "rl_steps": 4}
        )
    )  # fmt: skip
    text = " ".join(Page(render_report(tmp_path)).text.split())
    assert "with every image gray the same policy has 4.0%" in text
    assert "after, every image gray" in text
    assert "2.0% – 7.0%" in text
    assert "The loss of success measures the use of the pixels" in text
