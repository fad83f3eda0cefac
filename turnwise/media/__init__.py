"""Images and videos: taken in from whatever form people have them in, stored once by content."""

from turnwise.media.store import MediaLimits, MediaStore, shown_size
from turnwise.media.take import take_in, told

__all__ = ["MediaLimits", "MediaStore", "shown_size", "take_in", "told"]
