"""Engines: everything that samples tokens."""

from turnwright.engines.distribution import token_logprobs
from turnwright.engines.policy_engine import PolicyEngine
from turnwright.engines.protocols import (
    AcceptsPixelSource,
    Engine,
    Finish,
    Generation,
    GivesAlternatives,
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
from turnwright.engines.scripted import ScriptedEngine
from turnwright.types import Sampling

__all__ = [
    "AcceptsPixelSource",
    "Engine",
    "Finish",
    "Generation",
    "GivesAlternatives",
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
