"""Random numbers that depend on names, not on order."""

from __future__ import annotations

from hashlib import blake2b

from turnwise.types import EpisodeKey

EVALUATION = "eval-"
"""What the phase of an evaluation's keys begins with."""


def derive_seed(seed: int, *names: object) -> int:
    """64 bits that depend on the run's seed and these names alone (BLAKE2b)."""
    text = "\0".join([str(seed), *map(str, names)])
    return int.from_bytes(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


def call_seed(episode: int, call: int) -> int:
    """The seed of one call of an episode: the next term of a Weyl sequence, so calls of an episode never share one."""
    return (episode + (call + 1) * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF


def episode_seed(seed: int, key: EpisodeKey) -> int:
    """The seed of one episode.

    All evaluations of a run (phases that begin with `eval-`) draw the same numbers, whatever their name and step: so what
    differs between two of them is what the policy made of the same luck (common random numbers), not the luck.
    """
    phase, step = ("eval", 0) if key.phase.startswith(EVALUATION) else (key.phase, key.step)
    return derive_seed(seed, phase, step, key.task, key.sample, key.attempt)
