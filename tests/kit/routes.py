"""An engine that tells, for every position, experts that are a function of the ids up to it, and
what must then be recorded."""

from __future__ import annotations

import random
import zlib
from array import array

import numpy as np

import turnwright as tw
from kit.histories import Speaker
from kit.rollouts import Sampler
from turnwright.engines import Generation
from turnwright.types import ExpertRoutes, SpanRoutes

LAYERS, K = 3, 2


def experts(ids) -> np.ndarray:
    """[len(ids), LAYERS, K] experts that depend on all ids up to each."""
    digests, so_far = [], 0
    for token in ids:
        so_far = zlib.crc32(array("q", [token]).tobytes(), so_far)
        digests.append([so_far >> shift & 255 for shift in (0, 5, 9, 13, 17, 21)])
    return np.array(digests, dtype=np.uint8).reshape(len(digests), LAYERS, K)


class Routed:
    """Mixed into an engine: it tells routes from where it was asked, or now and
    then from earlier on."""

    told = 0
    """Positions told."""

    async def generate(self, request: tw.Request) -> Generation:
        made = await super().generate(request)
        if "routes" in request.extras:
            rng = random.Random(request.seed + 1)
            start = rng.choice(
                [0, request.routes_from, request.routes_from, rng.randint(0, request.routes_from)]
            )
            fed = [*request.ids, *made.ids][: -1 if made.ids else None]
            told = experts(fed)[start:]
            made.extras = {"routes": (start, told if rng.random() < 0.5 else ExpertRoutes.of(told))}
            self.told += len(told)
        return made


class Routing(Routed, Sampler):
    """Samples ids at random, and tells routes."""


class Speaking(Routed, Speaker):
    """Thinks and calls tools, and tells routes."""


def check(trajectory: tw.Trajectory) -> int:
    """Hold every path's routes to its ids; every position whose next id was sampled in
    a recorded turn has them.

    Returns:
        How many positions have them.
    """
    known, routes = 0, SpanRoutes(trajectory)
    for turn in (*trajectory.failed_turns, *trajectory.turns):
        leaf = turn.spans[-1] if turn.spans else turn.prompt
        ids, (got, valid) = trajectory.path(leaf), routes.for_chain(trajectory.chain(leaf))
        assert got.shape == (len(ids), LAYERS, K)
        assert all(valid[: len(ids) - 1])
        kept = np.array(valid, dtype=bool)
        assert (np.asarray(got)[kept] == experts(ids)[kept]).all()
    for sample in trajectory.samples():
        kept = np.array(sample.routes_mask, dtype=bool)
        assert len(sample.routes_mask) == len(sample.ids)
        assert sample.routes.shape == (len(sample.ids), LAYERS, K)
        assert (np.asarray(sample.routes)[kept] == experts(sample.ids)[kept]).all()
        assert not np.asarray(sample.routes)[~kept].any()
        known += int(kept.sum())
    return known
