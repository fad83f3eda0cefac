"""The nouns of Turnwise; the standard library is all that they need."""

from turnwise.types.failure import Failure, FailureKind
from turnwise.types.message import ImageRef, Message, Messages, Part, ToolCall, as_messages
from turnwise.types.stop import Status, StopReason
from turnwise.types.task import Task
from turnwise.types.trajectory import FAILED_ATTEMPT, Group, Key, Origin, Sample, Span, Trajectory, Turn

__all__ = [
    "FAILED_ATTEMPT",
    "Failure",
    "FailureKind",
    "Group",
    "ImageRef",
    "Key",
    "Message",
    "Messages",
    "Origin",
    "Part",
    "Sample",
    "Span",
    "Status",
    "StopReason",
    "Task",
    "ToolCall",
    "Trajectory",
    "Turn",
    "as_messages",
]
