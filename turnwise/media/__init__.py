"""Images and videos: taken in from whatever form people have them in, stored once by content."""

from turnwise.media.decode import FORMATS, MediaLimits
from turnwise.media.store import MediaStore, scaled_size
from turnwise.media.take import media_as_bytes, media_as_text, store_media

__all__ = ["FORMATS", "MediaLimits", "MediaStore", "media_as_bytes", "media_as_text", "scaled_size", "store_media"]
