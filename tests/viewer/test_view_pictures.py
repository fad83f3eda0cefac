"""Images in a page that is one file: those that the model saw, proven, inside the file; whatever
is not such an image is left out."""

from __future__ import annotations

import json
from base64 import b64decode
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from kit.viewing import SentPage, sent
from PIL import Image as Pillow

import turnwright as tw
from turnwright.media import MediaStore
from turnwright_view.web import media

HOSTILE = '"><script>alert(1)</script><img src=x onerror=alert(1)>\u202e'


def noise(number: int, height: int = 32, width: int = 32) -> Any:
    return np.random.default_rng(number).integers(0, 256, (height, width, 3), np.uint8)


def write(run: Path, *contents: Any) -> SentPage:
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
    return sent([run], run / "sent.html")


def shown(page: SentPage) -> list[dict[str, Any]]:
    """Images that the messages of the only episode refer to."""
    (episode,) = page.episodes().values()
    messages = [message for turn in episode["turns"] for message in turn["messages"]]
    return [image for message in messages for image in message["images"]]


def pixels(png: str) -> Any:
    return np.asarray(Pillow.open(BytesIO(b64decode(png))))


def test_the_file_holds_the_very_pixels(tmp_path: Path) -> None:
    store = MediaStore(tmp_path / "media")
    refs = [store.put(tw.Image(noise(n), alt=HOSTILE)) for n in range(3)]
    page = write(tmp_path, *([ref.to_dict()] for ref in refs))
    assert [image["hash"] for image in shown(page)] == [ref.sha256 for ref in refs]
    for number, ref in enumerate(refs):
        assert (pixels(page.images()[ref.sha256]) == noise(number)).all()
    assert "img" not in page.tags
    assert "img-src data:" in page.policy


def test_texts_stand_beside_images_and_large_ones_are_scaled_down(tmp_path: Path) -> None:
    store = MediaStore(tmp_path / "media")
    wide = store.put(tw.Image(noise(0, 300, 900), max_pixels=90_000))
    clip = store.put(tw.Video([noise(n) for n in range(10)], fps=2))
    page = write(tmp_path, ["Look: ", wide.to_dict(), " and there?"], [clip.to_dict()])
    (episode,) = page.episodes().values()
    assert episode["turns"][0]["messages"][0]["text"] == "Look:  and there?"
    assert shown(page)[0] == {"hash": wide.sha256, "width": 900, "height": 300}
    assert len(shown(page)) == 11
    assert len(page.images()) == 11
    assert max(pixels(page.images()[wide.sha256]).shape) == media.MAX_SIDE


def test_what_is_no_such_image_is_not_in_the_file(tmp_path: Path) -> None:
    store = MediaStore(tmp_path / "media")
    refs = [store.put(tw.Image(noise(n))) for n in range(5)]
    path = [tmp_path / "media" / f"{ref.sha256}.png" for ref in refs]
    path[0].write_bytes(path[1].read_bytes())  # another image
    path[1].write_text('<svg xmlns="http://www.w3.org/2000/svg" onload="alert(1)"/>')
    path[2].unlink()
    secret = tmp_path / "secret.png"
    secret.write_bytes(path[3].read_bytes())
    path[4].unlink()
    path[4].symlink_to(secret)
    named = [
        {"type": "image", "image": name, "width": 3, "height": 3}
        for name in ("../secret", "x" * 64, HOSTILE, 7, None, "")
    ]
    odd: list[Any] = [
        {"type": "image"},
        {"type": "video", "frames": [3]},
        {"type": "image", "image": {}, "width": "x"},
    ]
    page = write(
        tmp_path,
        *([refs[number].to_dict()] for number in (0, 1, 2, 4)),
        *([part] for part in (*named, *odd)),
    )
    assert page.images() == {}
    assert [image["hash"] for image in shown(page)] == [refs[n].sha256 for n in (0, 1, 2, 4)]


def test_a_file_has_room_for_so_many(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(media, "MAX_PICTURES", 5)
    store = MediaStore(tmp_path / "media")
    refs = [store.put(tw.Image(noise(n))) for n in range(8)]
    page = write(tmp_path, *([ref.to_dict()] for ref in refs))
    assert len(page.images()) == 5
    assert len(shown(page)) == 8
