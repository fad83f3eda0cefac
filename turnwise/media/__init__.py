"""Images and videos: taken in from whatever form people have them in, stored once by content."""

from turnwise.media.decode import FORMATS, MediaLimits
from turnwise.media.store import MediaStore, shown_size
from turnwise.media.take import packed, take_in, told

__all__ = ["FORMATS", "MediaLimits", "MediaStore", "packed", "shown_size", "take_in", "told"]
