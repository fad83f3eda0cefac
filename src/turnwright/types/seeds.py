"""Seeds derived from names, independent of execution order."""

from __future__ import annotations

from hashlib import blake2b

from turnwright.types import EpisodeKey

EVALUATION = "eval-"
"""Prefix of evaluation phases in episode keys."""


def derive_seed(seed: int, *names: object) -> int:
    """Return 64 bits that depend only on the run's seed and these names (BLAKE2b)."""
    text = "\0".join([str(seed), *map(str, names)])
    digest = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def call_seed(episode: int, call: int) -> int:
    """Return the seed of one call.

    Seeds are terms of a Weyl sequence, so calls of an episode never share one.
    """
    return (episode + (call + 1) * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF


def episode_seed(seed: int, key: EpisodeKey) -> int:
    """Return the seed of one episode.

    All evaluations of a run (phases that begin with `eval-`) use the same seeds, whatever their
    name and step. A difference between two evaluations is then due to the policy, not to chance
    (common random numbers).
    """
    if key.phase.startswith(EVALUATION):
        return derive_seed(seed, "eval", 0, key.task, key.sample, key.attempt)
    return derive_seed(seed, key.phase, key.step, key.task, key.sample, key.attempt)
