"""Images and videos: decoded from any form, stored once by content."""

from turnwright.media.images import FORMATS, MediaLimits
from turnwright.media.references import has_media, media_as_bytes, media_as_text, store_media
from turnwright.media.store import MediaStore, scaled_size

__all__ = [
    "FORMATS",
    "MediaLimits",
    "MediaStore",
    "has_media",
    "media_as_bytes",
    "media_as_text",
    "scaled_size",
    "store_media",
]
