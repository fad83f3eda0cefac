"""Engines: everything that samples tokens."""

from turnwise.engines.base import (
    AcceptsPixelSource,
    Engine,
    Finish,
    Generation,
    HasContextLimit,
    HasRenderer,
    MissingLogprobs,
    NeedsRenderer,
    Request,
    StopText,
    SupportsPause,
    SupportsSleep,
    SupportsWeightUpdate,
    check_generation,
)
from turnwise.engines.distribution import token_logprobs
from turnwise.engines.policies import PolicyEngine
from turnwise.engines.scripted import ScriptedEngine
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
    "PolicyEngine",
    "Request",
    "Sampling",
    "ScriptedEngine",
    "StopText",
    "SupportsPause",
    "SupportsSleep",
    "SupportsWeightUpdate",
    "check_generation",
    "token_logprobs",
]
