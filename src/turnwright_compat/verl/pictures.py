"""Images and videos of verl's tools; the model's processor resizes them."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image

from turnwright.types import Video


def process_image(image: Any, image_patch_size: int = 14) -> Image.Image:
    """Return an image as PIL: given as such, or as a dict with `image` (PIL, path) or `bytes`."""
    if isinstance(image, dict):
        if image.get("bytes") is not None:
            image = BytesIO(image["bytes"])
        else:
            image = image.get("image", image.get("path"))

    if isinstance(image, str):
        image = image.removeprefix("file://")
    if isinstance(image, bytes):
        image = BytesIO(image)
    picture = image if isinstance(image, Image.Image) else Image.open(image)
    return picture.convert("RGB")


def process_video(
    video: dict[str, Any],
    image_patch_size: int = 14,
    nframes: int | None = None,
    fps: float | None = None,
    fps_min_frames: int | None = None,
    fps_max_frames: int | None = None,
    **settings: Any,
) -> Video:
    """Return a video: a dict whose `video` is a list of frames or a file, with `fps`, `nframes`,
    `min_frames`, `max_frames`.

    Of a file, frames at even distances are chosen, the first and the last among them.
    """
    if not isinstance(video, dict) or "video" not in video:
        raise NotImplementedError('a video is a dict {"video": [frames] or "file.mp4", "fps": ...}')

    source = video["video"]
    if isinstance(source, (list, tuple)):
        frames = [process_image(frame) for frame in source]
        return Video(frames, video.get("fps") or video.get("sample_fps") or fps or 2.0)

    frames, file_fps = _decode(str(source).removeprefix("file://"))
    duration = len(frames) / file_fps
    wanted_fps = video.get("fps") or fps or 2.0
    count = video.get("nframes") or nframes or round(duration * wanted_fps)
    least = video.get("min_frames") or fps_min_frames or 4
    most = video.get("max_frames") or fps_max_frames or 768
    count = min(max(count, least), most, len(frames))

    last = len(frames) - 1
    chosen = [frames[round(n * last / max(1, count - 1))] for n in range(count)]
    return Video(chosen, count / duration)


def _decode(path: str) -> tuple[list[Image.Image], float]:
    try:
        import av
    except ImportError as error:
        raise ImportError(f"decoding {Path(path).name} needs PyAV: pip install av") from error
    with av.open(path) as container:
        stream = container.streams.video[0]
        frames = [frame.to_image() for frame in container.decode(stream)]
        return frames, float(stream.average_rate or 25)
