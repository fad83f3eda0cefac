"""Images and videos: taken in from whatever form people have them in, stored once by content."""

from turnwise.media.store import MediaLimits, MediaStore
from turnwise.media.take import take_in, told

__all__ = ["MediaLimits", "MediaStore", "take_in", "told"]
