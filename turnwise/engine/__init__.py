"""Whatever samples tokens."""

from turnwise.engine.base import (
    AcceptsPixelSource,
    Engine,
    Finish,
    Generation,
    HasContextLimit,
    HasRenderer,
    MissingLogprobs,
    NeedsRenderer,
    Request,
    SupportsPause,
    SupportsSleep,
    SupportsWeightUpdate,
)
from turnwise.engine.distribution import token_logprobs
from turnwise.engine.scripted import ScriptedEngine
from turnwise.engine.stops import StopText
from turnwise.types import Sampling

__all__ = [
    "AcceptsPixelSource",
    "Engine",
    "Finish",
    "Generation",
    "HasContextLimit",
    "HasRenderer",
    "MissingLogprobs",
    "NeedsRenderer",
    "Request",
    "Sampling",
    "ScriptedEngine",
    "StopText",
    "SupportsPause",
    "SupportsSleep",
    "SupportsWeightUpdate",
    "token_logprobs",
]
