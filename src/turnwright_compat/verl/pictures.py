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
        image = (
            BytesIO(image["bytes"])
            if image.get("bytes") is not None
            else image.get("image", image.get("path"))
        )
    if isinstance(image, str):
        image = image.removeprefix("file://")
    if isinstance(image, bytes):
        image = BytesIO(image)
    return (image if isinstance(image, Image.Image) else Image.open(image)).convert("RGB")


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
    `min_frames`, `max_frames`."""
    if not isinstance(video, dict) or "video" not in video:
        raise NotImplementedError('a video is a dict {"video": [frames] or "file.mp4", "fps": ...}')
    source = video["video"]
    wanted = video.get("fps") or fps or 2.0
    if isinstance(source, (list, tuple)):
        return Video(
            [process_image(frame) for frame in source],
            video.get("fps") or video.get("sample_fps") or fps or 2.0,
        )
    frames, rate = _decode(str(source).removeprefix("file://"))
    duration = len(frames) / rate
    count = video.get("nframes") or nframes or round(duration * wanted)
    least, most = (
        video.get("min_frames") or fps_min_frames or 4,
        video.get("max_frames") or fps_max_frames or 768,
    )
    count = min(max(count, least), most, len(frames))
    chosen = [frames[round(n * (len(frames) - 1) / max(1, count - 1))] for n in range(count)]
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
