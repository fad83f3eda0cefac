"""The nouns of Turnwise; the standard library is all that they need."""

from turnwise.types.failure import Failure, FailureKind
from turnwise.types.media import Image, ImageRef, Media, Placed, Video, VideoRef, keyed, scaled, within
from turnwise.types.message import (
    NO_AUDIO,
    Message,
    Messages,
    Part,
    ToolCall,
    as_messages,
    in_words,
    is_audio,
    is_picture,
    read_part,
    seen,
)
from turnwise.types.routes import ROUTES, Routes, SpanRoutes
from turnwise.types.sampling import Sampling, SamplingDistribution
from turnwise.types.stop import Status, StopReason
from turnwise.types.task import Task
from turnwise.types.trajectory import FAILED_ATTEMPT, Group, Key, Origin, Sample, Span, Trajectory, Turn

__all__ = [
    "FAILED_ATTEMPT",
    "NO_AUDIO",
    "ROUTES",
    "Failure",
    "FailureKind",
    "Group",
    "Image",
    "ImageRef",
    "Key",
    "Media",
    "Message",
    "Messages",
    "Origin",
    "Part",
    "Placed",
    "Routes",
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
    "as_messages",
    "in_words",
    "is_audio",
    "is_picture",
    "keyed",
    "read_part",
    "scaled",
    "seen",
    "within",
]
