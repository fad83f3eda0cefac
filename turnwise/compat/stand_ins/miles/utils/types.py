"""Samples of Miles' rollouts: those of slime."""

from slime.utils.types import Sample

__all__ = ["Sample"]
