"""The nouns of Turnwise; the standard library is all that they need."""

from turnwise.types.failure import Failure, FailureKind
from turnwise.types.media import (
    Image,
    ImageRef,
    Media,
    MediaPlacement,
    Video,
    VideoRef,
    ids_with_media_keys,
    limit_pixels,
    placements_between,
)
from turnwise.types.message import (
    NO_AUDIO,
    ContentPart,
    Message,
    Messages,
    ToolCall,
    alt_text,
    as_messages,
    is_audio,
    is_image_object,
    is_media,
    read_part,
)
from turnwise.types.routes import ROUTES, ExpertRoutes, SpanRoutes
from turnwise.types.sampling import Sampling, SamplingDistribution
from turnwise.types.stop import Status, StopReason
from turnwise.types.task import Task
from turnwise.types.trajectory import FAILED_ATTEMPT, EpisodeKey, Group, Origin, Sample, Span, Trajectory, Turn

__all__ = [
    "FAILED_ATTEMPT",
    "NO_AUDIO",
    "ROUTES",
    "ContentPart",
    "EpisodeKey",
    "ExpertRoutes",
    "Failure",
    "FailureKind",
    "Group",
    "Image",
    "ImageRef",
    "Media",
    "MediaPlacement",
    "Message",
    "Messages",
    "Origin",
    "Sample",
    "Sampling",
    "SamplingDistribution",
    "Span",
    "SpanRoutes",
    "Status",
    "StopReason",
    "Task",
    "ToolCall",
    "Trajectory",
    "Turn",
    "Video",
    "VideoRef",
    "alt_text",
    "as_messages",
    "ids_with_media_keys",
    "is_audio",
    "is_image_object",
    "is_media",
    "limit_pixels",
    "placements_between",
    "read_part",
]
